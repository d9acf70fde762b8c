"""Which tokens are computed in the next step: first come first served, continuous batching (paper section 4.5).

The order of arrival is kept everywhere: whoever runs arrived before whoever waits, because only the head of the queue
is admitted and only the tail of the running ones is preempted. So both are kept sorted for nothing. The sequences of
one request are a group, which is admitted and preempted as a whole.

Plans may run ahead of results. A decode's token is then still on the device when it is planned (`num_pending`), and
whether a sequence has stopped is found when its token comes back: its rows in plans made meanwhile are wasted. Its
blocks and its slot are free at once all the same, because the device runs the steps in the order of their plans.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from pagedjax.config import SchedulerConfig
from pagedjax.errors import InvalidRequest, OutOfBlocks, OutOfSlots, RequestTooLong, UnknownRequest
from pagedjax.host.beam import BeamCandidate, BeamSearch, num_candidates
from pagedjax.host.block_table import num_blocks_for
from pagedjax.host.invariants import check_scheduler
from pagedjax.host.plan import InFlight, ScheduledBeams, ScheduledChunk, SequenceUpdate, StepPlan, StepResult
from pagedjax.host.protocol import Admission, KVAllocator, KVUsage
from pagedjax.host.snapshot import dump_scheduler, load_scheduler
from pagedjax.request import Request, Sequence, SequenceGroup, SequenceStatus

_FINISHED = SequenceStatus.FINISHED
_RUNNING = SequenceStatus.RUNNING
_new_tuple = tuple.__new__  # a third of the time that NamedTuple's own constructor takes, in the two hot loops


class _Step:
    """A plan while it is being made."""

    __slots__ = ("beams", "chunks", "copies", "failed", "preempted", "sampling", "searching")

    def __init__(self) -> None:
        self.chunks: list[ScheduledChunk] = []
        self.sampling: list[Sequence] = []
        self.copies: list[tuple[int, int]] = []
        self.beams: list[ScheduledBeams] = []
        self.searching: list[SequenceGroup] = []
        self.preempted: list[int] = []
        self.failed: list[int] = []


class Scheduler:
    """Plans steps under `config`, with KV memory from `allocator`.

    Attributes:
        num_steps: plans made.
        num_preemptions: sequences that lost their blocks, counted each time.
    """

    def __init__(self, config: SchedulerConfig, allocator: KVAllocator) -> None:
        self.config = config
        self.allocator = allocator
        self.num_steps = 0
        self.num_preemptions = 0
        self._next_seq_id = 0
        self._num_arrivals = 0
        self._groups: dict[str, SequenceGroup] = {}  # all unfinished requests
        self._sequences: dict[int, Sequence] = {}  # their unfinished sequences
        self._waiting: deque[SequenceGroup] = deque()
        self._running: list[SequenceGroup] = []
        self._free_slots = list(range(config.max_num_seqs, 0, -1))  # a stack; its top is at the end
        self._in_flight: deque[InFlight] = deque()
        self._next_index: dict[int, int] = {}  # of samples, by arrival, where there are forks

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> SequenceGroup:
        """Puts a request at the end of the queue.

        Raises:
            RequestTooLong: if the prompt is longer than the model or the whole pool allows.
            InvalidRequest: if it is empty, leaves no room for an output, wants more sequences than may run, or its id
                is in use.
        """
        self._check_request(request)
        beam = request.beam
        group = SequenceGroup(request, [], self._num_arrivals)
        self._num_arrivals += 1
        for index in range(1 if beam else request.width):
            group.sequences.append(self._new_sequence(request, index, request.prompt_token_ids))
        if beam is None and request.width == 1:
            group.only = group.sequences[0]
        if beam is not None:
            group.beam = BeamSearch(beam, request.stop_ids, request.max_len - len(request.prompt_token_ids))
        self._groups[request.request_id] = group
        self._waiting.append(group)
        return group

    def fork(self, request_id: str, request: Request) -> SequenceGroup:
        """Adds a request that goes on from where another one is, as a further sample of the same prompt.

        It takes its parent's place in the order of arrival. All blocks are shared if the parent is decoding; if it
        waits or its prompt is not done, so does the fork, and finds its blocks only in the prefix cache.

        Args:
            request_id: of the parent, which must have one sequence and no step in flight.
            request: of the same prompt and parameters, with an id of its own.

        Raises:
            UnknownRequest: if the parent is not one of the unfinished requests.
            InvalidRequest: if it has several sequences.
            OutOfSlots: if no more sequences may run; nothing is changed then.
        """
        family = self.get(request_id)
        parent = family.only
        if parent is None:
            raise InvalidRequest(f"request {request_id!r} has several samples or beams: only n=1 can be forked")
        assert not parent.num_pending, "the token of a step in flight is not known"
        self._check_request(request)
        decoding = parent.status is _RUNNING and parent.num_computed >= parent.prefill_len
        if decoding and not self._may_run(1):
            raise OutOfSlots(
                f"request {request_id!r} cannot be forked now: {self.num_running} sequences run, and max_num_seqs="
                f"{self.config.max_num_seqs}, max_num_batched_tokens={self.config.max_num_batched_tokens} allow no more"
            )
        index = self._next_index.get(family.arrival, 1)
        self._next_index[family.arrival] = index + 1
        child = self._new_sequence(request, index, parent.token_ids)
        group = SequenceGroup(request, [child], family.arrival, only=child)
        self._groups[request.request_id] = group
        if decoding:
            self._fork_running(parent, child, self._free_slots.pop())
            parent.decode_until = child.decode_until = parent.num_computed
            self._running.insert(self._running.index(family) + 1, group)
        elif parent.status is _RUNNING:  # nobody behind it runs: its prompt takes all that is left of a step
            self._waiting.appendleft(group)
        else:
            self._waiting.insert(self._waiting.index(family) + 1, group)
        return group

    def get(self, request_id: str) -> SequenceGroup:
        """The sequences of an unfinished request.

        Raises:
            UnknownRequest: if there is none of that id: never added, or finished.
        """
        group = self._groups.get(request_id)
        if group is None:
            raise UnknownRequest(f"request {request_id!r} is not one of the {len(self._groups)} unfinished requests")
        return group

    def sequence(self, seq_id: int) -> Sequence:
        """An unfinished sequence."""
        return self._sequences[seq_id]

    def groups(self) -> list[SequenceGroup]:
        """The unfinished requests."""
        return list(self._groups.values())

    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it is, and frees what it holds. Raises UnknownRequest."""
        self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: str, stop_reason: str | int | None = None) -> None:
        """Ends a request for a reason that was found outside. Raises UnknownRequest."""
        self._finish(self.get(request_id), reason, stop_reason)

    def finish_sequence(self, seq_id: int, reason: str, stop_reason: str | int | None = None) -> None:
        """Ends one sample of a request for a reason that was found outside, such as a stop string."""
        self._finish_sequence(self._sequences[seq_id], reason, stop_reason)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._groups)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and a slot."""
        return sum(1 if group.only is not None else len(group.unfinished) for group in self._running)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not come yet."""
        return len(self._in_flight)

    def usage(self) -> KVUsage:
        """What the pool's slots are used for, once the steps planned have run."""
        running = (seq for group in self._running for seq in group.unfinished)
        return self.allocator.usage({seq.seq_id: self.num_computed(seq) for seq in running})

    def num_computed(self, seq: Sequence) -> int:
        """Tokens of a running sequence whose K and V are there once the steps planned have run."""
        return (seq if seq.leader_id is None else self._sequences[seq.leader_id]).num_computed

    # ------------------------------------------------------------------ planning

    def schedule(self) -> StepPlan | None:
        """Plans the next step: running sequences in order of arrival, then the queue.

        Returns:
            The plan; None if there is nothing to compute until a result comes (or nothing at all). A plan with chunks
            is in flight until `update` gets its result; one without only reports.
        """
        step = _Step()
        budget = self.config.max_num_batched_tokens
        add_chunk, add_sampling = step.chunks.append, step.sampling.append
        # Preemption shortens the list at its end, never before the group at hand.
        for group in self._running:
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
                    budget -= 1
                    continue
            budget -= self._plan_group(group, budget, step)
        assert budget >= 0, "more sequences run than a step has tokens, though each was admitted with one to spare"
        if budget and not step.preempted:
            budget = self._admit_waiting(budget, step)
        if not (step.chunks or step.preempted or step.failed):
            return None
        plan = StepPlan(
            self.num_steps,
            tuple(step.chunks),
            self.config.max_num_batched_tokens - budget,
            tuple(step.preempted),
            tuple(step.failed),
            tuple(step.copies),
            tuple(step.beams),
        )
        self.num_steps += 1
        if step.chunks:
            self._in_flight.append(InFlight(plan.step, step.sampling, step.searching))
        return plan

    def _plan_group(self, group: SequenceGroup, budget: int, step: _Step) -> int:
        """Plans what a group computes in this step; returns its tokens."""
        if group.only is not None:
            return self._plan_single(group, group.only, budget, step)
        if group.beam is not None:
            return self._plan_beams(group, group.beam, budget, step)
        members = group.unfinished
        # Without those whose last token is on its way.
        decoding = [seq for seq in members if seq.prefill_len <= seq.num_computed < seq.request.max_len - 1]
        growing = [seq for seq in decoding if seq.num_computed >= seq.decode_until]
        if growing and not self._make_room(group, growing, step):
            return 0
        prefilling = [seq for seq in members if seq.num_computed < seq.prefill_len and seq.leader_id is None]
        for seq in decoding:
            self._plan_decode(seq, step)
        used = len(decoding)
        for seq in prefilling:
            used += self._plan_prefill(group, seq, budget - used, step)
            if seq.num_computed < seq.prefill_len:  # those behind it may share what it has yet to compute
                break
        return used

    def _plan_single(self, group: SequenceGroup, seq: Sequence, budget: int, step: _Step) -> int:
        """`_plan_group` for the only sequence of a request."""
        if seq.num_computed < seq.prefill_len:
            return self._plan_prefill(group, seq, budget, step)
        if seq.num_computed >= seq.request.max_len - 1 or not self._make_room(group, group.sequences, step):
            return 0
        self._plan_decode(seq, step)
        return 1

    def _plan_decode(self, seq: Sequence, step: _Step) -> None:
        self._compute(seq, seq.num_computed + 1, step, samples=True)
        seq.decode_until = min(seq.capacity, seq.request.max_len - 1)

    def _plan_prefill(self, group: SequenceGroup, seq: Sequence, budget: int, step: _Step) -> int:
        """Plans the next chunk of a prompt (after preemption: of prompt and output); returns its tokens."""
        start, end = seq.num_computed, min(seq.prefill_len, seq.num_computed + budget)
        samples = end == seq.prefill_len
        if start == end or not (samples or self.config.enable_chunked_prefill):
            return 0
        self._compute(seq, end, step, samples=samples)
        if not samples:
            return end - start
        followers = [other for other in group.sequences if other.leader_id == seq.seq_id]
        for other in followers:
            other.leader_id = None
            other.hashes, other.num_sealed = list(seq.hashes), seq.num_sealed
            other.num_computed = end
            self._compute(other, end, step, samples=True)
        for one in (seq, *followers):  # who shares the last block must not write to it unasked
            one.decode_until = end if followers else min(one.capacity, one.request.max_len - 1)
            self._set_check_len(one)
        if seq.request.registers_prefix:
            self.allocator.pin(seq.request.request_id, seq)
        return end - start

    def _plan_beams(self, group: SequenceGroup, beam: BeamSearch, budget: int, step: _Step) -> int:
        """Plans a step of all beams together; of prompts that do not fit into it, all but the last token."""
        beams = group.sequences
        if beams[0].num_pending:  # which beams go on is known when the device has answered
            return 0
        missing = sum(len(seq.token_ids) - seq.num_computed for seq in beams)
        if missing > budget:
            return self._plan_beam_prefills(beams, budget, step)
        growing = [seq for seq in beams if seq.num_computed >= seq.prefill_len]
        if growing and not self._make_room(group, growing, step):
            return 0
        wanted = num_candidates(beam.params.beam_width, len(beam.stop_ids))
        first = len(step.chunks)
        for seq in beams:
            self._compute(seq, len(seq.token_ids), step, samples=False)
            seq.num_pending = 1
        logprobs, width = tuple(beam.logprobs), beam.params.beam_width
        step.beams.append(ScheduledBeams(group.request.request_id, first, len(beams), width, logprobs, wanted))
        step.searching.append(group)
        return missing

    def _plan_beam_prefills(self, beams: list[Sequence], budget: int, step: _Step) -> int:
        used = 0
        for seq in beams:
            start, last = seq.num_computed, len(seq.token_ids) - 1
            end = min(last, start + budget - used)
            if start < end and (end == last or self.config.enable_chunked_prefill):
                self._compute(seq, end, step, samples=False)
                used += end - start
            if seq.num_computed < last:  # those behind it may share what it has yet to compute
                break
        return used

    def _compute(self, seq: Sequence, end: int, step: _Step, *, samples: bool) -> None:
        """Plans the tokens of a sequence up to `end`, growing it if they are not of its prefill."""
        start, allocator = seq.num_computed, self.allocator
        first_block, blocks, known = 0, (), start < seq.prefill_len or seq.fresh or seq.request.beam is not None
        if start >= seq.prefill_len and start < end:
            growth = allocator.grow(seq, end)
            if growth.new_blocks:
                first_block, blocks = growth.first_block, tuple(growth.new_blocks)
                seq.capacity += (len(blocks) - len(growth.copies)) * allocator.block_size
                step.copies += growth.copies
        if seq.fresh:
            first_block, blocks = 0, tuple(allocator.block_table(seq.seq_id))
        token_ids = tuple(seq.token_ids[start:end]) if known else ()
        chunk = seq.seq_id, seq.slot, start, end - start, token_ids, first_block, blocks, samples, seq.fresh
        step.chunks.append(ScheduledChunk(*chunk, writes=start >= seq.num_cached))
        seq.fresh = False
        seq.num_computed = end
        if samples:
            seq.num_pending += 1
            step.sampling.append(seq)
        if known and allocator.caches_prefixes:
            allocator.seal(seq)

    def _make_room(self, group: SequenceGroup, growing: list[Sequence], step: _Step) -> bool:
        """Gets memory for the next token of each, from later arrivals if need be; False if it cannot go on now."""
        while not self.allocator.can_grow(growing):
            victim = self._running[-1]
            if victim is self._running[0]:
                # Nobody else holds memory. A token on its way may still end one of the sequences properly.
                if not any(seq.num_pending for seq in group.unfinished):
                    self._fail(group, growing[-1].num_computed + 1, step)
                return False
            self._preempt(victim, step)
            if victim is group:
                return False
        return True

    def _admit_waiting(self, budget: int, step: _Step) -> int:
        """Admits from the head of the queue, skipping nobody; returns the tokens left of the budget."""
        waiting, chunked = self._waiting, self.config.enable_chunked_prefill
        while waiting and budget:
            group = waiting[0]
            members = group.unfinished
            num_slots = len(members) if group.beam is None else group.request.width
            # A preempted one may wait for its last token.
            if not self._may_run(num_slots) or any(seq.num_pending for seq in members):
                break
            alone = not self._running
            if not (chunked or len(members[0].token_ids) <= budget):
                break
            try:
                admissions = self.allocator.admit(members, alone=alone)
            except OutOfBlocks:
                if not alone:
                    break
                self._fail(group, max(len(seq.token_ids) for seq in members), step)
                continue
            waiting.popleft()
            self._start(group, members, admissions, num_slots)
            budget -= self._plan_group(group, budget, step)
        return budget

    def _may_run(self, num_seqs: int) -> bool:
        """Whether so many more sequences get slots, and a token each in every step."""
        if num_seqs > len(self._free_slots):
            return False
        limit, in_use = self.config.max_num_batched_tokens, self.config.max_num_seqs - len(self._free_slots)
        if in_use + num_seqs <= limit:
            return True
        done = sum(
            seq.num_computed >= seq.request.max_len - 1
            for group in self._running
            if group.beam is None
            for seq in group.unfinished
        )
        return in_use - done + num_seqs <= limit

    def _start(
        self, group: SequenceGroup, members: list[Sequence], admissions: list[Admission], num_slots: int
    ) -> None:
        block_size = self.allocator.block_size
        for seq, admission in zip(members, admissions, strict=True):
            seq.slot = self._free_slots.pop()
            seq.status = _RUNNING
            seq.fresh = True
            seq.prefill_len = len(seq.token_ids)
            seq.capacity = num_blocks_for(seq.prefill_len, block_size) * block_size
            seq.num_computed, seq.num_cached, seq.leader_id = admission
        group.spare_slots = [self._free_slots.pop() for _ in range(num_slots - len(members))]
        self._running.append(group)

    def _preempt(self, group: SequenceGroup, step: _Step) -> None:
        """Takes the blocks and slots of the latest arrival; it goes to the head of the queue to be computed again."""
        assert self._running[-1] is group, "only the latest arrival may be preempted"
        self._running.pop()
        self._free_slots += group.spare_slots
        group.spare_slots = []
        for seq in reversed(group.unfinished):
            self._release(seq, self._free_slots)
            seq.status = SequenceStatus.WAITING
            seq.num_computed = 0
            seq.num_preemptions += 1
            step.preempted.append(seq.seq_id)
            self.num_preemptions += 1
        self._waiting.appendleft(group)

    def _fail(self, group: SequenceGroup, num_tokens: int, step: _Step) -> None:
        members, slots = group.unfinished, self.allocator.num_blocks * self.allocator.block_size
        each = "" if len(members) == 1 else f" for each of {len(members)} sequences"
        message = (
            f"needs room for {num_tokens} tokens{each}, but the whole pool holds {slots} ({self.allocator.num_blocks} "
            f"blocks of {self.allocator.block_size} tokens)"
        )
        pinned = slots - self.usage().free if not self._running else 0
        if pinned:
            message += f", of which registered prefixes take {pinned}"
        step.failed += [seq.seq_id for seq in members]
        self._finish(group, "error", message)

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
        step = self._check_result(result)
        self._in_flight.popleft()
        errors = result.errors
        updates: list[SequenceUpdate] = []
        add_update = updates.append
        for seq, token in zip(step.sampling, result.token_ids, strict=True):
            if seq.status is _FINISHED:
                continue
            seq.num_pending -= 1
            if errors and seq.seq_id in errors:
                self._finish_sequence(seq, "error", errors[seq.seq_id])
                add_update(SequenceUpdate(seq.seq_id, None, "error"))
                continue
            token_ids = seq.token_ids
            token_ids.append(token)
            reason = None
            if token in seq.request.stop_ids or len(token_ids) >= seq.check_len:
                reason = self._check_end(seq, token)
            add_update(_new_tuple(SequenceUpdate, (seq.seq_id, token, reason)))
        for group, candidates in zip(step.searching, result.beams or (), strict=True):
            if group.beam is not None and group.unfinished:
                self._advance_beams(group, group.beam, candidates, errors or {})
        return updates

    def _check_end(self, seq: Sequence, token: int) -> str | None:
        """Seals what became full, ends a sequence whose last token is its last, and says why; None if it goes on."""
        if self.allocator.caches_prefixes and seq.status is _RUNNING:
            self.allocator.seal(seq)
            self._set_check_len(seq)
        params = seq.request.params
        if token in seq.request.stop_ids and seq.output_len >= params.min_tokens:
            reason, stop_reason = "stop", token if token in params.stop_token_ids else None
        elif len(seq.token_ids) >= seq.request.max_len:
            reason, stop_reason = "length", None
        else:
            return None
        self._finish_sequence(seq, reason, stop_reason)
        return reason

    def _set_check_len(self, seq: Sequence) -> None:
        seq.check_len = seq.request.max_len
        if self.allocator.caches_prefixes:
            # One token later than a block is full: then its last token is surely computed.
            seq.check_len = min(seq.check_len, (seq.num_sealed + 1) * self.allocator.block_size + 1)

    def _advance_beams(
        self, group: SequenceGroup, beam: BeamSearch, candidates: list[BeamCandidate], errors: dict[int, str]
    ) -> None:
        """Forks the beams that go on more than once, drops those that do not, and ends the search when it is over."""
        parents = group.sequences
        for seq in parents:
            seq.num_pending = 0
        wrong = [seq.seq_id for seq in parents if seq.seq_id in errors]
        if wrong:
            self._finish(group, "error", errors[wrong[0]])
            return
        survivors = beam.advance(candidates, [seq.token_ids[seq.prompt_len :] for seq in parents])
        if not survivors:
            self._finish(group, beam.hypotheses[0].finish_reason, None)
            return
        going_on = {candidate.beam for candidate in survivors}
        for index, seq in enumerate(parents):
            if index not in going_on:
                self._drop(group, seq)
        group.sequences = []
        for candidate in survivors:
            parent = parents[candidate.beam]
            if candidate.beam in going_on:  # the first child is the parent itself
                going_on.remove(candidate.beam)
                group.sequences.append(parent)
            else:
                group.sequences.append(self._fork_beam(group, parent))
        for seq, candidate in zip(group.sequences, survivors, strict=True):
            seq.token_ids.append(candidate.token_id)

    def _fork_beam(self, group: SequenceGroup, parent: Sequence) -> Sequence:
        child = self._new_sequence(parent.request, parent.index, parent.token_ids)
        child.num_preemptions = parent.num_preemptions
        if parent.status is _RUNNING:
            self._fork_running(parent, child, group.spare_slots.pop())
        return child

    def _drop(self, group: SequenceGroup, seq: Sequence) -> None:
        """Ends a beam that nobody goes on from."""
        if seq.status is _RUNNING:
            self._release(seq, group.spare_slots)
        self._end(seq, "dropped", None)

    # ------------------------------------------------------------------ sequences

    def _new_sequence(self, request: Request, index: int, token_ids: list[int] | tuple[int, ...]) -> Sequence:
        seq = Sequence(self._next_seq_id, request, index, list(token_ids), check_len=request.max_len)
        self._next_seq_id += 1
        self._sequences[seq.seq_id] = seq
        return seq

    def _fork_running(self, parent: Sequence, child: Sequence, slot: int) -> None:
        self.allocator.fork(parent, child)
        child.slot, child.status, child.fresh = slot, _RUNNING, True
        child.num_computed, child.prefill_len, child.capacity = parent.num_computed, parent.prefill_len, parent.capacity
        self._set_check_len(child)

    def _finish(self, group: SequenceGroup, reason: str, stop_reason: str | int | None) -> None:
        for seq in group.unfinished:
            self._finish_sequence(seq, reason, stop_reason)

    def _finish_sequence(self, seq: Sequence, reason: str, stop_reason: str | int | None) -> None:
        group, waits = self._groups[seq.request.request_id], seq.status is SequenceStatus.WAITING
        if not waits:
            self._pass_on_lead(group, seq)
            self._release(seq, self._free_slots)
        self._end(seq, reason, stop_reason)
        if group.unfinished:
            return
        (self._waiting if waits else self._running).remove(group)
        self._free_slots += group.spare_slots
        group.spare_slots = []
        del self._groups[group.request.request_id]
        if group.arrival in self._next_index and all(g.arrival != group.arrival for g in self._groups.values()):
            del self._next_index[group.arrival]

    def _pass_on_lead(self, group: SequenceGroup, seq: Sequence) -> None:
        """Lets the first of those that follow a sequence compute what it will not."""
        followers = [other for other in group.sequences if other.leader_id == seq.seq_id]
        for other in followers[1:]:
            other.leader_id = followers[0].seq_id
        for heir in followers[:1]:
            heir.leader_id = None
            heir.num_computed, heir.num_cached, heir.num_sealed = seq.num_computed, seq.num_cached, seq.num_sealed

    def _end(self, seq: Sequence, reason: str, stop_reason: str | int | None) -> None:
        seq.status, seq.finish_reason, seq.stop_reason = _FINISHED, reason, stop_reason
        del self._sequences[seq.seq_id]

    def _release(self, seq: Sequence, slots: list[int]) -> None:
        self.allocator.free(seq)
        slots.append(seq.slot)
        seq.slot = seq.prefill_len = seq.capacity = seq.decode_until = seq.num_cached = 0
        seq.fresh, seq.leader_id, seq.check_len = False, None, seq.request.max_len

    # ------------------------------------------------------------------ checks and snapshots

    def _check_request(self, request: Request) -> None:
        name, length, config = f"request {request.request_id!r}", len(request.prompt_token_ids), self.config
        if request.request_id in self._groups:
            raise InvalidRequest(f"{name} exists already and is not finished: request ids must differ")
        if not length:
            raise InvalidRequest(f"{name} has an empty prompt: at least 1 token is needed")
        if length >= config.max_model_len:
            raise RequestTooLong(
                f"{name} has a prompt of {length} tokens, but max_model_len={config.max_model_len} allows at most "
                f"{config.max_model_len - 1} and one output token"
            )
        if not length < request.max_len <= config.max_model_len:
            raise InvalidRequest(
                f"{name} has max_len={request.max_len}, but it must be above its prompt's {length} tokens and at most "
                f"max_model_len={config.max_model_len}"
            )
        what = "n" if request.beam is None else "beam_width"
        for limit in ("max_num_seqs", "max_num_batched_tokens"):
            if request.width > getattr(config, limit):
                raise InvalidRequest(
                    f"{name} has {what}={request.width}, but {limit}={getattr(config, limit)} allows no more sequences "
                    "at the same time"
                )
        # The last token of all is never computed, so it needs no room.
        needed = min(length + 1, request.max_len - 1)
        num_blocks, block_size = self.allocator.num_blocks, self.allocator.block_size
        if needed > num_blocks * block_size:
            raise RequestTooLong(
                f"{name} has a prompt of {length} tokens and needs room for {needed}, but the whole pool holds "
                f"{num_blocks * block_size} ({num_blocks} blocks of {block_size} tokens)"
            )

    def _check_result(self, result: StepResult) -> InFlight:
        if not self._in_flight:
            raise ValueError(f"the result of step {result.step} was given, but no step is in flight")
        flight = self._in_flight[0]
        step, sampling, searching = flight
        if result.step != step:
            raise ValueError(f"the result of step {result.step} was given, but step {step} is the next to be answered")
        if len(result.token_ids) != len(sampling):
            raise ValueError(f"step {step} samples {len(sampling)} tokens, but its result has {len(result.token_ids)}")
        if len(result.beams or ()) != len(searching):
            raise ValueError(
                f"step {step} searches for {len(searching)} requests, but its result has beams of "
                f"{len(result.beams or ())}"
            )
        known = {seq.seq_id for seq in sampling}.union(seq.seq_id for group in searching for seq in group.sequences)
        if result.errors and (unknown := set(result.errors) - known):
            raise ValueError(f"step {step} has errors for sequences {sorted(unknown)}, which do not sample in it")
        return flight

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
