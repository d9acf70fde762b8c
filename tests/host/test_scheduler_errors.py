"""What a caller can do wrong, and what the message says."""

import pytest
from host_harness import make_request, make_scheduler, run

from pagedjax.config import CacheConfig, SchedulerConfig
from pagedjax.errors import InvalidRequest, InvariantError, OutOfBlocks, RequestTooLong, UnknownRequest
from pagedjax.host import PagedAllocator, Scheduler, StepResult
from pagedjax.host.plan import InFlight


def test_a_prompt_that_leaves_the_model_no_room():
    scheduler = make_scheduler(16, max_model_len=10)
    with pytest.raises(
        RequestTooLong,
        match=r"^request 'r0' has a prompt of 10 tokens, but max_model_len=10 allows at most 9 and one output token$",
    ):
        scheduler.add(make_request(0, 10))
    assert not scheduler.has_unfinished()


def test_a_prompt_that_fills_the_whole_pool():
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    with pytest.raises(
        RequestTooLong,
        match=r"^request 'r0' has a prompt of 8 tokens and needs room for 9, but the whole pool holds 8 "
        r"\(2 blocks of 4 tokens\)$",
    ):
        scheduler.add(make_request(0, 8, max_tokens=2))
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize("max_tokens", [0, -1, 8])
def test_a_length_that_the_model_does_not_allow(max_tokens):
    request = make_request(0, 3)
    request.max_len = 3 + max_tokens
    with pytest.raises(
        InvalidRequest,
        match=rf"^request 'r0' has max_len={3 + max_tokens}, but it must be above its prompt's 3 tokens and at most "
        r"max_model_len=10$",
    ):
        make_scheduler(16, max_model_len=10).add(request)


def test_an_empty_prompt():
    with pytest.raises(InvalidRequest, match=r"^request 'r0' has an empty prompt: at least 1 token is needed$"):
        make_scheduler(16).add(make_request(0, 0))


def test_a_request_id_in_use():
    scheduler = make_scheduler(16)
    scheduler.add(make_request(0, 3))
    with pytest.raises(
        InvalidRequest, match=r"^request 'r0' exists already and is not finished: request ids must differ$"
    ):
        scheduler.add(make_request(1, 3, request_id="r0"))
    assert scheduler.num_waiting == 1


def test_unknown_requests():
    scheduler = make_scheduler(16)
    scheduler.add(make_request(0, 3, max_tokens=1))
    scheduler.add(make_request(1, 3))
    run(scheduler)
    for call in (scheduler.get, scheduler.abort, lambda request_id: scheduler.finish(request_id, "stop")):
        with pytest.raises(UnknownRequest, match=r"^request 'r0' is not one of the 1 unfinished requests$"):
            call("r0")


def test_results_that_answer_no_step_in_flight():
    scheduler = make_scheduler(16)
    with pytest.raises(ValueError, match=r"^the result of step 0 was given, but no step is in flight$"):
        scheduler.update(StepResult(0, []))
    scheduler.add(make_request(0, 3))
    scheduler.add(make_request(1, 3))
    scheduler.schedule()
    scheduler.schedule()
    before = scheduler.snapshot()
    with pytest.raises(ValueError, match=r"^the result of step 1 was given, but step 0 is the next to be answered$"):
        scheduler.update(StepResult(1, [5, 5]))
    with pytest.raises(ValueError, match=r"^step 0 samples 2 tokens, but its result has 3$"):
        scheduler.update(StepResult(0, [5, 5, 5]))
    with pytest.raises(ValueError, match=r"^step 0 has errors for sequences \[7\], which do not sample in it$"):
        scheduler.update(StepResult(0, [5, 5], {7: "not finite", 1: "not finite"}))
    assert scheduler.snapshot() == before


def test_a_request_that_an_allocator_can_never_admit_ends_with_a_reason():
    class Reserving(PagedAllocator):
        """Wants twice the room of a prompt, as an allocator that reserves for the output does."""

        def admit(self, sequences, *, alone):
            if 2 * len(sequences[0].token_ids) > self.num_blocks * self.block_size:
                raise OutOfBlocks("too little for the output")
            return super().admit(sequences, alone=alone)

    scheduler = Scheduler(SchedulerConfig(), Reserving(CacheConfig(4, 4)))
    (seq,) = scheduler.add(make_request(0, 9)).sequences
    scheduler.add(make_request(1, 8))
    plan, _ = run(scheduler)
    assert plan.failed == (0,)
    assert [chunk.seq_id for chunk in plan.chunks] == [1]
    assert seq.stop_reason == "needs room for 9 tokens, but the whole pool holds 16 (4 blocks of 4 tokens)"


def test_who_is_preempted_waits_at_least_until_the_next_step():
    class FailsOnce(PagedAllocator):
        """Has no block when first asked to grow, but plenty right after."""

        failed = False

        def can_grow(self, sequences):
            failed, self.failed = self.failed, True
            return failed and super().can_grow(sequences)

    scheduler = Scheduler(SchedulerConfig(), FailsOnce(CacheConfig(4, 16)))
    for number in range(2):
        scheduler.add(make_request(number, 4))
    run(scheduler)
    plan, _ = run(scheduler)
    assert ([chunk.seq_id for chunk in plan.chunks], plan.preempted) == ([0], (1,))
    assert [chunk.seq_id for chunk in run(scheduler)[0].chunks] == [0, 1]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda s: s.roster.running.reverse(),
            r"^running \['r1', 'r0'\], swapped \[\] and waiting \['r2'\] are not in order of arrival$",
        ),
        (
            lambda s: s.roster.waiting.clear(),
            r"^running \['r0', 'r1'\], swapped \[\] and waiting \[\] are not \['r0', 'r1', 'r2'\], once each$",
        ),
        (lambda s: setattr(s.roster, "next_seq_id", 2), r"^sequence \[2\] was never added$"),
        (
            lambda s: s.allocator.free(s.roster.sequences[0]),
            r"^sequences \[1\] are in the pool, but \[0, 1\] should be$",
        ),
        (
            lambda s: object.__setattr__(s.config, "max_num_batched_tokens", 1),
            r"^2 sequences run, but a step has 1 tokens$",
        ),
        (lambda s: s.roster.free_slots.append(1), r"^slots \[1, 1, 2\] are in use or free, not 1 to 2 once each$"),
        (lambda s: s._in_flight.clear(), r"^sequence 0 has 1 tokens pending, 0 in flight$"),
        (lambda s: setattr(s, "num_steps", 0), r"^step \[0\] in flight was never planned$"),
        (lambda s: s._in_flight.append(InFlight(0, [], [])), r"^steps \[0, 0\] in flight are out of order$"),
        (
            lambda s: setattr(s.roster.sequences[0], "capacity", 8),
            r"^running sequence 0 believes in 8 slots, but has 1 blocks$",
        ),
        (lambda s: s.roster.sequences[0].token_ids.pop(), r"^running sequence 0 has 3 tokens, 3 of them computed$"),
        (lambda s: setattr(s.roster.sequences[0], "num_computed", 0), r"^running sequence 0 has 0 tokens in 4 slots$"),
        (
            lambda s: setattr(s.roster.sequences[0], "num_computed", 2),
            r"^running sequence 0 decodes before its prefill is done$",
        ),
        (lambda s: setattr(s.roster.sequences[0], "decode_until", 2), r"^running sequence 0 decodes until 2, not 4$"),
        (
            lambda s: setattr(s.roster.sequences[0].request, "max_len", 3),
            r"^running sequence 0 has 4 tokens, but may reach 3$",
        ),
        (
            lambda s: setattr(s.roster.waiting[0].sequences[0], "slot", 1),
            r"^waiting sequence 2 still holds \(1, 0, 0, 0, 0, 0, 0\)$",
        ),
        (lambda s: s.roster.waiting[0].sequences.clear(), r"^request 'r2' has no sequences$"),
    ],
)
def test_invariants_name_what_is_broken(break_it, message):
    scheduler = make_scheduler(16, max_num_seqs=2)
    for number in range(3):
        scheduler.add(make_request(number, 3))
    scheduler.schedule()
    scheduler.check_invariants()
    break_it(scheduler)
    with pytest.raises(InvariantError, match=message):
        scheduler.check_invariants()
