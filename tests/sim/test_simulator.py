"""The simulator runs the project's own scheduler: clocks, records, and what of the paper needs no real lengths."""

from __future__ import annotations

import math
import random
import statistics
from itertools import islice

import pytest

from pagedjax.baselines import make_allocator
from pagedjax.config import CacheConfig, SchedulerConfig
from pagedjax.errors import ConfigError
from pagedjax.host.scheduler import Scheduler
from pagedjax.sim.cost import Roofline, StepShape
from pagedjax.sim.hardware import find_model, make_server, model_names
from pagedjax.sim.metrics import Quantiles, Summary
from pagedjax.sim.simulator import RequestRecord, Simulator, StepRecord
from pagedjax.sim.workload import ARRIVALS, keep_servable, make_request, paper_recipe, timed


class OneSecond:
    """Every step takes as long."""

    def seconds(self, step: StepShape) -> float:
        return 1.0


def simulate(trace, *, allocator="paged", num_blocks=64, cost=None, until=None, **config):
    scheduler = Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, **config}),
        make_allocator(CacheConfig(4, num_blocks, 0.0, allocator=allocator), 64),
    )
    steps: list[StepRecord] = []
    requests: list[RequestRecord] = []
    simulator = Simulator(scheduler, cost or OneSecond(), steps.append, requests.append)
    simulator.run(trace, until)
    return simulator, steps, requests


def at(*times, lengths=(4, 3)):
    return timed([lengths] * len(times), iter(times), math.inf)


def test_a_request_takes_a_step_for_its_prompt_and_one_for_each_further_token():
    _, steps, requests = simulate(at(0.0, 0.5, 10.0))
    assert [(step.start, step.end, step.num_tokens, step.num_running) for step in steps] == [
        (0.0, 1.0, 4, 1),
        (1.0, 2.0, 5, 2),
        (2.0, 3.0, 2, 2),
        (3.0, 4.0, 1, 1),
        (10.0, 11.0, 4, 1),
        (11.0, 12.0, 1, 1),
        (12.0, 13.0, 1, 1),
    ]
    first, second, third = requests
    assert (first.arrival, first.first_token, first.end, first.normalized_latency) == (0.0, 1.0, 3.0, 1.0)
    assert (second.arrival, second.first_token, second.end) == (0.5, 2.0, 4.0)
    assert (third.arrival, third.first_token, third.end) == (10.0, 11.0, 13.0)


def test_a_static_batch_is_padded_and_returns_together():
    shapes: list[StepShape] = []

    class Noting(OneSecond):
        def seconds(self, step):
            shapes.append(step)
            return 1.0

    trace = timed([(2, 2), (5, 4), (3, 1)], iter([0.0, 0.0, 0.0]), math.inf)
    _, _, requests = simulate(trace, batching="static", cost=Noting())
    assert [shape.num_tokens for shape in shapes] == [15, 3, 3, 3]
    assert {request.end for request in requests} == {4.0}


def test_pressure_shows_in_the_records():
    trace = [*at(*[0.0] * 6, lengths=(10, 20))]
    _, _, requests = simulate(iter(trace), num_blocks=20)
    assert len(requests) == 6 and sum(request.num_preemptions for request in requests) > 0


def test_requests_that_can_never_run_are_counted():
    simulator, _, requests = simulate(timed([(60, 3), (70, 3), (4, 2)], iter([0.0, 0.0, 0.0]), math.inf))
    assert simulator.num_refused == 1 and len(requests) == 2


def test_it_stops_in_time():
    simulator, steps, _ = simulate(at(0.0, lengths=(4, 30)), until=5.0)
    assert simulator.now == 5.0 and len(steps) == 5


def test_the_same_seed_gives_the_same_records():
    def records(seed):
        rng = random.Random(seed)
        pairs = [(rng.randint(1, 20), rng.randint(1, 20)) for _ in range(200)]
        return simulate(paper_recipe(pairs, 0.2, 400.0, seed))[2]

    assert records(1) == records(1) != records(2)


@pytest.mark.parametrize(
    ("model", "slots", "concurrency"), [("opt-13b", 15.7, 7), ("opt-66b", 9.7, 4), ("opt-175b", 60.1, 29)]
)
def test_table_1_slots_and_the_concurrency_of_orca_max(model, slots, concurrency):
    spec = find_model(model)
    blocks = make_server(spec).num_blocks(spec, 16)
    assert blocks * 16 == pytest.approx(slots * 1000, rel=0.02)
    allocator = make_allocator(CacheConfig(16, blocks, allocator="orca-max"), 2048)
    scheduler = Scheduler(SchedulerConfig.paper(), allocator)
    for number in range(40):
        scheduler.add(make_request(number, (8, 8), 0.0))
    scheduler.schedule()
    assert scheduler.num_running == concurrency


def test_a_step_costs_what_its_bytes_and_operations_cost():
    model = find_model("opt-13b")
    server = make_server(model)
    cost = Roofline(model, server, 16, seconds_per_step=0.0, seconds_per_seq=0.0)
    weights = 26e9 / (0.8 * 1.555e12)
    assert cost.seconds(StepShape(1, 1, 0)) == pytest.approx(weights)
    assert cost.seconds(StepShape(2048, 1, 0)) == pytest.approx(2048 * 26e9 / (0.74 * 312e12))
    read = 1000 * 819_200 / (0.6 * 1.555e12)
    assert cost.seconds(StepShape(1, 1, 1000)) == pytest.approx(weights + read)
    assert cost.seconds(StepShape(1, 1, 0, num_swapped=10)) == pytest.approx(weights + 10 * 16 * 819_200 / 32e9)
    four = Roofline(
        find_model("opt-66b"), make_server(find_model("opt-66b")), 16, seconds_per_step=0, seconds_per_seq=0
    )
    assert four.seconds(StepShape(1, 1, 0)) == pytest.approx(132e9 / 4 / (0.8 * 1.555e12) + 128 * 18e-6, rel=0.01)


def test_every_model_has_a_server_that_it_fits_or_says_by_how_much_it_does_not():
    assert {"opt-13b", "opt-66b", "opt-175b", "llama-13b", "llama3-8b", "llama3-70b"} <= set(model_names())
    for name in model_names():
        model = find_model(name)
        assert make_server(model, "h200", 8).num_blocks(model, 16) > 100
    with pytest.raises(
        ConfigError, match=r"opt-175b does not fit 1 x a100-40gb: its weights take 322.2 GiB, 285.2 GiB more"
    ):
        make_server(find_model("opt-175b"), "a100-40gb", 1)
    with pytest.raises(ConfigError, match="model='gpt-5' is not allowed: model must be one of opt-13b, "):
        find_model("gpt-5")
    with pytest.raises(ConfigError, match="chip='tpu' is not allowed: chip must be one of a100-40gb, "):
        make_server(find_model("opt-13b"), "tpu")
    with pytest.raises(ConfigError, match="chip=None is not allowed: .* for llama3-8b, which the paper does not run"):
        make_server(find_model("llama3-8b"))
    with pytest.raises(ConfigError, match="num_chips=3 is not allowed: num_chips must be one of 1, 4, 8"):
        make_server(find_model("opt-13b"), "h100", 3)


@pytest.mark.parametrize("name", ARRIVALS)
def test_arrivals_come_at_their_rate(name):
    times = list(islice(ARRIVALS[name](4.0, 1), 20_000))
    assert times == sorted(times) and times[-1] == pytest.approx(5000, rel=0.03)
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    variation = statistics.stdev(gaps) / statistics.mean(gaps)
    assert variation == pytest.approx({"poisson": 1.0, "constant": 0.0, "gamma": math.sqrt(2)}[name], abs=0.05)


def test_what_cannot_be_served_is_counted_by_what_is_wrong():
    kept, dropped = keep_servable([(4, 5), (0, 3), (5, -1), (2000, 100)], 2048)
    assert kept == [(4, 5)] and dropped == {"negative or empty": 2, "longer than 2048 tokens": 1}


def test_quantiles_are_right_to_a_per_cent():
    rng = random.Random(0)
    values, found = [rng.lognormvariate(0, 2) for _ in range(20_000)], Quantiles()
    for value in values:
        found.add(value)
    assert found.mean == pytest.approx(statistics.mean(values))
    for part in (0.1, 0.5, 0.9, 0.99):
        assert found.quantile(part) == pytest.approx(sorted(values)[int(part * 20_000) - 1], rel=0.01)
    assert math.isnan(Quantiles().quantile(0.5)) and math.isnan(Quantiles().mean)


def test_a_summary_adds_up_to_the_pool():
    summary = Summary(256, since=3.0)
    _, steps, requests = simulate(at(0.0, 1.0, 2.0))
    for step in steps:
        summary.on_step(step)
    for request in requests:
        summary.on_request(request)
    row = summary.row()
    split = ("token_states", "reserved", "internal_fragmentation", "external_fragmentation", "free")
    assert sum(row[name] for name in split) == pytest.approx(1.0)
    late = [step for step in steps if step.end >= 3.0]
    assert row["mean_batched_requests"] == statistics.mean(step.num_running for step in late)
    assert row["requests"] == 3 and row["normalized_latency_s"] == pytest.approx(1.0)
    assert row["time_to_first_token_s"] == 1.0 and row["time_between_tokens_s"] == 1.0
