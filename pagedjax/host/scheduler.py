"""Which tokens are computed in the next step: first come first served, continuous batching (paper section 4.5).

Plans may run ahead of results. A decode's token is then still on the device when it is planned (`num_pending`), and
whether a sequence has stopped is found when its token comes back: its rows in plans made meanwhile are wasted. Its
blocks and its slot are free at once all the same, because the device runs the steps in the order of their plans.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from pagedjax.config import SchedulerConfig
from pagedjax.errors import InvalidRequest
from pagedjax.host.beam import BeamCandidate, BeamSearch
from pagedjax.host.checks import check_request, check_result
from pagedjax.host.invariants import check_scheduler
from pagedjax.host.plan import InFlight, ScheduledChunk, SequenceUpdate, StepPlan, StepResult
from pagedjax.host.protocol import KVAllocator, KVUsage
from pagedjax.host.roster import Roster
from pagedjax.host.snapshot import dump_scheduler, load_scheduler
from pagedjax.host.step import Step
from pagedjax.request import Request, Sequence, SequenceGroup, SequenceStatus

_FINISHED = SequenceStatus.FINISHED
_RUNNING = SequenceStatus.RUNNING
_new_tuple = tuple.__new__  # a third of the time that NamedTuple's own constructor takes, in the two hot loops


class Scheduler:
    """Plans steps under `config`, with KV memory from `allocator`.

    Attributes:
        roster: the requests: waiting, running and swapped out.
        num_steps: plans made.
    """

    def __init__(self, config: SchedulerConfig, allocator: KVAllocator) -> None:
        self.config = config
        self.allocator = allocator
        self.roster = Roster(config, allocator)
        self.num_steps = 0
        self._num_asked = 0  # preemptions, from outside
        self._in_flight: deque[InFlight] = deque()

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> SequenceGroup:
        """Puts a request at the end of the queue.

        Raises:
            RequestTooLong: if the prompt is longer than the model or the whole pool allows.
            InvalidRequest: if it is empty, leaves no room for an output, wants more sequences than may run, or its id
                is in use.
        """
        check_request(request, self.config, self.allocator, self.roster.groups)
        return self.roster.add(request)

    def fork(self, request_id: str, request: Request) -> SequenceGroup:
        """Adds a request that goes on from where another one is, as a further sample of the same prompt.

        It takes its parent's place in the order of arrival. All blocks are shared if the parent is decoding; if it
        waits or its prompt is not done, so does the fork, and finds its blocks only in the prefix cache.

        Args:
            request_id: of the parent, which must have one sequence and no step in flight.
            request: of the same prompt and parameters, with an id of its own.

        Raises:
            UnknownRequest: if the parent is not one of the unfinished requests.
            InvalidRequest: if it has several sequences, or has all its tokens.
            OutOfSlots: if no more sequences may run; nothing is changed then.
        """
        family = self.get(request_id)
        parent = family.only
        if parent is None:
            raise InvalidRequest(f"request {request_id!r} has several samples or beams: only n=1 can be forked")
        if parent.done is not None:
            raise InvalidRequest(f"request {request_id!r} has all its tokens: it only waits for its batch to end")
        assert not parent.num_pending, "the token of a step in flight is not known"
        check_request(request, self.config, self.allocator, self.roster.groups)
        return self.roster.fork(family, parent, request)

    def get(self, request_id: str) -> SequenceGroup:
        """The sequences of an unfinished request.

        Raises:
            UnknownRequest: if there is none of that id: never added, or finished.
        """
        return self.roster.get(request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it is, and frees what it holds. Raises UnknownRequest."""
        self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: str, stop_reason: str | int | None = None) -> None:
        """Ends a request for a reason that was found outside. Raises UnknownRequest."""
        self.roster.finish(self.get(request_id), reason, stop_reason)

    def finish_sequence(self, seq_id: int, reason: str, stop_reason: str | int | None = None) -> None:
        """Ends one sample of a request for a reason that was found outside, such as a stop string.

        With static batching it keeps its memory until its batch ends.
        """
        self.roster.complete(self.roster.sequences[seq_id], reason, stop_reason)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.roster.groups)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks."""
        return len(self.roster.waiting)

    @property
    def num_swapped(self) -> int:
        """Requests whose memory is on the host."""
        return len(self.roster.swapped)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and a slot."""
        return self.roster.num_running

    @property
    def num_preemptions(self) -> int:
        """Sequences that lost their blocks, counted each time."""
        return self.roster.num_preemptions

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not come yet."""
        return len(self._in_flight)

    def usage(self) -> KVUsage:
        """What the pool's slots are used for, once the steps planned have run."""
        running = (seq for group in self.roster.running for seq in group.unfinished)
        return self.allocator.usage({seq.seq_id: self.roster.num_computed(seq) for seq in running})

    # ------------------------------------------------------------------ planning

    def schedule(self) -> StepPlan | None:
        """Plans the next step: running sequences in order of arrival, then the queue.

        Returns:
            The plan; None if there is nothing to compute until a result comes (or nothing at all). A plan with chunks
            is in flight until `update` gets its result; one without only reports.
        """
        step = Step(self.config, self.allocator, self.roster)
        if self.roster.batching.holds:
            step.ended += self.roster.end_batch()
        self._preempt_as_asked(step)
        add_chunk, add_sampling = step.chunks.append, step.sampling.append
        num_decodes = 0
        # Preemption shortens the list at its end, never before the group at hand.
        for group in self.roster.running:
            seq = group.only
            if seq is not None:
                start = seq.num_computed
                if start < seq.decode_until:
                    # Fast path, 15 of 16 decodes: the block is there, the token is at the sequence's slot.
                    add_chunk(
                        _new_tuple(ScheduledChunk, (seq.seq_id, seq.slot, start, 1, (), 0, (), True, False, True))
                    )
                    add_sampling(seq)
                    seq.num_computed = start + 1
                    seq.num_pending += 1
                    num_decodes += 1
                    continue
            step.budget -= num_decodes
            num_decodes = 0
            step.plan_group(group)
        step.budget -= num_decodes
        step.let_others_run()
        plan = step.plan(self.num_steps)
        if plan is None:
            return None
        self.num_steps += 1
        self.roster.filling = step.filling
        if plan.chunks:
            self._in_flight.append(step.in_flight(plan.step))
        return plan

    def preempt_latest(self) -> None:
        """Lets the next step begin by taking the memory of the latest arrival that runs, as if it were needed."""
        self._num_asked += 1

    def _preempt_as_asked(self, step: Step) -> None:
        for _ in range(min(self._num_asked, len(self.roster.running))):
            step.preempt(self.roster.running[-1])
        self._num_asked = 0

    # ------------------------------------------------------------------ results

    def update(self, result: StepResult) -> list[SequenceUpdate]:
        """Takes what the oldest step in flight sampled, and the continuations of its beams.

        Returns:
            What became of each token, in the plan's order; nothing for sequences that had ended before, nor for beams,
            which say all at their end (`SequenceGroup.beam`).

        Raises:
            ValueError: if the result is not of that step, or has not one token for every sampling chunk; nothing is
                changed then.
        """
        check_result(result, self._in_flight[0] if self._in_flight else None)
        flight = self._in_flight.popleft()
        errors = result.errors
        updates: list[SequenceUpdate] = []
        add_update = updates.append
        for seq, token in zip(flight.sampling, result.token_ids, strict=True):
            if seq.status is _FINISHED:
                continue
            seq.num_pending -= 1
            if seq.done is not None:  # it was planned ahead
                continue
            if errors and seq.seq_id in errors:
                self.roster.finish_sequence(seq, "error", errors[seq.seq_id])
                add_update(SequenceUpdate(seq.seq_id, None, "error"))
                continue
            token_ids = seq.token_ids
            token_ids.append(token)
            reason = None
            if token in seq.request.stop_ids or len(token_ids) >= seq.check_len:
                reason = self._check_end(seq, token)
            add_update(_new_tuple(SequenceUpdate, (seq.seq_id, token, reason)))
        for group, candidates in zip(flight.searching, result.beams or (), strict=True):
            if group.beam is not None and group.unfinished:
                self._advance_beams(group, group.beam, candidates, errors or {})
        return updates

    def _check_end(self, seq: Sequence, token: int) -> str | None:
        """Seals what became full, ends a sequence whose last token is its last, and says why; None if it goes on."""
        if self.allocator.caches_prefixes and seq.status is _RUNNING:
            self.allocator.seal(seq)
            self.roster.set_check_len(seq)
        params = seq.request.params
        if token in seq.request.stop_ids and seq.output_len >= params.min_tokens:
            reason, stop_reason = "stop", token if token in params.stop_token_ids else None
        elif len(seq.token_ids) >= seq.request.max_len:
            reason, stop_reason = "length", None
        else:
            return None
        return self.roster.complete(seq, reason, stop_reason)

    def _advance_beams(
        self, group: SequenceGroup, beam: BeamSearch, candidates: list[BeamCandidate], errors: dict[int, str]
    ) -> None:
        """Forks the beams that go on more than once, drops those that do not, and ends the search when it is over."""
        parents = group.sequences
        for seq in parents:
            seq.num_pending = 0
        wrong = [seq.seq_id for seq in parents if seq.seq_id in errors]
        if wrong:
            self.roster.finish(group, "error", errors[wrong[0]])
            return
        survivors = beam.advance(candidates, [seq.token_ids[seq.prompt_len :] for seq in parents])
        if not survivors:
            for seq in group.unfinished:
                self.roster.complete(seq, beam.hypotheses[0].finish_reason, None)
            return
        going_on = {candidate.beam for candidate in survivors}
        for index, seq in enumerate(parents):
            if index not in going_on:
                self.roster.drop_beam(group, seq)
        group.sequences = []
        for candidate in survivors:
            parent = parents[candidate.beam]
            if candidate.beam in going_on:  # the first child is the parent itself
                going_on.remove(candidate.beam)
                group.sequences.append(parent)
            else:
                group.sequences.append(self.roster.fork_beam(group, parent))
        for seq, candidate in zip(group.sequences, survivors, strict=True):
            seq.token_ids.append(candidate.token_id)

    # ------------------------------------------------------------------ prefixes

    def unpin(self, name: str) -> None:
        """Lets go of the prefix that the request of that name registered."""
        self.allocator.unpin(name)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Raises BlocksInUse while a sequence or a registered prefix holds a block."""
        self.allocator.reset_prefix_cache()

    # ------------------------------------------------------------------ checks and snapshots

    def step_requests(self) -> dict[str, int]:
        """Requests for which a step may have failed: those that run, else the next that would; and their tokens."""
        roster = self.roster
        groups = roster.running or [*roster.swapped, *roster.waiting][:1]
        return {group.request.request_id: sum(len(seq.token_ids) for seq in group.sequences) for group in groups}

    def recover(self) -> None:
        """Forgets the steps in flight and all K and V; every request waits to be computed again from its tokens.

        Whatever state an exception left: nothing is asked of it but the requests' tokens and how they ended. Registered
        prefixes are gone.
        """
        self._in_flight.clear()
        self._num_asked = 0
        self.allocator.reset()
        self.roster.requeue_all()

    def snapshot(self) -> dict[str, Any]:
        """Scheduler and allocator as plain JSON-able data."""
        return dump_scheduler(self)

    def restore(self, data: Any) -> None:
        """Takes over a snapshot's state and goes on as the one it was taken of, steps in flight included.

        Raises:
            SnapshotError: if the snapshot is of another version or configuration, or makes no sense; nothing is
                changed then.
        """
        load_scheduler(self, data)

    def check_invariants(self) -> None:
        """Raises InvariantError, saying what is broken, if the state is one that can never be reached."""
        check_scheduler(self)
