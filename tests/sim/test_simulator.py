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
from pagedjax.sim.cost import Roofline
from pagedjax.sim.hardware import find_model, make_server, model_names
from pagedjax.sim.metrics import Quantiles, Summary
from pagedjax.sim.records import RequestRecord, StepRecord, StepShape
from pagedjax.sim.simulator import Simulator
from pagedjax.sim.traces.rows import TraceRow
from pagedjax.sim.workload import ARRIVALS, RequestMaker, keep_servable, paper_arrivals, paper_order, timed


class OneSecond:
    """Every step takes as long."""

    def seconds(self, step: StepShape) -> float:
        return 1.0


def simulate(trace, *, cost=None, until=None, overlap=False, pad_batches=False, cache=None, **config):
    cache = CacheConfig(**{"block_size": 4, "num_blocks": 64, "watermark": 0.0, **(cache or {})})
    scheduler = Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, **config}),
        make_allocator(cache, 64),
    )
    steps: list[StepRecord] = []
    requests: list[RequestRecord] = []
    simulator = Simulator(
        scheduler, cost or OneSecond(), trace, steps.append, requests.append, overlap=overlap, pad_batches=pad_batches
    )
    simulator.run(until)
    scheduler.check_invariants()
    return simulator, steps, requests


def come(*requests, **maker):
    """(time, prompt tokens, output tokens) of each."""
    arrivals = [(time, TraceRow(prompt, output)) for time, prompt, output in requests]
    return timed(arrivals, math.inf, RequestMaker(**maker))


def at(*times, lengths=(4, 3), **maker):
    return come(*[(time, *lengths) for time in times], **maker)


def test_a_request_takes_a_step_for_its_prompt_and_one_for_each_further_token():
    _, steps, requests = simulate(at(0.0, 0.5, 10.0))
    assert [(step.start, step.end, step.shape.num_tokens, step.num_running) for step in steps] == [
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


def test_with_overlap_a_step_is_planned_while_the_one_before_it_runs():
    _, steps, requests = simulate(at(0.0, 0.5, 10.0), overlap=True)
    # The second request comes while step 0 runs, when step 1 is planned already: it must wait for step 2.
    assert [(step.start, step.end, step.shape.num_tokens, step.num_running) for step in steps] == [
        (0.0, 1.0, 4, 1),
        (1.0, 2.0, 1, 1),
        (2.0, 3.0, 5, 2),
        (3.0, 4.0, 1, 2),  # it has its tokens, but that is not known yet
        (4.0, 5.0, 1, 1),
        (10.0, 11.0, 4, 1),
        (11.0, 12.0, 1, 1),
        (12.0, 13.0, 1, 1),
    ]
    assert [request.end for request in requests] == [3.0, 5.0, 13.0]


def test_samples_share_their_prompt_and_beams_fork():
    _, steps, requests = simulate(at(0.0, lengths=(9, 4), n=3))
    assert (requests[0].output_len, requests[0].num_output_tokens) == (4, 12)
    assert (steps[0].logical_blocks, steps[0].physical_blocks) == (9, 3)
    _, steps, requests = simulate(at(0.0, 0.0, lengths=(9, 6), beam_width=3))
    assert {(request.output_len, request.finish_reason) for request in requests} == {(6, "length")}
    assert all(request.first_token == 1.0 and request.end == 6.0 for request in requests)
    assert [step.shape.num_seqs for step in steps] == [2, 6, 6, 6, 6, 6]
    assert steps[-1].logical_blocks > steps[-1].physical_blocks
    assert any(step.shape.num_copied for step in steps)


def test_prompts_whose_block_hashes_are_alike_share_blocks():
    maker = RequestMaker(block_tokens=8, shrink=2)
    rows = [TraceRow(24, 3, 0.0, (5, 6, 7)), TraceRow(20, 3, 5.0, (5, 6, 9)), TraceRow(24, 3, 9.0, (6, 5, 7))]
    trace = [*timed([(row.time or 0.0, row) for row in rows], math.inf, maker)]
    assert [len(request.prompt_token_ids) for _, request in trace] == [12, 10, 12]
    _, steps, _ = simulate(trace, cache={"enable_prefix_caching": True})
    first, second, third = (step for step in steps if step.shape.num_tokens > 1)
    assert [first.shape.num_tokens, second.shape.num_tokens, third.shape.num_tokens] == [12, 2, 12]


def test_prompts_without_hashes_have_nothing_in_common():
    _, steps, _ = simulate(at(0.0, 9.0, lengths=(12, 2)), cache={"enable_prefix_caching": True})
    assert [step.shape.num_tokens for step in steps] == [12, 1, 12, 1]


def test_a_static_batch_is_padded_and_returns_together():
    shapes: list[StepShape] = []

    class Noting(OneSecond):
        def seconds(self, step):
            shapes.append(step)
            return 1.0

    trace = come((0.0, 2, 2), (0.0, 5, 4), (0.0, 3, 1))
    _, _, requests = simulate(trace, batching="static", cost=Noting(), pad_batches=True)
    assert [shape.num_tokens for shape in shapes] == [15, 3, 3, 3]
    assert {request.end for request in requests} == {4.0}


def test_pressure_shows_in_the_records():
    pressed = {"num_blocks": 20}
    _, _, requests = simulate(at(*[0.0] * 6, lengths=(10, 20)), cache=pressed)
    assert len(requests) == 6 and sum(request.num_preemptions for request in requests) > 0
    _, steps, requests = simulate(
        at(*[0.0] * 6, lengths=(10, 20)), cache={**pressed, "num_host_blocks": 20}, preemption="swap"
    )
    assert len(requests) == 6 and sum(step.shape.num_swapped for step in steps) > 0


def test_requests_that_can_never_run_are_counted():
    simulator, _, requests = simulate(come((0.0, 60, 3), (0.0, 70, 3), (0.0, 4, 2), (0.0, 62, 3)))
    assert simulator.num_refused == 2 and len(requests) == 2
    assert simulator.refusal.startswith("request '1' has a prompt of 70 tokens, but max_model_len=64")


def test_it_stops_in_time():
    simulator, steps, _ = simulate(at(0.0, lengths=(4, 30)), until=5.0)
    assert simulator.now == 5.0 and len(steps) == 5


def test_the_same_seed_gives_the_same_records():
    def records(seed):
        rng = random.Random(seed)
        rows = [TraceRow(rng.randint(1, 20), rng.randint(1, 20)) for _ in range(200)]
        times = paper_arrivals(0.2, 400.0, seed)
        return simulate(timed(zip(times, paper_order(rows[: len(times)], seed), strict=False), 400.0))[2]

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
        scheduler.add(RequestMaker().make(number, TraceRow(8, 8), 0.0))
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
    assert cost.seconds(StepShape(1, 1, 0, num_copied=3)) == pytest.approx(
        weights + 3 * 2 * 16 * 819_200 / (0.6 * 1.555e12)
    )
    assert cost.seconds(StepShape(0, 0, 0, num_swapped=10)) == pytest.approx(10 * 16 * 819_200 / 32e9)
    host_step = 3e-3
    copies = Roofline(model, server, 16, seconds_per_swap_copy=3e-6)
    assert copies.seconds(StepShape(0, 0, 0, num_swapped=10)) == pytest.approx(host_step + 10 * 16 * 819_200 / 32e9)
    small = Roofline(model, server, 1, seconds_per_swap_copy=3e-6)  # copies of 10 KB: K and V of 40 layers
    assert small.seconds(StepShape(0, 0, 0, num_swapped=10)) == pytest.approx(host_step + 10 * 80 * 3e-6)
    reuses = Roofline(model, server, 16, seconds_per_step=0.0, seconds_per_seq=0.0, reuses_shared=True)
    assert reuses.seconds(StepShape(1, 1, 1500, num_shared=500)) == pytest.approx(weights + read)
    host = Roofline(model, server, 16)
    assert host.seconds(StepShape(1, 7, 0)) == pytest.approx(weights + 3e-3 + 7 * 0.33e-3)
    hidden = Roofline(model, server, 16, hides_host=True)
    assert hidden.seconds(StepShape(1, 7, 0)) == pytest.approx(weights)
    assert hidden.seconds(StepShape(1, 250, 0)) == pytest.approx(3e-3 + 250 * 0.33e-3)
    # Two all-reduces a layer, each of the tokens' hidden states.
    reduced = four.seconds(StepShape(100, 1, 0)) - four.seconds(StepShape(1, 1, 0))
    assert reduced == pytest.approx(2 * 64 * 99 * 9216 * 2 / 62e9)
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


def test_what_cannot_be_served_is_counted():
    left_out = []
    rows = [TraceRow(4, 5), TraceRow(2000, 49), TraceRow(2000, 48)]
    assert [*keep_servable(rows, RequestMaker(), 2048, left_out.append)] == [rows[0], rows[2]]
    assert left_out == ["more than 2048 tokens"]
    assert [*keep_servable(rows, RequestMaker(shrink=2, block_tokens=4), 2048, left_out.append)] == rows


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
