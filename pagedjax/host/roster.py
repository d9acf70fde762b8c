"""Who waits, who runs, who is swapped out, and in which slot: the requests of a scheduler, and how they come and go.

The order of arrival is kept everywhere. Without swapping whoever runs arrived before whoever waits, because only the
head of the queue is admitted and only the latest of the running ones is preempted. But whoever is swapped out comes
back before those that wait, though some of them, to be computed again, may have arrived before it. The sequences of one
request are a group, which is admitted, preempted and swapped as a whole (paper section 4.5).
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from pagedjax.config import SchedulerConfig
from pagedjax.errors import OutOfBlocks, OutOfSlots, UnknownRequest
from pagedjax.host.batching import load_batching
from pagedjax.host.beam import BeamSearch
from pagedjax.host.preemption import load_policy
from pagedjax.host.protocol import Admission, KVAllocator
from pagedjax.host.swap_space import Moves
from pagedjax.request import Request, Sequence, SequenceGroup, SequenceStatus

_FINISHED = SequenceStatus.FINISHED
_RUNNING = SequenceStatus.RUNNING
_SWAPPED = SequenceStatus.SWAPPED
_WAITING = SequenceStatus.WAITING


class Roster:
    """The unfinished requests.

    Attributes:
        groups: all of them, by request id.
        sequences: those of theirs that have not ended, by id.
        waiting: requests that hold no memory, in order of arrival.
        running: requests that do, in order of arrival.
        swapped: requests whose memory is on the host, in order of arrival.
        filling: whether the batch that was begun last lacks nothing but a step's tokens for further requests.
        free_slots: a stack; its top is at the end.
        next_index: of the next fork's sample, by arrival, where there are forks.
        num_arrivals: requests added so far; forks, which arrive with their parent, not counted.
        num_preemptions: sequences that lost their blocks, counted each time.
    """

    def __init__(self, config: SchedulerConfig, allocator: KVAllocator) -> None:
        self.config = config
        self.allocator = allocator
        self.groups: dict[str, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.filling = False
        self.batching = load_batching(config.batching)
        self._swaps = load_policy(config.preemption)
        self.free_slots = list(range(config.max_num_seqs, 0, -1))
        self.next_index: dict[int, int] = {}
        self.next_seq_id = 0
        self.num_arrivals = 0
        self.num_preemptions = 0

    # ------------------------------------------------------------------ coming

    def add(self, request: Request) -> SequenceGroup:
        """Puts a request at the end of the queue."""
        beam = request.beam
        group = SequenceGroup(request, [], self.num_arrivals)
        self.num_arrivals += 1
        for index in range(1 if beam else request.width):
            seq = self._make_sequence(request, index, request.prompt_token_ids)
            self._register(seq)
            group.sequences.append(seq)
        if beam is None and request.width == 1:
            group.only = group.sequences[0]
        if beam is not None:
            group.beam = BeamSearch(beam, request.stop_ids, request.max_len - len(request.prompt_token_ids))
        self.groups[request.request_id] = group
        self.waiting.append(group)
        return group

    def fork(self, family: SequenceGroup, parent: Sequence, request: Request) -> SequenceGroup:
        """Puts a request behind its parent, with the parent's tokens, and its blocks if it has a next token to come.

        Raises:
            OutOfSlots: the parent runs, and no further sequence may.
            OutOfBlocks: memory that is not shared has no room for a fork.
        """
        computed = parent.status in (_RUNNING, _SWAPPED) and parent.num_computed >= parent.prefill_len
        if computed and parent.status is _RUNNING and not self.may_run(1):
            raise OutOfSlots(
                f"request {family.request.request_id!r} cannot be forked now: {self.num_running} sequences run, and "
                f"max_num_seqs={self.config.max_num_seqs}, max_num_batched_tokens={self.config.max_num_batched_tokens} "
                "allow no more"
            )
        index = self.next_index.get(family.arrival, 1)
        child = self._make_sequence(request, index, parent.token_ids)
        if computed:
            self._share(parent, child)  # first, since it may find no memory
        self._register(child)
        self.next_index[family.arrival] = index + 1
        group = SequenceGroup(request, [child], family.arrival, only=child)
        self.groups[request.request_id] = group
        if child.status is _RUNNING:
            child.slot, child.fresh = self.free_slots.pop(), True
            parent.decode_until = child.decode_until = parent.num_computed
        self._enter(self._queue_of(child.status), group)
        return group

    def fork_beam(self, group: SequenceGroup, parent: Sequence) -> Sequence:
        """A further beam that goes on from `parent`."""
        child = self._make_sequence(parent.request, parent.index, parent.token_ids)
        child.num_preemptions = parent.num_preemptions
        if parent.status is not _WAITING:
            self._share(parent, child)
        self._register(child)
        if child.status is _RUNNING:
            child.slot, child.fresh = group.spare_slots.pop(), True
        return child

    def _make_sequence(self, request: Request, index: int, token_ids: list[int] | tuple[int, ...]) -> Sequence:
        return Sequence(self.next_seq_id, request, index, list(token_ids), check_len=request.max_len)

    def _register(self, seq: Sequence) -> None:
        self.next_seq_id += 1
        self.sequences[seq.seq_id] = seq

    def _share(self, parent: Sequence, child: Sequence) -> None:
        """Gives a sequence what its parent holds. Raises OutOfBlocks, and changes nothing, if that needs memory."""
        self.allocator.fork(parent, child)
        child.status = parent.status
        child.num_computed, child.prefill_len, child.capacity = parent.num_computed, parent.prefill_len, parent.capacity
        self.set_check_len(child)

    def _enter(self, queue: deque[SequenceGroup] | list[SequenceGroup], group: SequenceGroup) -> None:
        """Puts a group where it belongs by arrival, behind those that arrived with it."""
        if not queue or queue[-1].arrival <= group.arrival:
            queue.append(group)
        else:
            insort(queue, group, key=_arrival)

    def _queue_of(self, status: SequenceStatus) -> deque[SequenceGroup] | list[SequenceGroup]:
        return {_WAITING: self.waiting, _RUNNING: self.running, _SWAPPED: self.swapped}[status]

    # ------------------------------------------------------------------ running

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and a slot."""
        return sum(1 if group.only is not None else len(group.unfinished) for group in self.running)

    def get(self, request_id: str) -> SequenceGroup:
        """The sequences of an unfinished request. Raises UnknownRequest."""
        group = self.groups.get(request_id)
        if group is None:
            raise UnknownRequest(f"request {request_id!r} is not one of the {len(self.groups)} unfinished requests")
        return group

    def num_computed(self, seq: Sequence) -> int:
        """Tokens of a running sequence whose K and V are there once the steps planned have run."""
        return (seq if seq.leader_id is None else self.sequences[seq.leader_id]).num_computed

    def may_run(self, num_seqs: int) -> bool:
        """Whether so many more sequences get slots, and a token each in every step."""
        if num_seqs > len(self.free_slots):
            return False
        limit, in_use = self.config.max_num_batched_tokens, self.config.max_num_seqs - len(self.free_slots)
        if in_use + num_seqs <= limit:
            return True
        done = sum(
            seq.num_computed >= seq.request.max_len - 1 or seq.done is not None
            for group in self.running
            if group.beam is None
            for seq in group.unfinished
        )
        return in_use - done + num_seqs <= limit

    def start(self, group: SequenceGroup, members: list[Sequence], admissions: list[Admission], num_slots: int) -> None:
        """Lets the request at the head of the queue run, with the memory that it was given."""
        assert self.waiting[0] is group, "only the head of the queue may be admitted"
        self.waiting.popleft()
        allocator = self.allocator
        for seq, admission in zip(members, admissions, strict=True):
            seq.slot = self.free_slots.pop()
            seq.status = _RUNNING
            seq.fresh = True
            seq.prefill_len = len(seq.token_ids)
            seq.capacity = allocator.num_blocks_of(seq.seq_id) * allocator.block_size
            seq.num_computed, seq.num_cached, seq.leader_id = admission
        group.spare_slots = [self.free_slots.pop() for _ in range(num_slots - len(members))]
        self._enter(self.running, group)

    def resume(self, group: SequenceGroup, num_slots: int) -> None:
        """Lets the first of the swapped requests run on, whose memory is there again."""
        assert self.swapped[0] is group, "only the first of the swapped requests may come back"
        del self.swapped[0]
        members = group.unfinished
        for seq in members:
            seq.slot, seq.status, seq.fresh = self.free_slots.pop(), _RUNNING, True
            if group.beam is None and seq.num_computed >= seq.prefill_len:
                seq.decode_until = seq.num_computed  # its next block is not there yet
        group.spare_slots = [self.free_slots.pop() for _ in range(num_slots - len(members))]
        self._enter(self.running, group)

    def introduce_all(self) -> None:
        """Lets a device that knows nobody hear of every sequence that runs, with its next tokens."""
        for group in self.running:
            for seq in group.unfinished:
                seq.fresh = True
                if seq.decode_until:
                    seq.decode_until = seq.num_computed

    def slots_for(self, group: SequenceGroup) -> int:
        """Slots that a group keeps while it runs: a search keeps some for the beams to come."""
        return len(group.unfinished) if group.beam is None else group.request.width

    def set_check_len(self, seq: Sequence) -> None:
        """Sets when a sequence's end is looked for next, and what it filled is sealed."""
        seq.check_len = seq.request.max_len
        if self.allocator.caches_prefixes:
            # One token later than a block is full: then its last token is surely computed.
            seq.check_len = min(seq.check_len, (seq.num_sealed + 1) * self.allocator.block_size + 1)

    # ------------------------------------------------------------------ going

    def preempt(self, group: SequenceGroup) -> tuple[list[int], Moves, list[int]]:
        """Takes the blocks and slots of the latest arrival, which keeps its place in the order of arrival.

        It is swapped out, if the policy says so, anything of it is computed and there is room; or it waits to be
        computed again.

        Returns:
            The ids of its sequences, the blocks to be moved to the host, and who of it was done and has ended now.
        """
        assert self.running[-1] is group, "only the latest arrival may be preempted"
        ended = self._let_go(group.unfinished)
        if not group.unfinished:
            return [], [], ended
        self.running.pop()
        self.free_slots += group.spare_slots
        group.spare_slots = []
        members = group.unfinished
        moves = self._try_to_swap(group, members)
        for seq in members[::-1]:
            self._give_slot_back(seq, self.free_slots)
            seq.num_preemptions += 1
            if moves is None:
                self._forget_memory(seq)
        self.num_preemptions += len(members)
        self._enter(self.waiting if moves is None else self.swapped, group)
        return [seq.seq_id for seq in members[::-1]], moves or [], ended

    def _try_to_swap(self, group: SequenceGroup, members: list[Sequence]) -> Moves | None:
        """Swaps a group out, or says that it must be computed again."""
        if not any(seq.num_computed for seq in members) or not self._swaps(group, self.allocator.block_size):
            return None
        try:
            moves = self.allocator.swap_out(members)
        except OutOfBlocks:
            return None
        for seq in members:
            seq.status = _SWAPPED
        return moves

    def requeue_all(self) -> None:
        """Lets every request wait to be computed again, from its tokens alone; the allocator has forgotten all."""
        self.sequences.clear()
        for queue in (self.running, self.swapped, self.waiting):
            queue.clear()
        for group in sorted(self.groups.values(), key=_arrival):
            group.spare_slots = []
            for seq in group.unfinished:
                if seq.done:
                    seq.status, (seq.finish_reason, seq.stop_reason) = _FINISHED, seq.done
                    continue
                self.num_preemptions += seq.status is not _WAITING
                seq.num_preemptions += seq.status is not _WAITING
                seq.num_pending = seq.num_sealed = seq.slot = 0
                self._reset(seq)
                self.sequences[seq.seq_id] = seq
            if group.unfinished:
                self.waiting.append(group)
        self.groups = {group.request.request_id: group for group in self.waiting}
        arrivals = {group.arrival for group in self.waiting}
        self.next_index = {arrival: index for arrival, index in self.next_index.items() if arrival in arrivals}
        self.free_slots = list(range(self.config.max_num_seqs, 0, -1))
        self.filling = False

    def complete(self, seq: Sequence, reason: str, stop_reason: str | int | None) -> str | None:
        """Ends a sequence that has all its tokens, or holds it until its batch ends; the reason if it has ended."""
        if self.batching.holds and seq.status is _RUNNING and seq.num_computed >= seq.prefill_len:
            seq.done, seq.decode_until = (reason, stop_reason), 0
            return None
        self.finish_sequence(seq, reason, stop_reason)
        return reason

    def end_batch(self) -> list[int]:
        """Ends all that run if all are done; their ids."""
        running = [seq for group in self.running for seq in group.unfinished]
        if not running or not all(seq.done for seq in running):
            return []
        return self._let_go(running)

    def _let_go(self, members: list[Sequence]) -> list[int]:
        """Ends those of the sequences that are done; their ids."""
        done = [(seq, seq.done) for seq in members if seq.done]
        for seq, (reason, stop_reason) in done:  # type: ignore[misc]
            self.finish_sequence(seq, reason, stop_reason)
        return [seq.seq_id for seq, _ in done]

    def finish(self, group: SequenceGroup, reason: str, stop_reason: str | int | None) -> None:
        """Ends all sequences of a request."""
        for seq in group.unfinished:
            self.finish_sequence(seq, reason, stop_reason)

    def finish_sequence(self, seq: Sequence, reason: str, stop_reason: str | int | None) -> None:
        """Ends a sequence, and its request if that was the last one."""
        group, status = self.groups[seq.request.request_id], seq.status
        if status is not _WAITING:
            self._pass_on_lead(group, seq)
            self._release(seq, self.free_slots)
        self._end(seq, reason, stop_reason)
        if group.unfinished:
            return
        self._queue_of(status).remove(group)
        self.free_slots += group.spare_slots
        group.spare_slots = []
        del self.groups[group.request.request_id]
        if group.arrival in self.next_index and all(g.arrival != group.arrival for g in self.groups.values()):
            del self.next_index[group.arrival]

    def drop_beam(self, group: SequenceGroup, seq: Sequence) -> None:
        """Ends a beam that nobody goes on from."""
        if seq.status is not _WAITING:
            self._release(seq, group.spare_slots)
        self._end(seq, "dropped", None)

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
        del self.sequences[seq.seq_id]

    def _release(self, seq: Sequence, slots: list[int]) -> None:
        self._give_slot_back(seq, slots)
        self._forget_memory(seq)

    def _give_slot_back(self, seq: Sequence, slots: list[int]) -> None:
        if seq.slot:
            slots.append(seq.slot)
        seq.slot = seq.decode_until = 0
        seq.fresh = False

    def _forget_memory(self, seq: Sequence) -> None:
        self.allocator.free(seq)
        self._reset(seq)

    def _reset(self, seq: Sequence) -> None:
        seq.status = _WAITING
        seq.num_computed = seq.prefill_len = seq.capacity = seq.decode_until = seq.num_cached = 0
        seq.fresh, seq.leader_id, seq.check_len = False, None, seq.request.max_len


def _arrival(group: SequenceGroup) -> int:
    return group.arrival
