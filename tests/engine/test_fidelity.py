"""The engine served on the wall clock, its step times fitted, and a simulation with them beside it."""

from __future__ import annotations

import math

import pytest
from engine_harness import Runs

from pagedjax.bench.fidelity import COMPARED, Fidelity


def test_an_engine_is_measured_and_simulated(runs: Runs, tmp_path) -> None:
    engine = runs.engine(
        max_model_len=96, num_blocks=100, max_num_seqs=4, max_num_batched_tokens=64, event_log=str(tmp_path / "log")
    )
    ended: list[str] = []
    fidelity = Fidelity(engine, 3, lambda name, number: ended.extend([name] * number))
    for rate in (math.inf, 100.0):  # compiles
        fidelity.serve("before", 4, rate)
    ((rate, phase),) = fidelity.run([50.0], 4, 3)
    fidelity.read()

    # All requests came, in order, and nobody before the time of the trace.
    assert [len(p.requests) for p in fidelity.calibration] == [3] * 4 and ended.count(phase.name) == 4
    assert {r.request_id for r in phase.requests} == {f"{phase.name}-{number}" for number in range(4)}
    arrivals = {request.request_id: time for time, request in phase.trace}
    for record in phase.requests:
        assert record.arrival == pytest.approx(arrivals[record.request_id], abs=1e-4)
        assert record.finish_reason == "length"

    cost = fidelity.fit()
    assert cost.num_steps == sum(len(p.steps) for p in fidelity.calibration)
    assert cost.token_sizes == (1, 2, 4, 8, 16, 32, 64) and any(cost.token_seconds)
    rows = fidelity.compare(rate, phase, cost)
    assert [row["measure"] for row in rows] == list(COMPARED)
    simulated = fidelity.simulate(phase, cost)
    assert simulated["requests"] == 4 and simulated["failed_requests"] == 0
    total = sum(record.num_output_tokens for record in phase.requests)
    assert simulated["output_tokens_per_s"] * simulated["seconds"] == pytest.approx(total)
