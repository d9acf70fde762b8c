"""Static batching: the earliest requests run together until the longest is done."""

from __future__ import annotations

import pytest
from host_harness import Pipeline, expected_end, make_request, make_scheduler, run

from pagedjax.baselines import allocator_names
from pagedjax.errors import ConfigError, InvalidRequest


def test_a_batch_is_closed_until_its_longest_is_done():
    scheduler = make_scheduler(64, max_num_seqs=3, batching="static")
    for number, max_tokens in enumerate((2, 5, 3, 1)):
        scheduler.add(make_request(number, 4, max_tokens=max_tokens))
    plan, _ = run(scheduler)
    assert [chunk.seq_id for chunk in plan.chunks] == [0, 1, 2], "as many as may run"
    used = scheduler.usage().free
    shapes = []
    for _ in range(4):
        plan, updates = run(scheduler)
        shapes.append([chunk.seq_id for chunk in plan.chunks])
        assert all(update.finish_reason is None for update in updates)
        assert scheduler.usage().free <= used and scheduler.num_running == 3 and scheduler.num_waiting == 1
        scheduler.check_invariants()
    assert shapes == [[0, 1, 2], [1, 2], [1], [1]], "who is done computes nothing, and keeps its memory"
    plan = scheduler.schedule()
    assert plan is not None and plan.ended == (0, 1, 2)
    assert [chunk.seq_id for chunk in plan.chunks] == [3], "and the next batch begins"


def test_a_batch_whose_prompts_take_several_steps_goes_on_filling():
    scheduler = make_scheduler(64, max_num_seqs=4, max_num_batched_tokens=8, batching="static")
    for number in range(5):
        scheduler.add(make_request(number, 6, max_tokens=9))
    for _ in range(6):
        run(scheduler)
    assert scheduler.num_running == 4 and scheduler.num_waiting == 1
    scheduler.add(make_request(9, 1))
    scheduler.abort("r0")  # its place is not given to anybody
    run(scheduler)
    assert scheduler.num_running == 3 and scheduler.num_waiting == 2


def test_memory_bounds_a_batch():
    scheduler = make_scheduler(20, max_num_seqs=8, batching="static", allocator="orca-max")
    for number in range(3):
        scheduler.add(make_request(number, 4))
    run(scheduler)
    assert scheduler.num_running == 1, "one chunk of 16 blocks fits"


@pytest.mark.parametrize("allocator", allocator_names())
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_any_batching_takes_any_memory(allocator, batching):
    pipeline = Pipeline(make_scheduler(40, max_num_seqs=5, allocator=allocator, batching=batching), depth=1)
    requests = [make_request(number, 1 + number % 9, 1 + number * 5 % 11, stop_ids=(0,)) for number in range(20)]
    ids = [pipeline.add(request) for request in requests]
    pipeline.run_to_end()
    for seq_id, request in zip(ids, requests, strict=True):
        assert (pipeline.outputs[seq_id], pipeline.ends[seq_id]) == expected_end(request, 10**6)
    assert pipeline.scheduler.usage().free == 160


def test_who_waits_for_its_batch_cannot_be_forked_but_aborted():
    scheduler = make_scheduler(64, batching="static")
    scheduler.add(make_request(0, 4, max_tokens=1))
    scheduler.add(make_request(1, 4, max_tokens=9))
    run(scheduler)
    with pytest.raises(InvalidRequest, match="request 'r0' has all its tokens: it only waits for its batch to end"):
        scheduler.fork("r0", make_request(0, 4, request_id="fork"))
    scheduler.abort("r0")
    assert scheduler.num_running == 1


def test_an_unknown_policy_is_refused():
    with pytest.raises(
        ConfigError, match="batching='dynamic' is not allowed: batching must be one of continuous, stat"
    ):
        make_scheduler(4, batching="dynamic")
