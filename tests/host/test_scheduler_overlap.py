"""Plans that run one step ahead of the results."""

from host_harness import answer, make_request, make_scheduler

from pagedjax.host import ScheduledChunk, SequenceUpdate, StepPlan


def plan_of(scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check_invariants()
    return plan


def brief(plan):
    return [(chunk.seq_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def test_a_decode_is_planned_before_its_token_is_known():
    scheduler = make_scheduler(4)
    (seq,) = scheduler.add(make_request(0, 3)).sequences
    first = plan_of(scheduler)
    assert (seq.num_pending, seq.token_ids) == (1, list(make_request(0, 3).prompt_token_ids))
    second = plan_of(scheduler)
    assert second.chunks == (ScheduledChunk(0, 1, 3, 1, (), 0, (), True, False),)
    assert scheduler.num_in_flight == 2
    assert answer(scheduler, first, 5) == [SequenceUpdate(0, 5, None)]
    assert answer(scheduler, second, 6) == [SequenceUpdate(0, 6, None)]
    assert seq.token_ids[3:] == [5, 6]


def test_nothing_is_planned_past_the_known_end():
    scheduler = make_scheduler(4)
    scheduler.add(make_request(0, 3, max_tokens=2))
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert brief(second) == [(0, 3, 1)]
    assert scheduler.schedule() is None  # both tokens are on their way
    assert answer(scheduler, first, 5) == [SequenceUpdate(0, 5, None)]
    assert scheduler.schedule() is None
    assert answer(scheduler, second, 6) == [SequenceUpdate(0, 6, "length")]


def test_the_row_of_a_sequence_that_had_stopped_is_ignored():
    scheduler = make_scheduler(3, max_num_seqs=1)
    (seq,) = scheduler.add(make_request(0, 8, stop_ids=(5,), max_tokens=4)).sequences
    scheduler.add(make_request(1, 5, max_tokens=4))
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert answer(scheduler, first, 5) == [SequenceUpdate(0, 5, "stop")]
    assert scheduler.allocator.seq_ids() == []  # blocks and slot are free, though a step of its is in flight
    third = plan_of(scheduler)
    assert third.chunks[0][:2] == (1, 1) and third.chunks[0].fresh
    assert answer(scheduler, second, 7) == []
    assert seq.token_ids[8:] == [5]
    assert answer(scheduler, third, 8) == [SequenceUpdate(1, 8, None)]


def test_the_row_of_an_aborted_sequence_is_ignored():
    scheduler = make_scheduler(4)
    scheduler.add(make_request(0, 3))
    scheduler.add(make_request(1, 3))
    plan = plan_of(scheduler)
    scheduler.abort("r0")
    scheduler.check_invariants()
    assert answer(scheduler, plan, 5) == [SequenceUpdate(1, 5, None)]


def test_a_preempted_sequence_keeps_its_token_and_waits_for_it():
    scheduler = make_scheduler(num_blocks=2, block_size=2)
    for number in range(2):
        scheduler.add(make_request(number, 2, max_tokens=3))
    seq = scheduler.get("r1").sequences[0]
    first = plan_of(scheduler)
    second = plan_of(scheduler)
    assert (brief(second), second.preempted, seq.num_pending) == ([(0, 2, 1)], (1,), 1)
    third = plan_of(scheduler)
    assert brief(third) == [(0, 3, 1)]
    assert answer(scheduler, first, 5) == [SequenceUpdate(0, 5, None), SequenceUpdate(1, 5, None)]
    answer(scheduler, second)
    answer(scheduler, third)
    assert plan_of(scheduler).chunks[0].token_ids == (*make_request(1, 2).prompt_token_ids, 5)


def test_a_preempted_sequence_at_the_head_is_not_admitted_before_its_token_is_known():
    scheduler = make_scheduler(num_blocks=3, block_size=2)
    scheduler.add(make_request(0, 4, max_tokens=2))
    scheduler.add(make_request(1, 2, max_tokens=3))
    first = plan_of(scheduler)
    second = plan_of(scheduler)
    assert (brief(second), second.preempted) == ([(0, 4, 1)], (1,))
    scheduler.abort("r0")
    assert scheduler.schedule() is None  # the pool is empty, but what to compute is not known
    assert answer(scheduler, first, 5) == [SequenceUpdate(1, 5, None)]
    assert brief(plan_of(scheduler)) == [(1, 0, 3)]


def test_a_preempted_sequence_may_turn_out_to_have_stopped():
    scheduler = make_scheduler(num_blocks=3, block_size=2)
    scheduler.add(make_request(0, 4, max_tokens=4))
    (seq,) = scheduler.add(make_request(1, 2, max_tokens=3, stop_ids=(5,))).sequences
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert second.preempted == (1,)
    assert answer(scheduler, first, 5) == [SequenceUpdate(0, 5, None), SequenceUpdate(1, 5, "stop")]
    scheduler.check_invariants()
    assert (scheduler.num_waiting, seq.finish_reason) == (0, "stop")


def test_a_request_that_outgrows_the_pool_first_gets_the_token_on_its_way():
    for token, end in ((5, "stop"), (6, "error")):
        scheduler = make_scheduler(num_blocks=2, block_size=2)
        (seq,) = scheduler.add(make_request(0, 3, max_tokens=4, stop_ids=(5,))).sequences
        scheduler.add(make_request(1, 1, max_tokens=1))
        first, second = plan_of(scheduler), plan_of(scheduler)
        assert scheduler.schedule() is None
        answer(scheduler, first)
        assert scheduler.schedule() is None
        answer(scheduler, second, token)
        plan = plan_of(scheduler)
        assert (plan.failed, brief(plan)) == ((() if end == "stop" else (0,)), [(1, 0, 1)])
        assert (seq.finish_reason, seq.token_ids[3:]) == (end, [9, token])
