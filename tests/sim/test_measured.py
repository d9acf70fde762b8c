"""Step times that were measured: what a fit finds, and which files are refused."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from pagedjax.errors import ConfigError
from pagedjax.host.protocol import KVUsage
from pagedjax.sim.measured import MeasuredCost, fit
from pagedjax.sim.records import StepRecord, StepShape

SIZES = (1, 2, 4, 8)
ENGINE = {
    "block_size": 4,
    "num_blocks": 60,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "max_model_len": 64,
    "enable_chunked_prefill": True,
    "overlap": True,
}
TRUE = MeasuredCost("tiny", SIZES, (0.01, 0.012, 0.02, 0.05), 1e-3, 2e-6, 3e-4, 5e-4, ENGINE)


def steps(cost, sizes=SIZES, noise=0.0):
    rng, found, now = random.Random(0), [], 0.0
    for _ in range(400):
        tokens = rng.choice([n for n in range(1, 9) if min(s for s in SIZES if s >= n) in sizes])
        shape = StepShape(tokens, rng.randint(1, 4), rng.randint(1, 5000), rng.choice([0, 3]), rng.choice([0, 1]))
        end = now + cost.seconds(shape) * rng.uniform(1 - noise, 1 + noise)
        found.append(StepRecord(now, end, shape, 1, KVUsage(0, 0, 0, 0, 0), 0, 0))
        now = end
    return found


def test_a_fit_finds_what_the_steps_were_made_of():
    found = fit("tiny", steps(TRUE), SIZES, {**ENGINE, "seed": 3})
    for name in ("token_seconds", "seconds_per_seq", "seconds_per_context_token", "seconds_per_copied_block"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert found.seconds_per_swapped_block == pytest.approx(5e-4)
    assert found.engine == ENGINE and found.num_steps == 400 and found.mean_error < 1e-9
    rows = found.rows(steps(TRUE))
    assert [row["tokens"] for row in rows] == list(SIZES) and sum(row["steps"] for row in rows) == 400
    assert all(row["measured_ms"] == pytest.approx(row["fitted_ms"]) for row in rows)


def test_a_size_that_never_ran_lies_between_its_neighbours():
    found = fit("tiny", steps(TRUE, sizes=(1, 2, 8)), SIZES, ENGINE)
    assert found.token_seconds[2] == pytest.approx(0.012 + (0.05 - 0.012) * (4 - 2) / (8 - 2))


def test_no_coefficient_is_negative_and_noise_is_told():
    class Faster:
        """With more context."""

        def seconds(self, step):
            return 0.05 - 1e-6 * step.num_context

    found = fit("tiny", steps(Faster(), noise=0.2), SIZES, ENGINE)
    assert min(found.seconds_per_seq, found.seconds_per_context_token, *found.token_seconds) >= 0
    assert 0.02 < found.mean_error < 0.3


def test_a_file_is_read_for_its_own_model_only(tmp_path):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps([{"step_times": dataclasses.asdict(TRUE)}]))
    assert MeasuredCost.load(path, "tiny") == TRUE
    with pytest.raises(ConfigError, match="must be of other; this one is of tiny"):
        MeasuredCost.load(path, "other")


def with_(**changes):
    return json.dumps([{"step_times": {**dataclasses.asdict(TRUE), **changes}}])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[1]",
        "[" * 100_000,
        '[{"step_times": {"model": "tiny"}}]',
        '{"step_times": 3}',
        with_(token_seconds=[0.1, -0.1, 0.1, 0.1]),
        with_(token_seconds=[0.1, float("nan"), 0.1, 0.1]),
        with_(token_seconds=[0, 0, 0, 0]),
        with_(token_seconds=[0.1]),
        with_(token_sizes=[1, 4, 2, 8]),
        with_(token_sizes=[]),
        with_(token_sizes=["1", 2, 4, 8]),
        with_(seconds_per_seq="slow"),
        with_(seconds_per_seq=None),
        with_(engine=None),
        with_(engine={**ENGINE, "num_blocks": 0}),
    ],
    ids=range(18),
)
def test_a_file_that_holds_no_step_times_is_refused(tmp_path, text):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is no file of `bench --step-times`") as raised:
        MeasuredCost.load(path, "tiny")
    assert len(str(raised.value)) < 400
    path.write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match="it is no text$"):
        MeasuredCost.load(path, "tiny")
    with pytest.raises(ConfigError, match="cannot be read"):
        MeasuredCost.load(tmp_path / "nothing", "tiny")
