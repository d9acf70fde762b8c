"""The real engine on contiguous memory and with static batching: slower or larger, but the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import Runs, drain

from pagedjax import faults
from pagedjax.baselines import allocator_names
from pagedjax.engine import Engine
from pagedjax.errors import ConfigError, InvalidRequest
from pagedjax.replay import replay
from pagedjax.request import BeamSearchParams, RequestOutput, SamplingParams

SAMPLES = SamplingParams(n=3, max_tokens=14, temperature=1.0, seed=5, ignore_eos=True, logprobs=1)
STOPPED = SamplingParams(max_tokens=20, temperature=0.9, seed=9, repetition_penalty=1.3, stop_token_ids=(7, 9, 11, 200))
GREEDY = SamplingParams(max_tokens=17, temperature=0.0, ignore_eos=True)
PARAMS: list[Any] = [SAMPLES, BeamSearchParams(3, 10), STOPPED, GREEDY, GREEDY, STOPPED]
SIZE = {"num_blocks": 200, "max_model_len": 64, "max_num_seqs": 6}


def results(outputs: list[RequestOutput]) -> list[list[Any]]:
    return [[(c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def prompts(runs: Runs) -> list[list[int]]:
    return runs.prompts(13, 16, 7, 21, 5, 30)


@pytest.fixture(scope="module")
def paged(runs: Runs, prompts: list[list[int]]) -> list[list[Any]]:
    return results(runs.run(runs.engine(**SIZE), prompts, PARAMS))


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("allocator", allocator_names())
@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 9, "overlap": False}], ids=["default", "chunks"])
def test_the_same_tokens(
    runs: Runs,
    prompts: list[list[int]],
    paged: list[list[Any]],
    config: dict[str, Any],
    allocator: str,
    batching: str,
    tmp_path: Any,
) -> None:
    engine = runs.engine(**SIZE, **config, allocator=allocator, batching=batching, event_log=tmp_path / "log")
    assert results(runs.run(engine, prompts, PARAMS)) == paged
    stats = engine.stats()
    assert (stats.usage.free, stats.num_running, stats.num_preemptions) == (engine.pool_info.num_slots, 0, 0)
    report = replay(tmp_path / "log", check_invariants=True)
    assert report.same_plans == report.plans > 10


def test_static_batching_delivers_a_batch_at_its_end(runs: Runs, prompts: list[list[int]]) -> None:
    engine = runs.engine(**{**SIZE, "max_num_seqs": 2}, batching="static")
    short = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for prompt, params in zip(prompts[:4], (short, GREEDY, short, short), strict=True):
        engine.add_request({"prompt_token_ids": prompt}, params)
    ended: list[list[str]] = []
    while engine.has_unfinished():
        names = [output.request_id for output in engine.step() if output.finished]
        ended += [names] if names else []
    assert ended == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize("allocator", ["paged", "orca-oracle"])
def test_pressure_and_crashes_under_the_baselines(
    runs: Runs, prompts: list[list[int]], paged: list[list[Any]], allocator: str, tmp_path: Any
) -> None:
    engine = runs.engine(**SIZE, allocator=allocator, batching="static")
    faults.preempt_every(engine, 4)
    faults.raise_in_step(engine, 9, RuntimeError("boom"))
    ids = [engine.add_request({"prompt_token_ids": p}, q) for p, q in zip(prompts, PARAMS, strict=True)]
    done: dict[str, RequestOutput] = {}
    for _ in range(6):
        done |= {output.request_id: output for output in engine.step() if output.finished}
    engine.save(tmp_path)
    for one in (engine, runs.share(Engine.restore(tmp_path, runs.model, progress=False))):
        both = done | {output.request_id: output for output in drain(one) if output.finished}
        assert results([both[request_id] for request_id in ids]) == paged
    assert len(engine.block_map()) == 0


def test_what_contiguous_memory_cannot_do_is_refused(runs: Runs) -> None:
    for other in ({"enable_prefix_caching": True}, {"swap_space": 1 << 20}):
        with pytest.raises(
            ConfigError, match=r"allocator='orca-max' is not allowed: allocator must be \"paged\" where"
        ):
            runs.engine(allocator="orca-max", **other)
    with pytest.raises(
        ConfigError, match="allocator='buddy' is not allowed: allocator must be one of paged, orca-max, "
    ):
        runs.engine(allocator="buddy")
    with pytest.raises(InvalidRequest, match="a prefix cannot be shared with allocator='orca-max'"):
        runs.engine(allocator="orca-max").register_prefix({"prompt_token_ids": [1] * 9})
