"""Copy-on-write, parallel samples, forks and beams: exact blocks, copies and plans (paper section 4.4)."""

import random

import pytest
from host_harness import Pipeline, answer, expected_beams, make_request, make_scheduler, paged, run

from pagedjax.errors import InvalidRequest, OutOfBlocks, OutOfSlots, UnknownRequest
from pagedjax.host import (
    BeamCandidate,
    BeamSearch,
    BlockPool,
    BlockTable,
    Growth,
    Hypothesis,
    ScheduledBeams,
    StepResult,
)
from pagedjax.request import BeamSearchParams


def test_the_first_writer_copies_and_the_last_writes_in_place():
    pool = BlockPool(8)
    first = BlockTable(pool, block_size=4)
    first.append(7)
    second, third = first.fork(), first.fork()
    assert (second.blocks, second.num_tokens, pool.ref_count(1), pool.ref_count(2)) == ([1, 2], 7, 3, 3)
    assert first.append(1) == Growth(1, [3], [(2, 3)])
    assert second.append(2) == Growth(1, [4, 5], [(2, 4)])  # a copy of the last block, and one more behind it
    assert third.append(1) == Growth(2, [], [])
    assert (first.blocks, second.blocks, third.blocks) == ([1, 3], [1, 4, 5], [1, 2])
    assert [pool.ref_count(block) for block in range(1, 6)] == [3, 1, 1, 1, 1]


def test_full_blocks_are_never_copied():
    pool = BlockPool(8)
    first = BlockTable(pool, block_size=4)
    first.append(8)
    second = first.fork()
    assert first.append(1) == Growth(2, [3], [])
    assert second.append(1) == Growth(2, [4], [])
    assert second.append(0) == Growth(3, [], [])


def test_a_copy_that_finds_no_block_changes_nothing():
    pool = BlockPool(2)
    first = BlockTable(pool, block_size=4)
    first.append(7)
    second = first.fork()
    with pytest.raises(OutOfBlocks):
        second.append(1)
    assert (second.blocks, second.num_tokens, pool.ref_count(2)) == ([1, 2], 7, 2)


def test_a_table_may_share_only_the_beginning():
    pool = BlockPool(8)
    first = BlockTable(pool, block_size=4)
    first.append(11)
    second = first.fork(2)
    assert (second.blocks, second.num_tokens) == ([1, 2], 8)
    first.free()
    assert pool.num_used == 2


def brief(plan):
    return [(chunk.seq_id, chunk.start, chunk.num_tokens, chunk.new_blocks) for chunk in plan.chunks]


def test_two_samples_as_in_figure_8():
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    scheduler.add(make_request(0, 7, n=2))
    plan, updates = run(scheduler)
    assert brief(plan) == [(0, 0, 7, (1, 2)), (1, 7, 0, (1, 2))]
    assert [chunk.samples for chunk in plan.chunks] == [True, True] and plan.num_tokens == 7
    assert [update.seq_id for update in updates] == [0, 1]
    plan, _ = run(scheduler)
    assert brief(plan) == [(0, 7, 1, (3,)), (1, 7, 1, ())]
    assert plan.copies == ((2, 3),)
    assert [chunk.first_block for chunk in plan.chunks] == [1, 0]
    plan, _ = run(scheduler)
    assert brief(plan) == [(0, 8, 1, (4,)), (1, 8, 1, (5,))]
    assert plan.copies == ()


def test_samples_of_a_prompt_that_fills_its_blocks_copy_nothing():
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    scheduler.add(make_request(0, 8, n=3))
    run(scheduler)
    plan, _ = run(scheduler)
    assert (plan.copies, brief(plan)) == ((), [(0, 8, 1, (3,)), (1, 8, 1, (4,)), (2, 8, 1, (5,))])


def test_samples_are_admitted_and_preempted_together():
    scheduler = make_scheduler(num_blocks=5, block_size=2, max_num_seqs=4)
    scheduler.add(make_request(0, 2, max_tokens=8))
    scheduler.add(make_request(1, 3, max_tokens=4, n=3))
    scheduler.add(make_request(2, 1))  # a slot is missing
    plan, _ = run(scheduler)
    assert [chunk.seq_id for chunk in plan.chunks] == [0, 1, 2, 3]
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 1)
    plan, _ = run(scheduler)
    # The first takes a block; the samples would need two for their copies, and have one.
    assert (plan.preempted, [chunk.seq_id for chunk in plan.chunks]) == ((3, 2, 1), [0])
    scheduler.check_invariants()
    while scheduler.has_unfinished():
        run(scheduler)
        scheduler.check_invariants()
    assert scheduler.usage().free == 10


def test_what_was_preempted_is_computed_again_once_for_what_samples_have_in_common():
    scheduler = make_scheduler(num_blocks=16, block_size=2)
    (first, second) = scheduler.add(make_request(0, 5, max_tokens=9, n=2)).sequences
    run(scheduler)
    for tokens in ([3, 3], [3, 4], [3, 3]):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(StepResult(plan.step, tokens))
    scheduler.roster.preempt(scheduler.roster.running[0])
    assert first.token_ids[5:] == [9, 3, 3, 3] and second.token_ids[5:] == [9, 3, 4, 3]
    plan, _ = run(scheduler)
    # Seven tokens are the same, six of them in full blocks.
    assert [(chunk.seq_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [(0, 0, 9), (1, 6, 3)]
    assert plan.chunks[0].new_blocks[:3] == plan.chunks[1].new_blocks[:3]


@pytest.mark.parametrize("n", [2, 4, 6])
def test_the_saving_of_a_group_at_full_length_is_the_closed_form(n):
    rng = random.Random(n)
    size = 16
    for _ in range(60):
        prompt_len, max_tokens = rng.randint(1, 300), rng.randint(2, 200)
        scheduler = make_scheduler(4096, size, max_num_seqs=n, max_num_batched_tokens=512, max_model_len=512)
        scheduler.add(make_request(0, prompt_len, max_tokens, n=n))
        for _ in range(max_tokens):  # the last token is only sampled
            plan = scheduler.schedule()
            allocator = paged(scheduler)
            logical, physical = allocator.num_logical_blocks, allocator.num_physical_blocks
            answer(scheduler, plan)
        assert not scheduler.has_unfinished()
        stored = prompt_len + max_tokens - 1
        saved = (n - 1) * (prompt_len // size)
        assert (logical, logical - physical) == (n * -(-stored // size), saved)


def fork_of(number, scheduler, request_id="r0"):
    request = make_request(number, 1, request_id=f"r{number}")
    for name in ("prompt_token_ids", "params", "stop_ids", "max_len"):
        setattr(request, name, getattr(scheduler.get(request_id).request, name))
    return request


def test_a_fork_shares_everything_and_stands_behind_its_parent():
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    for number in range(2):
        scheduler.add(make_request(number, 5))
    run(scheduler)
    (child,) = scheduler.fork("r0", fork_of(2, scheduler)).sequences
    assert (child.index, child.token_ids) == (1, scheduler.get("r0").sequences[0].token_ids)
    assert paged(scheduler).block_table(2) == paged(scheduler).block_table(0) == [1, 2]
    plan, _ = run(scheduler)
    assert [(chunk.seq_id, chunk.token_ids, chunk.new_blocks, chunk.fresh) for chunk in plan.chunks] == [
        (0, (), (5,), False),
        (2, (9,), (1, 2), True),  # the last token is at its parent's slot only
        (1, (), (), False),
    ]
    assert plan.copies == ((2, 5),)
    (other,) = scheduler.fork("r2", fork_of(3, scheduler)).sequences
    assert other.index == 2
    scheduler.check_invariants()


def test_an_aborted_fork_leaves_nothing_to_copy():
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    scheduler.add(make_request(0, 5))
    run(scheduler)
    scheduler.fork("r0", fork_of(1, scheduler))
    scheduler.abort("r1")
    plan, _ = run(scheduler)
    assert (plan.copies, brief(plan)) == ((), [(0, 5, 1, ())])
    assert scheduler.fork("r0", fork_of(1, scheduler)).sequences[0].index == 2  # none is used twice


def test_what_cannot_be_forked():
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_num_seqs=3)
    scheduler.add(make_request(0, 5))
    scheduler.add(make_request(1, 5, n=2))
    run(scheduler)
    before = scheduler.snapshot()
    with pytest.raises(OutOfSlots, match=r"^request 'r0' cannot be forked now: 3 sequences run, and max_num_seqs=3, "):
        scheduler.fork("r0", fork_of(2, scheduler))
    with pytest.raises(InvalidRequest, match=r"^request 'r1' has several samples or beams: only n=1 can be forked$"):
        scheduler.fork("r1", fork_of(2, scheduler))
    with pytest.raises(UnknownRequest):
        scheduler.fork("r9", fork_of(2, scheduler))
    with pytest.raises(InvalidRequest, match="exists already"):
        scheduler.fork("r0", fork_of(1, scheduler))
    assert scheduler.snapshot() == before


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens"])
def test_more_sequences_than_may_run_are_refused(field):
    scheduler = make_scheduler(16, **{field: 3})
    for what, wide in (("n", {"n": 4}), ("beam_width", {"beam": BeamSearchParams(beam_width=4)})):
        with pytest.raises(InvalidRequest, match=rf"^request 'r0' has {what}=4, but {field}=3 allows no more"):
            scheduler.add(make_request(0, 3, **wide))
    assert not scheduler.has_unfinished()


def test_a_group_that_outgrows_the_pool_says_how_many_it_has():
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    group = scheduler.add(make_request(0, 3, n=4))
    run(scheduler)
    plan = scheduler.schedule()
    assert plan is not None and plan.failed == (0, 1, 2, 3)
    assert group.sequences[0].stop_reason == (
        "needs room for 4 tokens for each of 4 sequences, but the whole pool holds 8 (4 blocks of 2 tokens)"
    )


def test_a_beam_step_waits_for_the_device_forks_survivors_and_frees_the_dropped():
    pipeline = Pipeline(make_scheduler(num_blocks=16, block_size=4), depth=1)
    scheduler = pipeline.scheduler
    group = scheduler.add(make_request(0, 5, max_tokens=6, beam=BeamSearchParams(beam_width=3)))
    pipeline.searches["r0"] = group.request
    pipeline.step()
    assert scheduler.schedule() is None
    (plan,) = pipeline.plans
    assert plan.beams == (ScheduledBeams("r0", 0, 1, 3, (0.0,), 6),)
    assert [(chunk.num_tokens, chunk.samples) for chunk in plan.chunks] == [(5, False)]
    pipeline.read_all()
    assert len(group.sequences) == 3 and group.spare_slots == []
    assert {tuple(paged(scheduler).block_table(seq.seq_id)) for seq in group.sequences} == {(1, 2)}
    pipeline.step()
    plan = pipeline.plans[-1]
    assert len(plan.copies) == 2 and plan.beams[0].logprobs == tuple(group.beam.logprobs)
    assert all(chunk.token_ids == (group.sequences[i].token_ids[5],) for i, chunk in enumerate(plan.chunks))
    scheduler.check_invariants()
    pipeline.run_to_end()
    assert pipeline.found["r0"] == expected_beams(group.request)
    assert scheduler.usage().free == 64


def test_a_search_ends_as_its_parameters_say():
    def search(**params):
        found = BeamSearch(BeamSearchParams(beam_width=2, **params), frozenset({0}), max_tokens=4)
        steps = [
            [
                BeamCandidate(0, 0, -1.0),
                BeamCandidate(0, 1, -1.5),
                BeamCandidate(0, 2, -2.0),
                BeamCandidate(0, 3, -9.0),
            ],
            [
                BeamCandidate(0, 0, -2.0),
                BeamCandidate(1, 0, -2.5),
                BeamCandidate(0, 1, -2.6),
                BeamCandidate(1, 3, -9.0),
            ],
            [
                BeamCandidate(0, 1, -2.7),
                BeamCandidate(0, 2, -3.0),
                BeamCandidate(1, 1, -9.0),
                BeamCandidate(1, 2, -9.5),
            ],
            [BeamCandidate(0, 1, -2.8), BeamCandidate(1, 1, -9.0)],
        ]
        outputs = [[]]
        for number, candidates in enumerate(steps, 1):
            survivors = found.advance(candidates, outputs)
            if not survivors:
                return number, [(h.token_ids, h.score) for h in found.hypotheses]
            outputs = [[*outputs[s.beam], s.token_id] for s in survivors]
        raise AssertionError("never over")

    assert search(early_stopping=True) == (2, [((0,), -1.0), ((1, 0), -1.0)])
    assert search(early_stopping=False, length_penalty=0.0) == (2, [((0,), -1.0), ((1, 0), -2.0)])
    # With a penalty the best beam might still win: at its length now, or at the longest there could be.
    assert search(early_stopping=False) == (2, [((0,), -1.0), ((1, 0), -1.0)])
    steps, found = search(early_stopping="never")
    assert (steps, found[0]) == (4, ((1, 1, 1, 1), -0.7))


def test_hypotheses_beyond_the_best_ranks_do_not_count():
    search = BeamSearch(BeamSearchParams(beam_width=2), frozenset({0}), max_tokens=9)
    candidates = [
        BeamCandidate(0, 3, -1.0),
        BeamCandidate(0, 4, -1.1),
        BeamCandidate(0, 0, -1.2),
        BeamCandidate(0, 5, -2),
    ]
    assert [s.token_id for s in search.advance(candidates, [[]])] == [3, 4]
    assert search.hypotheses == [] and search.logprobs == [-1.0, -1.1]


def test_the_last_token_ends_every_beam():
    search = BeamSearch(BeamSearchParams(beam_width=2), frozenset(), max_tokens=1)
    candidates = [BeamCandidate(0, 3, -1.0), BeamCandidate(0, 4, -1.5), BeamCandidate(0, 5, -2.0)]
    assert search.advance(candidates, [[]]) == []
    assert search.hypotheses == [Hypothesis(-1.0, -1.0, (3,), "length"), Hypothesis(-1.5, -1.5, (4,), "length")]


@pytest.mark.parametrize("beam", [None, BeamSearchParams(beam_width=2)])
def test_nobody_is_admitted_behind_a_group_that_has_not_computed_all_its_prompts(beam):
    """Whole prompts: what is left of a step may be too little for the next sample, and enough for somebody else."""
    shape = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 16, "enable_chunked_prefill": False}
    pipeline = Pipeline(make_scheduler(16, 4, **shape), depth=0)
    scheduler = pipeline.scheduler
    pipeline.add(make_request(0, 2, max_tokens=14, n=1 if beam else 2, beam=beam))
    for _ in range(10):
        pipeline.step()
    scheduler.roster.preempt(scheduler.roster.running[0])
    for number in range(1, 5):
        pipeline.add(make_request(number, 1))
    pipeline.step()
    assert [group.request.request_id for group in scheduler.roster.running] == ["r0"]
    pipeline.run_to_end()
    assert scheduler.usage().free == 64
