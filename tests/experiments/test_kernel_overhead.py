"""The kernel's overhead: that like is compared with like, and what the claims make of records."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from experiments.kernel_overhead import (
    BATCHES,
    CONTEXTS,
    CPU_SET,
    TIMED,
    Config,
    claims,
    decoding_engine,
    end_to_end,
    make_problem,
    measure_kernel,
    measure_step,
    plot,
    run,
    what_it_saw,
)
from pagedjax.config import ModelConfig
from pagedjax.errors import ConfigError
from pallas_kernels import flash_attention, paged_decode, standard_attention

TINY = ModelConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
SMALL = Config(context=20, batch=3, heads=2, head_dim=32, rounds=3)


def _kernel(batch: int, context: int, ratio: float, platform: str) -> dict[str, Any]:
    config = dataclasses.asdict(Config("kernel", context, batch))
    return config | {"platform": platform, "device": f"a {platform}", "backend": "triton", "ratio": ratio}


def _step(batch: int, context: int, share: float, platform: str) -> dict[str, Any]:
    config = dataclasses.asdict(Config("step", context, batch))
    return config | {"platform": platform, "device": f"a {platform}", "backend": "triton", "share": share}


def _records(platform: str, ratio: float = 1.25, share: float = 0.2) -> pd.DataFrame:
    kernels = [_kernel(batch, context, ratio, platform) for batch in BATCHES for context in CONTEXTS]
    return pd.DataFrame([*kernels, _step(8, 64, share, platform), _step(32, 256, share / 2, platform)])


def _verdicts(records: pd.DataFrame) -> list[str]:
    return [claim.verdict for claim in claims(records)]


def test_the_ways_that_are_compared_compute_the_same():
    problem = make_problem(SMALL)
    assert sorted(problem.strewn.ravel().tolist()) == problem.in_order.ravel().tolist() == list(range(1, 7))
    assert problem.strewn.tolist() != problem.in_order.tolist()
    paged = paged_decode(problem.q, *problem.pools, problem.strewn, problem.lens)
    for attention in (flash_attention, standard_attention):
        right = attention(problem.q[:, None], *problem.runs, kv_lens=problem.lens)[:, 0]
        assert jnp.abs(paged - right).max() < 1e-5


def test_a_kernel_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.kernel_overhead.flash_attention", lambda q, k, v, kv_lens: 1.1 * q)
    with pytest.raises(AssertionError, match="differ"):
        measure_kernel(SMALL)


def test_the_record_of_a_kernel():
    (record,) = run(SMALL)
    assert record["platform"] == "cpu" and record["backend"] == record["baseline_backend"] == "xla"
    assert record["used_dtype"] == "float32"
    assert record["ratio"] == pytest.approx(record["paged_us"] / record["contiguous_us"])
    assert record["ratio_low"] <= record["ratio_high"]
    timed = {name for name, value in record.items() if isinstance(value, float)}
    assert timed <= set(TIMED)


def test_the_attention_that_is_timed_is_that_of_the_step():
    engine = decoding_engine(Config("step", context=24, batch=3, block_size=4, rounds=6), TINY)
    for _ in range(6):
        engine.step()
        lens, table = what_it_saw(engine)
        running = [seq for group in engine.scheduler.roster.running for seq in group.sequences]
        assert lens.tolist() == [len(seq.token_ids) - 1 for seq in running]  # the newest is not in the pool yet
        assert all(np.count_nonzero(row) == -(-n // 4) for row, n in zip(table, lens, strict=True))
        assert lens.min() >= 20 and lens.max() <= 32
    assert engine.has_unfinished()


def test_the_record_of_a_step():
    record = measure_step(Config("step", context=24, batch=3, block_size=4, rounds=3), TINY)
    assert 0 < record["share"] == pytest.approx(record["attention_us"] / record["step_us"])
    assert record["mean_context"] == pytest.approx(24, abs=4)


def test_end_to_end_is_what_the_contiguous_kernel_would_save():
    assert end_to_end(0.5, 2) == pytest.approx(1 / 0.75 - 1)  # a quarter of the step less
    assert end_to_end(0.3, 1) == 0
    assert end_to_end(1, 1.26) == pytest.approx(0.26)


def test_a_cpu_decides_nothing_but_its_figures_are_shown():
    found = claims(_records("cpu"))
    assert {claim.verdict for claim in found} == {"needs an accelerator"}
    assert found[0].ours == 1.25 and all(claim.how.startswith("CPU") for claim in found)


def test_a_gpu_decides():
    reproduced, not_reproduced = "reproduced", "not reproduced"
    #                                    Fig. 18a, twice;       5 % of the kernel; a minority; end to end, twice
    assert _verdicts(_records("gpu")) == [reproduced] * 2 + [not_reproduced, "holds", reproduced, reproduced]
    assert _verdicts(_records("gpu", ratio=1.5)) == [not_reproduced] * 3 + ["holds", not_reproduced, reproduced]
    assert _verdicts(_records("gpu", ratio=1.03, share=0.6))[2:] == [
        reproduced,
        "does not hold",
        reproduced,
        not_reproduced,
    ]
    slow = _records("gpu")
    slow.loc[(slow.batch == 32) & (slow.context == 128), "ratio"] = 1.41
    assert _verdicts(slow)[:2] == [reproduced, not_reproduced]
    assert "a gpu, triton" in claims(slow)[0].how


def test_an_accelerators_records_go_before_a_cpus():
    both = pd.concat([_records("cpu", ratio=5.0), _records("gpu")])
    assert [claim.ours for claim in claims(both)] == [claim.ours for claim in claims(_records("gpu"))]


def test_the_share_meets_the_ratio_of_the_same_batch():
    records = _records("gpu", ratio=1.0)
    records.loc[(records.batch == 8) & (records.context == 128), "ratio"] = 5.0  # of which there is no step
    assert claims(records)[4].ours == 0


def test_claims_without_their_records():
    records = _records("gpu")
    assert {claim.verdict for claim in claims(records[:0])} == {"no records"}
    assert _verdicts(records[records.part == "kernel"])[3:] == ["no records"] * 3
    assert _verdicts(records.assign(heads=8))[:3] == ["no records"] * 3


def test_the_figure():
    records = _records("cpu").assign(identity_ratio=1.0)
    left, right = plot(records).axes
    assert [len(bars) for bars in left.containers] == [6, 6] and len(right.containers[0]) == 2
    plot(records[records.part == "kernel"])
    plot(records[records.part == "step"])


@pytest.mark.parametrize(
    "wrong", [{"part": "steps"}, {"context": 0}, {"batch": True}, {"block_size": 12}, {"dtype": "int8"}, {"rounds": 0}]
)
def test_wrong_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Config(**wrong)


def test_the_cpu_set_has_the_figures_six_cases():
    kernels = {(config.batch, config.context) for config in CPU_SET if config.part == "kernel"}
    assert kernels == {(batch, context) for batch in BATCHES for context in CONTEXTS}
