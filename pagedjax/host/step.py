"""One step's plan while it is being made: who computes what, with whose memory (paper section 4.5)."""

from __future__ import annotations

from pagedjax.config import SchedulerConfig
from pagedjax.errors import OutOfBlocks
from pagedjax.host.beam import BeamSearch, num_candidates
from pagedjax.host.plan import InFlight, ScheduledBeams, ScheduledChunk, StepPlan
from pagedjax.host.protocol import KVAllocator
from pagedjax.host.roster import Roster
from pagedjax.request import Sequence, SequenceGroup


class Step:
    """What a step will do, as far as it is planned.

    Attributes:
        budget: tokens that it can still take.
        closed: whether nobody further may run: a running request has prompts left to compute, for which it may need a
            whole step.
        filling: of the roster, behind this step.
        chunks, copies, beams, swap_outs, swap_ins, preempted, failed, ended: parts of the plan.
        sampling, searching: who waits for its result.
    """

    __slots__ = (
        "_allocator",
        "_config",
        "_coming",
        "_roster",
        "beams",
        "budget",
        "chunks",
        "closed",
        "copies",
        "ended",
        "failed",
        "filling",
        "preempted",
        "sampling",
        "searching",
        "swap_ins",
        "swap_outs",
    )

    def __init__(self, config: SchedulerConfig, allocator: KVAllocator, roster: Roster) -> None:
        self._config = config
        self._allocator = allocator
        self._roster = roster
        self._coming = False  # whether all that ran before are planned
        self.budget = config.max_num_batched_tokens
        self.closed = False
        self.filling = roster.filling
        self.chunks: list[ScheduledChunk] = []
        self.sampling: list[Sequence] = []
        self.copies: list[tuple[int, int]] = []
        self.beams: list[ScheduledBeams] = []
        self.searching: list[SequenceGroup] = []
        self.swap_outs: list[tuple[int, int]] = []
        self.swap_ins: list[tuple[int, int]] = []
        self.preempted: list[int] = []
        self.failed: list[int] = []
        self.ended: list[int] = []

    def plan(self, number: int) -> StepPlan | None:
        """The plan; None if there is nothing to do and nothing to report."""
        assert self.budget >= 0, f"{-self.budget} tokens more are planned than a step has"
        if not (self.chunks or self.preempted or self.failed or self.ended):
            return None
        return StepPlan(
            number,
            tuple(self.chunks),
            self._config.max_num_batched_tokens - self.budget,
            tuple(self.preempted),
            tuple(self.failed),
            tuple(self.copies),
            tuple(self.beams),
            tuple(self.swap_outs),
            tuple(self.swap_ins),
            tuple(self.ended),
        )

    def in_flight(self, number: int) -> InFlight:
        """Who waits for the result."""
        return InFlight(number, self.sampling, self.searching)

    # ------------------------------------------------------------------ groups

    def plan_group(self, group: SequenceGroup) -> None:
        """Plans what a running group computes in this step."""
        if group.only is not None:
            self._plan_single(group, group.only)
        elif group.beam is not None:
            self._plan_beams(group, group.beam)
        else:
            self._plan_samples(group)

    def _plan_single(self, group: SequenceGroup, seq: Sequence) -> None:
        if seq.num_computed < seq.prefill_len:
            self._plan_prefill(group, seq)
        elif (
            seq.done is None and seq.num_computed < seq.request.max_len - 1 and self._make_room(group, group.sequences)
        ):
            self._plan_decode(seq)

    def _plan_samples(self, group: SequenceGroup) -> None:
        members = [seq for seq in group.unfinished if seq.done is None]
        # Without those whose last token is on its way.
        decoding = [seq for seq in members if seq.prefill_len <= seq.num_computed < seq.request.max_len - 1]
        growing = [seq for seq in decoding if seq.num_computed >= seq.decode_until]
        if growing and not self._make_room(group, growing):
            return
        prefilling = [seq for seq in members if seq.num_computed < seq.prefill_len and seq.leader_id is None]
        for seq in decoding:
            self._plan_decode(seq)
        for seq in prefilling:
            self._plan_prefill(group, seq)
            if seq.num_computed < seq.prefill_len:  # those behind it may share what it has yet to compute
                break

    def _plan_decode(self, seq: Sequence) -> None:
        self._compute(seq, seq.num_computed + 1, samples=True)
        seq.decode_until = min(seq.capacity, seq.request.max_len - 1)

    def _plan_prefill(self, group: SequenceGroup, seq: Sequence) -> None:
        """Plans the next chunk of a prompt (after preemption: of prompt and output)."""
        start, end = seq.num_computed, min(seq.prefill_len, seq.num_computed + self._budget_of(group))
        samples = end == seq.prefill_len
        self.closed |= not samples
        if start == end or not (samples or self._config.enable_chunked_prefill):
            return
        self._compute(seq, end, samples=samples)
        if not samples:
            return
        followers = [other for other in group.sequences if other.leader_id == seq.seq_id]
        for other in followers:
            other.leader_id = None
            other.hashes, other.num_sealed = list(seq.hashes), seq.num_sealed
            other.num_computed = end
            self._compute(other, end, samples=True)
        for one in (seq, *followers):  # who shares the last block must not write to it unasked
            one.decode_until = end if followers else min(one.capacity, one.request.max_len - 1)
            self._roster.set_check_len(one)
        if seq.request.registers_prefix:
            self._allocator.pin(seq.request.request_id, seq)

    def _plan_beams(self, group: SequenceGroup, beam: BeamSearch) -> None:
        """Plans a step of all beams together; of prompts that do not fit into it, all but the last token."""
        beams = group.sequences
        if beams[0].num_pending or beams[0].done:  # which beams go on is known when the device has answered
            return
        wanted = sum(len(seq.token_ids) - seq.num_computed for seq in beams)
        # One token each is what is left for them, unless they were admitted just now.
        if wanted > self.budget or (wanted > len(beams) and wanted > self._budget_of(group)):
            self.closed = True
            self._plan_beam_prefills(group)
            return
        growing = [seq for seq in beams if seq.num_computed >= seq.prefill_len]
        if growing and not self._make_room(group, growing):
            return
        first = len(self.chunks)
        for seq in beams:
            self._compute(seq, len(seq.token_ids), samples=False)
            seq.num_pending = 1
        logprobs, width = tuple(beam.logprobs), beam.params.beam_width
        wanted = num_candidates(width, len(beam.stop_ids))
        self.beams.append(ScheduledBeams(group.request.request_id, first, len(beams), width, logprobs, wanted))
        self.searching.append(group)

    def _plan_beam_prefills(self, group: SequenceGroup) -> None:
        for seq in group.sequences:
            start, last = seq.num_computed, len(seq.token_ids) - 1
            end = min(last, start + self._budget_of(group))
            if start < end and (end == last or self._config.enable_chunked_prefill):
                self._compute(seq, end, samples=False)
            if seq.num_computed < last:  # those behind it may share what it has yet to compute
                break

    def _budget_of(self, group: SequenceGroup) -> int:
        """Tokens that a prompt may take: not those of the decodes behind it, which ran while it was swapped out."""
        running = self._roster.running
        if self._coming or running[-1] is group:
            return self.budget
        behind = running[running.index(group) + 1 :]
        return max(0, self.budget - sum(len(other.unfinished) for other in behind))

    def _compute(self, seq: Sequence, end: int, *, samples: bool) -> None:
        """Plans the tokens of a sequence up to `end`, growing it if they are not of its prefill."""
        start, allocator = seq.num_computed, self._allocator
        first_block, blocks, known = 0, (), start < seq.prefill_len or seq.fresh or seq.request.beam is not None
        if start >= seq.prefill_len and start < end:
            growth = allocator.grow(seq, end)
            if growth.new_blocks:
                first_block, blocks = growth.first_block, tuple(growth.new_blocks)
                seq.capacity += (len(blocks) - len(growth.copies)) * allocator.block_size
                self.copies += growth.copies
        if seq.fresh:
            first_block, blocks = 0, tuple(allocator.block_table(seq.seq_id))
        token_ids = tuple(seq.token_ids[start:end]) if known else ()
        chunk = seq.seq_id, seq.slot, start, end - start, token_ids, first_block, blocks, samples, seq.fresh
        self.chunks.append(ScheduledChunk(*chunk, writes=start >= seq.num_cached))
        self.budget -= end - start
        seq.fresh = False
        seq.num_computed = end
        if samples:
            seq.num_pending += 1
            self.sampling.append(seq)
        if known and allocator.caches_prefixes:
            allocator.seal(seq)

    # ------------------------------------------------------------------ memory

    def _make_room(self, group: SequenceGroup, growing: list[Sequence]) -> bool:
        """Gets memory for the next token of each, from later arrivals if need be; False if it cannot go on now."""
        roster = self._roster
        while not self._allocator.can_grow(growing):
            victim = roster.running[-1]
            if victim is roster.running[0]:
                # Nobody else holds memory. A token on its way may still end one of the sequences properly.
                if not any(seq.num_pending for seq in group.unfinished):
                    self._fail(group, growing[-1].num_computed + 1)
                return False
            self.preempt(victim)
            if victim is group:
                return False
        return True

    def preempt(self, group: SequenceGroup) -> None:
        """Takes the memory of the latest arrival."""
        seq_ids, moves, ended = self._roster.preempt(group)
        self.preempted += seq_ids
        self.swap_outs += moves
        self.ended += ended

    def let_others_run(self) -> None:
        """Lets those run that do not, when all that do are planned and nobody had to give way.

        Who is swapped out comes first; while anybody is, nobody is admitted (paper section 4.5).
        """
        self._coming = True
        if self.preempted:
            return
        self._swap_in()
        roster = self._roster
        if not roster.swapped and roster.batching.may_join(len(roster.running), roster.filling):
            self.filling = self._admit_waiting()

    def _swap_in(self) -> None:
        """Brings back who is swapped out, in order of arrival, as far as tokens, slots and memory go."""
        roster = self._roster
        while roster.swapped and not self.closed:
            group = roster.swapped[0]
            members, num_slots = group.unfinished, roster.slots_for(group)
            if len(members) > self.budget or not roster.may_run(num_slots) or any(seq.num_pending for seq in members):
                break
            alone = not roster.running
            try:
                moves = self._allocator.swap_in(members, alone=alone)
            except OutOfBlocks:
                if not alone:
                    break
                self._fail(group, max(seq.capacity for seq in members))
                continue
            roster.resume(group, num_slots)
            self.plan_group(group)
            if group.unfinished:  # else it has outgrown the pool, and the next one may take the same blocks
                self.swap_ins += moves

    def _admit_waiting(self) -> bool:
        """Admits from the head of the queue, skipping nobody, as far as tokens, slots and memory go.

        Returns:
            Whether somebody is left for want of nothing but tokens.
        """
        roster, chunked = self._roster, self._config.enable_chunked_prefill
        while roster.waiting and self.budget and not self.closed:
            group = roster.waiting[0]
            members = group.unfinished
            num_slots = roster.slots_for(group)
            # A preempted one may wait for its last token.
            if not roster.may_run(num_slots) or any(seq.num_pending for seq in members):
                return False
            if not (chunked or len(members[0].token_ids) <= self.budget):
                break
            alone = not roster.running
            try:
                admissions = self._allocator.admit(members, alone=alone)
            except OutOfBlocks:
                if not alone:
                    return False
                self._fail(group, max(len(seq.token_ids) for seq in members))
                continue
            roster.start(group, members, admissions, num_slots)
            self.plan_group(group)
        return bool(roster.waiting)

    def _fail(self, group: SequenceGroup, num_tokens: int) -> None:
        """Ends a request that could not go on though it had the whole pool to itself."""
        members, allocator = group.unfinished, self._allocator
        slots = allocator.num_blocks * allocator.block_size
        each = "" if len(members) == 1 else f" for each of {len(members)} sequences"
        message = (
            f"needs room for {num_tokens} tokens{each}, but the whole pool holds {slots} ({allocator.num_blocks} "
            f"blocks of {allocator.block_size} tokens)"
        )
        self.failed += [seq.seq_id for seq in members]
        self._roster.finish(group, "error", message)
        pinned = len({block for blocks in allocator.pins().values() for block in blocks}) * allocator.block_size
        if pinned and not self._roster.running:  # nobody runs, and still it is in use
            for seq in members:
                seq.stop_reason = f"{message}, of which registered prefixes take {pinned}"
