"""Preemption by swapping: who goes out, what is moved, who comes back, and in which order."""

import pytest
from host_harness import Pipeline, answer, expected_end, make_request, make_scheduler, paged, run

from pagedjax.errors import ConfigError
from pagedjax.host import preemption
from pagedjax.host.preemption import policy_names
from pagedjax.request import BeamSearchParams, SequenceStatus

SWAPPED, WAITING = SequenceStatus.SWAPPED, SequenceStatus.WAITING


def status_of(scheduler, request_id):
    (status,) = {seq.status for seq in scheduler.get(request_id).unfinished}
    return status


def test_the_latest_arrival_goes_out_and_comes_back_with_its_blocks():
    scheduler = make_scheduler(4, block_size=2, num_host_blocks=8, preemption="swap")
    scheduler.add(make_request(0, 4, max_tokens=3))
    scheduler.add(make_request(1, 3, max_tokens=3))
    plan, _ = run(scheduler)
    assert [chunk.new_blocks for chunk in plan.chunks] == [(1, 2), (3, 4)]
    plan, _ = run(scheduler)
    assert plan.preempted == (1,) and plan.swap_outs == ((3, 1), (4, 2)) and plan.swap_ins == ()
    assert [chunk.seq_id for chunk in plan.chunks] == [0]
    assert status_of(scheduler, "r1") is SWAPPED
    assert (scheduler.num_running, scheduler.num_swapped, scheduler.num_waiting) == (1, 1, 0)
    plan, updates = run(scheduler)
    assert [(update.seq_id, update.finish_reason) for update in updates] == [(0, "length")]
    plan, _ = run(scheduler)
    (chunk,) = plan.chunks
    assert [host for host, _ in plan.swap_ins] == [1, 2] and plan.swap_outs == ()
    assert chunk.new_blocks == tuple(device for _, device in plan.swap_ins)
    assert (chunk.start, chunk.token_ids, chunk.fresh, chunk.samples) == (3, (9,), True, True)
    assert paged(scheduler).swap_space.num_used == 0


def test_blocks_that_hold_nothing_are_not_moved():
    scheduler = make_scheduler(8, block_size=2, num_host_blocks=8, preemption="swap", max_num_batched_tokens=4)
    scheduler.add(make_request(0, 10))
    run(scheduler)  # 4 of 10 tokens
    scheduler.preempt_latest()
    plan = scheduler.schedule()
    assert plan is not None and not plan.chunks
    assert [device for device, _ in plan.swap_outs] == [1, 2]
    plan, _ = run(scheduler)
    assert len(plan.swap_ins) == 2 and len(plan.chunks[0].new_blocks) == 5
    assert (plan.chunks[0].start, plan.chunks[0].num_tokens) == (4, 4)


def test_shared_blocks_are_moved_once_and_stay_shared():
    scheduler = make_scheduler(20, block_size=2, num_host_blocks=20)
    scheduler.add(make_request(0, 5, n=3))
    run(scheduler)
    assert paged(scheduler).num_logical_blocks == 9
    scheduler.preempt_latest()
    plan = scheduler.schedule()
    assert plan is not None and len(plan.swap_outs) == 3 and len(plan.preempted) == 3
    plan, _ = run(scheduler)
    assert len(plan.swap_ins) == 3
    assert len(plan.copies) == 2  # the partial block is written to by all three
    assert (paged(scheduler).num_logical_blocks, paged(scheduler).num_physical_blocks) == (9, 5)


def test_who_is_swapped_comes_back_before_anybody_new_and_nobody_new_before_that():
    scheduler = make_scheduler(6, block_size=2, num_host_blocks=6, preemption="swap", max_num_seqs=4)
    for number in range(2):
        scheduler.add(make_request(number, 5, max_tokens=6))
    run(scheduler)
    scheduler.add(make_request(2, 1, max_tokens=2))  # a single block
    order = []
    for _ in range(20):
        plan = scheduler.schedule()
        if plan is None:
            break
        assert not (plan.swap_outs and plan.swap_ins)
        waits = status_of(scheduler, "r1") is SWAPPED if "r1" in scheduler.roster.groups else False
        order += [chunk.seq_id for chunk in plan.chunks if chunk.fresh]
        if waits:
            assert all(chunk.seq_id == 0 for chunk in plan.chunks), "somebody new runs while another is out"
        if plan.chunks:
            answer(scheduler, plan)
    assert order == [1, 2]
    assert not scheduler.has_unfinished()


def test_a_full_swap_space_means_computing_again():
    scheduler = make_scheduler(8, block_size=2, num_host_blocks=1, preemption="swap")
    scheduler.add(make_request(0, 3))
    run(scheduler)
    scheduler.preempt_latest()
    plan = scheduler.schedule()
    assert plan is not None and plan.swap_outs == () and plan.preempted == (0,)
    assert status_of(scheduler, "r0") is WAITING
    plan, _ = run(scheduler)
    assert plan.chunks[0].num_tokens == 4


@pytest.mark.parametrize(
    ("policy", "n", "status"),
    [
        ("auto", 1, WAITING),
        ("auto", 2, SWAPPED),
        ("swap", 1, SWAPPED),
        ("swap", 2, SWAPPED),
        ("recompute", 1, WAITING),
        ("recompute", 2, WAITING),
    ],
)
def test_policies(policy, n, status):
    scheduler = make_scheduler(16, num_host_blocks=16, preemption=policy)
    scheduler.add(make_request(0, 5, n=n))
    run(scheduler)
    scheduler.preempt_latest()
    scheduler.schedule()
    assert status_of(scheduler, "r0") is status


def test_an_unknown_policy_is_refused():
    assert policy_names() == ("auto", "recompute", "swap")
    with pytest.raises(ConfigError, match=r"^preemption='never' is not allowed: preemption must be one of auto, "):
        make_scheduler(4, preemption="never")


def test_a_new_policy_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "long_ones.py").write_text(
        "def swaps(group, block_size):\n    return len(group.sequences[0].token_ids) > 6\n"
    )
    monkeypatch.setattr(preemption, "__path__", [*preemption.__path__, str(tmp_path)])
    preemption.policy_names.cache_clear()
    try:
        scheduler = make_scheduler(16, num_host_blocks=16, preemption="long_ones")
        for number, prompt_len in enumerate((5, 9)):
            scheduler.add(make_request(number, prompt_len))
        run(scheduler)
        scheduler.preempt_latest()
        scheduler.preempt_latest()
        scheduler.schedule()
        assert (status_of(scheduler, "r0"), status_of(scheduler, "r1")) == (WAITING, SWAPPED)
    finally:
        preemption.policy_names.cache_clear()


def test_nothing_computed_is_not_swapped():
    scheduler = make_scheduler(8, block_size=2, num_host_blocks=8, preemption="swap", max_num_seqs=3)
    scheduler.add(make_request(0, 3))
    scheduler.schedule()
    scheduler.preempt_latest()
    group = scheduler.get("r0")
    group.sequences[0].num_computed = 0
    plan = scheduler.schedule()
    assert plan is not None and plan.swap_outs == () and plan.preempted == (0,)


def test_cached_content_is_not_moved_twice():
    scheduler = make_scheduler(12, block_size=2, num_host_blocks=12, preemption="swap", enable_prefix_caching=True)
    scheduler.add(make_request(0, 6, family=1))
    scheduler.add(make_request(1, 6, family=1))
    run(scheduler)
    scheduler.preempt_latest()
    plan, _ = run(scheduler)
    assert len(plan.swap_outs) == 3
    scheduler.preempt_latest()
    plan = scheduler.schedule()
    assert plan is not None and plan.swap_outs == ((4, 4),), "the three before are in the swap space"
    assert paged(scheduler).swap_space.num_used == 4
    plan = scheduler.schedule()
    assert plan is not None and plan.swap_ins == ((4, 4),), "the three before are still in the device's pool"
    assert [chunk.start for chunk in plan.chunks] == [7, 6]


def test_a_token_on_its_way_is_taken_in_while_the_sequence_is_out():
    pipeline = Pipeline(make_scheduler(16, block_size=2, num_host_blocks=16, preemption="swap"), depth=1)
    request = make_request(0, 5, max_tokens=6)
    seq_id = pipeline.add(request)
    for step in range(40):
        if step % 3 == 2:
            pipeline.scheduler.preempt_latest()
        pipeline.step()
        pipeline.scheduler.check_invariants()
    assert (pipeline.outputs[seq_id], pipeline.ends[seq_id]) == expected_end(request, 32)
    assert pipeline.device.num_swapped_in > 5


def test_a_search_goes_on_while_it_is_out():
    pipeline = Pipeline(make_scheduler(30, block_size=2, num_host_blocks=30), depth=1)
    pipeline.add(make_request(0, 5, max_tokens=8, beam=BeamSearchParams(3, 8)))
    for step in range(60):
        if step % 2:
            pipeline.scheduler.preempt_latest()
        pipeline.step()
        pipeline.scheduler.check_invariants()
    assert pipeline.device.num_swapped_in > 10
    assert not pipeline.scheduler.has_unfinished() and pipeline.found["r0"]


def test_a_fork_of_a_swapped_request_shares_its_blocks_on_the_host():
    pipeline = Pipeline(make_scheduler(16, block_size=2, num_host_blocks=16, preemption="swap"), depth=0)
    request = make_request(0, 5, max_tokens=6)
    first = pipeline.add(request)
    pipeline.step()
    pipeline.scheduler.preempt_latest()
    pipeline.step()
    second = pipeline.fork("r0", make_request(0, 5, max_tokens=6, request_id="fork"))
    assert status_of(pipeline.scheduler, "fork") is SWAPPED
    assert paged(pipeline.scheduler).swap_space.num_used == 3
    pipeline.run_to_end()
    assert (pipeline.outputs[first], pipeline.ends[first]) == expected_end(request, 32)
    start = pipeline.starts[second]
    assert pipeline.outputs[second] == expected_end(request, 32, 1, start)[0]


@pytest.mark.parametrize("where", ["out", "beam"])
def test_aborting_who_is_out_frees_the_swap_space(where):
    scheduler = make_scheduler(16, block_size=2, num_host_blocks=16, preemption="swap")
    scheduler.add(make_request(0, 5, beam=BeamSearchParams(2, 8) if where == "beam" else None))
    plan = scheduler.schedule()
    scheduler.preempt_latest()
    scheduler.schedule()
    assert paged(scheduler).swap_space.num_used == 3
    scheduler.abort("r0")
    scheduler.check_invariants()
    assert paged(scheduler).swap_space.num_used == 0 and not scheduler.has_unfinished()
    assert plan is not None


def test_who_comes_back_to_a_pool_that_prefixes_have_filled_ends_with_a_reason():
    scheduler = make_scheduler(4, block_size=2, num_host_blocks=8, preemption="swap")
    scheduler.add(make_request(0, 5, max_tokens=2))
    run(scheduler)
    scheduler.preempt_latest()
    scheduler.schedule()
    blocks = paged(scheduler).pool.allocate(2)
    paged(scheduler)._pins["p"] = blocks
    plan = scheduler.schedule()
    assert plan is not None and plan.failed == (0,)
    assert not scheduler.has_unfinished() and paged(scheduler).swap_space.num_used == 0


def test_recovering_computes_everything_again():
    pipeline = Pipeline(make_scheduler(12, block_size=2, num_host_blocks=8, preemption="swap", max_num_seqs=2), depth=1)
    requests = [make_request(number, 5, max_tokens=6) for number in range(3)]
    ids = [pipeline.add(request) for request in requests]
    for _ in range(3):
        pipeline.step()
    pipeline.scheduler.preempt_latest()
    pipeline.step()
    pipeline.fail()
    scheduler = pipeline.scheduler
    assert (scheduler.num_waiting, scheduler.num_swapped, scheduler.num_running, scheduler.num_in_flight) == (
        3,
        0,
        0,
        0,
    )
    scheduler.check_invariants()
    assert scheduler.usage().free == 24
    pipeline.run_to_end()
    for seq_id, request in zip(ids, requests, strict=True):
        assert (pipeline.outputs[seq_id], pipeline.ends[seq_id]) == expected_end(request, 24)


def test_beams_found_in_the_cache_but_for_their_last_tokens_wait_for_a_step_that_has_room():
    """Admitted again, each beam needs just one token, for which no running sequence has left room."""
    scheduler = make_scheduler(28, block_size=4, max_num_batched_tokens=8, enable_prefix_caching=True, max_num_seqs=8)
    pipeline = Pipeline(scheduler, depth=0)
    pipeline.add(make_request(0, 12, max_tokens=40, prompt_logprobs=0))
    pipeline.add(make_request(1, 12, max_tokens=10, beam=BeamSearchParams(2, 10)))
    pipeline.add(make_request(2, 10, max_tokens=5))
    while len(scheduler.get("r1").sequences[0].token_ids) < 13:
        pipeline.step()
    for _ in range(len(scheduler.roster.running)):
        scheduler.preempt_latest()
    while pipeline.step():
        scheduler.check_invariants()
        for plan in pipeline.plans:
            assert plan.num_tokens <= 8 and all(chunk.num_tokens >= 0 for chunk in plan.chunks)
    assert not scheduler.has_unfinished()


def test_who_outgrows_the_pool_as_it_comes_back_moves_nothing():
    """The next one may come back to the same blocks in the same step."""
    scheduler = make_scheduler(4, block_size=2, num_host_blocks=16, preemption="swap", max_num_seqs=4)
    scheduler.add(make_request(0, 7, max_tokens=9))
    run(scheduler)
    plan, _ = run(scheduler)  # its eighth token fills the pool
    scheduler.preempt_latest()
    scheduler.schedule()
    scheduler.add(make_request(1, 5, max_tokens=2))
    plan = scheduler.schedule()
    assert plan is not None and plan.failed == (0,)
    assert plan.swap_ins == () and [chunk.seq_id for chunk in plan.chunks] == [1]
