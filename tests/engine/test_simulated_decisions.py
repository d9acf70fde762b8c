"""The simulator decides as the engine does: plans and records are the same, step by step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Runs

from pagedjax.baselines import make_allocator
from pagedjax.engine import Engine
from pagedjax.host.plan import StepPlan
from pagedjax.host.scheduler import Scheduler
from pagedjax.replay import replay
from pagedjax.request import SamplingParams
from pagedjax.sim.from_log import LogRecords
from pagedjax.sim.metrics import Summary
from pagedjax.sim.records import RequestRecord, StepRecord
from pagedjax.sim.simulator import Simulator
from pagedjax.sim.traces.rows import TraceRow
from pagedjax.sim.workload import RequestMaker, TimedRequest

SIZE: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 6, "num_blocks": 34, "block_size": 4}
SYSTEMS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap", "swap_space": 1 << 20},
    "chunks": {"max_num_batched_tokens": 9},
    "prefix caching": {"enable_prefix_caching": True, "preemption": "recompute"},
    "orca-max": {"allocator": "orca-max"},
    "orca-pow2": {"allocator": "orca-pow2"},
    "orca-oracle": {"allocator": "orca-oracle"},
    "static": {"batching": "static"},
    "static and contiguous": {"batching": "static", "allocator": "orca-oracle"},
}


def arrivals(seed: int) -> list[tuple[int, TraceRow]]:
    """(index of the step before which it comes, row): more than the pool holds at times, and pauses."""
    rng, step, found = random.Random(seed), 0, []
    for _ in range(14):
        step += rng.choice([0, 0, 1, 3, 60])
        found.append((step, TraceRow(rng.randint(3, 30), rng.randint(1, 25))))
    return found


def decision(plan: StepPlan | None) -> Any:
    """A plan without its tokens, which no simulation knows."""
    if plan is None:
        return None
    return plan._replace(chunks=tuple(chunk._replace(token_ids=(0,) * len(chunk.token_ids)) for chunk in plan.chunks))


def note_plans(scheduler: Scheduler) -> list[Any]:
    plans: list[Any] = []
    schedule = scheduler.schedule

    def noting() -> StepPlan | None:
        plan = schedule()
        plans.append(decision(plan))
        return plan

    scheduler.schedule = noting  # type: ignore[method-assign]
    return plans


class Unit:
    """Every step takes a second."""

    def seconds(self, step: Any) -> float:
        return 1.0


def step_both(runs: Runs, engine: Engine, n: int) -> tuple[list[Any], list[Any], list[StepRecord], list[RequestRecord]]:
    """Plans of both, and the simulator's records; requests come before the same steps."""
    scheduler = Scheduler(engine.scheduler.config, make_allocator(engine.cache_config, engine.max_model_len))
    steps: list[StepRecord] = []
    requests: list[RequestRecord] = []
    simulator = Simulator(scheduler, Unit(), [], steps.append, requests.append, overlap=engine.config.overlap)
    real, simulated = note_plans(engine.scheduler), note_plans(scheduler)
    coming, maker = arrivals(3), RequestMaker(n=n)
    for index in range(10_000):
        while coming and coming[0][0] <= index:
            row = coming.pop(0)[1]
            number = engine._num_requests
            (prompt,) = runs.prompts(row.prompt_len)  # all begin alike
            engine.add_request(
                {"prompt_token_ids": prompt},
                SamplingParams(n=n, temperature=0.0, max_tokens=row.output_len, ignore_eos=True),
            )
            request = replace(maker.make(number, row, simulator.now), prompt_token_ids=tuple(prompt))
            simulator.add(TimedRequest(simulator.now, request))
        engine.step()
        simulator.step()
        if not coming and not engine.has_unfinished() and not scheduler.has_unfinished():
            break
    return real, simulated, steps, requests


@pytest.mark.parametrize(("overlap", "n"), [(True, 1), (False, 2)], ids=["overlap", "no overlap, two samples"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_decisions_and_records_are_the_same(runs: Runs, system: str, overlap: bool, n: int, tmp_path: Path) -> None:
    engine = runs.engine(**{**SIZE, **SYSTEMS[system]}, overlap=overlap, event_log=str(tmp_path / "log"))
    real, simulated, steps, requests = step_both(runs, engine, n)
    assert real == simulated and sum(plan is not None for plan in real) > 60
    if system in ("recompute", "swap"):
        assert engine.stats().num_preemptions > 0
    assert (engine.stats().prefix_hits > 0) == (system == "prefix caching")

    real_steps: list[StepRecord] = []
    real_requests: list[RequestRecord] = []
    replay(tmp_path / "log", observer=LogRecords(real_steps.append, real_requests.append).observe)
    assert list(map(without_times, real_steps)) == list(map(without_times, steps))
    assert list(map(without_times, real_requests)) == list(map(without_times, requests))
    for record in real_steps:
        assert record.start < record.end
    for request in real_requests:
        assert 0 <= request.arrival < request.first_token <= request.end
    memory = ("token_states", "reserved", "internal_fragmentation", "external_fragmentation", "mean_batched_requests")
    rows = [summary(engine, s, r) for s, r in ((real_steps, real_requests), (steps, requests))]
    assert [rows[0][name] for name in memory] == [rows[1][name] for name in memory]


def without_times(record: Any) -> Any:
    times = {"start", "end", "arrival", "first_token"} & set(record._fields)
    return record._replace(**dict.fromkeys(times, 0.0))


def summary(engine: Engine, steps: list[StepRecord], requests: list[RequestRecord]) -> dict[str, Any]:
    found = Summary(engine.cache_config.num_slots)
    for step in steps:
        found.on_step(step)
    for request in requests:
        found.on_request(request)
    return found.row()


def test_records_of_a_log_tell_of_aborted_and_restored_requests(runs: Runs, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    engine = runs.engine(**SIZE, event_log=path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    ids = [engine.add_request({"prompt_token_ids": p}, params) for p in runs.prompts(9, 5, 7)]
    for _ in range(4):
        engine.step()
    engine.abort(ids[0])
    engine.save(tmp_path / "saved")
    engine = Engine.restore(tmp_path / "saved", runs.model, replace(engine.config), progress=False)
    while engine.has_unfinished():
        engine.step()
    requests: list[RequestRecord] = []
    replay(path, observer=LogRecords(lambda step: None, requests.append).observe)
    assert [(r.request_id, r.finish_reason) for r in requests] == [("0", "abort"), ("1", "length"), ("2", "length")]
