"""Which tokens are computed in the next step: first come first served, continuous batching (paper section 4.5).

The order of arrival is kept everywhere: whoever runs arrived before whoever waits, because only the head of the queue
is admitted and only the tail of the running ones is preempted. So both are kept sorted for nothing.

Plans may run ahead of results. A decode's token is then still on the device when it is planned (`num_pending`), and
whether a sequence has stopped is found when its token comes back: its rows in plans made meanwhile are wasted. Its
blocks and its slot are free at once all the same, because the device runs the steps in the order of their plans.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from pagedjax.config import SchedulerConfig
from pagedjax.errors import InvalidRequest, OutOfBlocks, RequestTooLong, UnknownRequest
from pagedjax.host.allocator import KVAllocator, KVUsage
from pagedjax.host.invariants import check_scheduler
from pagedjax.host.plan import ScheduledChunk, SequenceUpdate, StepPlan, StepResult
from pagedjax.host.snapshot import dump_scheduler, load_scheduler
from pagedjax.request import Request, Sequence, SequenceGroup, SequenceStatus

_FINISHED = SequenceStatus.FINISHED
_new_tuple = tuple.__new__  # a third of the time that NamedTuple's own constructor takes, in the two hot loops


class _Step:
    """A plan while it is being made."""

    __slots__ = ("chunks", "failed", "preempted", "sampling")

    def __init__(self) -> None:
        self.chunks: list[ScheduledChunk] = []
        self.sampling: list[Sequence] = []
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
        self._groups: dict[str, SequenceGroup] = {}  # all unfinished requests
        self._waiting: deque[SequenceGroup] = deque()
        self._running: list[Sequence] = []
        self._free_slots = list(range(config.max_num_seqs, 0, -1))  # a stack; its top is at the end
        self._in_flight: deque[tuple[int, list[Sequence]]] = deque()  # step and who samples in it

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> SequenceGroup:
        """Puts a request at the end of the queue.

        Raises:
            RequestTooLong: if the prompt is longer than the model or the whole pool allows.
            InvalidRequest: if it is empty, leaves no room for an output, or its id is in use.
        """
        self._check_request(request)
        seq = Sequence(self._next_seq_id, request, token_ids=list(request.prompt_token_ids))
        self._next_seq_id += 1
        group = SequenceGroup(request, [seq])
        self._groups[request.request_id] = group
        self._waiting.append(group)
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

    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it is, and frees what it holds. Raises UnknownRequest."""
        self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: str, stop_reason: str | int | None = None) -> None:
        """Ends a request for a reason that was found outside, such as a stop string. Raises UnknownRequest."""
        self._finish(self.get(request_id), reason, stop_reason)

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
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not come yet."""
        return len(self._in_flight)

    def usage(self) -> KVUsage:
        """What the pool's slots are used for, once the steps planned have run."""
        return self.allocator.usage({seq.seq_id: seq.num_computed for seq in self._running})

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
        # Preemption shortens the list at its end, never before the sequence at hand.
        for seq in self._running:
            start = seq.num_computed
            if start < seq.decode_until:
                # Fast path, 15 of 16 decodes: the block is there, the token is at the sequence's slot.
                add_chunk(_new_tuple(ScheduledChunk, (seq.seq_id, seq.slot, start, 1, (), 0, (), True, False)))
                add_sampling(seq)
                seq.num_computed = start + 1
                seq.num_pending += 1
                budget -= 1
            elif start < seq.prefill_len:
                budget -= self._plan_prefill(seq, budget, step)
            else:
                budget -= self._plan_growing_decode(seq, step)
        assert budget >= 0, "more sequences run than a step has tokens, though each was admitted with one to spare"
        if budget and not step.preempted:
            budget = self._admit_waiting(budget, step)
        if not (step.chunks or step.preempted or step.failed):
            return None
        num_tokens = self.config.max_num_batched_tokens - budget
        plan = StepPlan(self.num_steps, tuple(step.chunks), num_tokens, tuple(step.preempted), tuple(step.failed))
        self.num_steps += 1
        if step.chunks:
            self._in_flight.append((plan.step, step.sampling))
        return plan

    def _plan_prefill(self, seq: Sequence, budget: int, step: _Step, new_blocks: tuple[int, ...] = ()) -> int:
        """Plans the next chunk of a prompt (after preemption: of prompt and output); returns its tokens."""
        start = seq.num_computed
        end = min(seq.prefill_len, start + budget)
        samples = end == seq.prefill_len
        token_ids = tuple(seq.token_ids[start:end])
        fresh = bool(new_blocks)
        step.chunks.append(
            ScheduledChunk(seq.seq_id, seq.slot, start, end - start, token_ids, 0, new_blocks, samples, fresh)
        )
        seq.num_computed = end
        if samples:
            seq.num_pending += 1
            seq.decode_until = min(seq.capacity, seq.request.max_len - 1)
            step.sampling.append(seq)
        return end - start

    def _plan_growing_decode(self, seq: Sequence, step: _Step) -> int:
        """Plans a decode that needs a new block, unless its last token is already on its way; returns its tokens."""
        start = seq.num_computed
        if start >= seq.request.max_len - 1:
            return 0
        blocks = self._grow(seq, start + 1, step)
        if not blocks:
            return 0
        block_size = self.allocator.block_size
        seq.capacity += len(blocks) * block_size
        seq.decode_until = min(seq.capacity, seq.request.max_len - 1)
        step.chunks.append(
            ScheduledChunk(seq.seq_id, seq.slot, start, 1, (), start // block_size, tuple(blocks), True, False)
        )
        step.sampling.append(seq)
        seq.num_computed = start + 1
        seq.num_pending += 1
        return 1

    def _grow(self, seq: Sequence, num_tokens: int, step: _Step) -> list[int]:
        """Blocks for a running sequence, taken from later arrivals if need be; none if it cannot go on in this step."""
        while True:
            try:
                return self.allocator.grow(seq, num_tokens)
            except OutOfBlocks:
                victim = self._groups[self._running[-1].request.request_id]
            if self._running[0].request is victim.request:
                # Nobody else holds memory. The token on its way may still end the request properly.
                if not seq.num_pending:
                    self._fail(victim, num_tokens, step)
                return []
            self._preempt(victim, step)
            if victim.request is seq.request:
                return []

    def _admit_waiting(self, budget: int, step: _Step) -> int:
        """Admits from the head of the queue, skipping nobody; returns the tokens left of the budget."""
        waiting, whole = self._waiting, not self.config.enable_chunked_prefill
        while waiting and budget and self._free_slots:
            group = waiting[0]
            seq = group.sequences[0]
            if seq.num_pending:  # preempted: its last token is not known yet
                break
            alone = not self._running
            if not self.allocator.can_admit(seq, alone=alone):
                if not alone:
                    break
                self._fail(group, len(seq.token_ids), step)
                continue
            if whole and len(seq.token_ids) > budget:
                break
            blocks = self._admit(seq)
            waiting.popleft()
            budget -= self._plan_prefill(seq, budget, step, blocks)
        return budget

    def _admit(self, seq: Sequence) -> tuple[int, ...]:
        blocks = tuple(self.allocator.admit(seq))
        seq.slot = self._free_slots.pop()
        seq.status = SequenceStatus.RUNNING
        seq.prefill_len = len(seq.token_ids)
        seq.capacity = len(blocks) * self.allocator.block_size
        self._running.append(seq)
        return blocks

    def _preempt(self, group: SequenceGroup, step: _Step) -> None:
        """Takes the blocks and slots of the latest arrival; it goes to the head of the queue to be computed again."""
        for seq in reversed(group.sequences):
            assert self._running[-1] is seq, "only the latest arrival may be preempted"
            self._running.pop()
            self._release(seq)
            seq.status = SequenceStatus.WAITING
            seq.num_computed = 0
            seq.num_preemptions += 1
            step.preempted.append(seq.seq_id)
            self.num_preemptions += 1
        self._waiting.appendleft(group)

    def _fail(self, group: SequenceGroup, num_tokens: int, step: _Step) -> None:
        allocator = self.allocator
        slots = allocator.num_blocks * allocator.block_size
        message = (
            f"needs room for {num_tokens} tokens, but the whole pool holds {slots} ({allocator.num_blocks} blocks of "
            f"{allocator.block_size} tokens)"
        )
        step.failed += [seq.seq_id for seq in group.sequences]
        self._finish(group, "error", message)

    # ------------------------------------------------------------------ results

    def update(self, result: StepResult) -> list[SequenceUpdate]:
        """Takes what the oldest step in flight sampled.

        Returns:
            What became of each token, in the plan's order; nothing for sequences that had ended before.

        Raises:
            ValueError: if the result is not of that step, or has not one token for every sampling chunk; nothing is
                changed then.
        """
        sampling = self._check_result(result)
        self._in_flight.popleft()
        errors = result.errors
        updates: list[SequenceUpdate] = []
        add_update = updates.append
        for seq, token in zip(sampling, result.token_ids, strict=True):
            if seq.status is _FINISHED:
                continue
            seq.num_pending -= 1
            if errors and seq.seq_id in errors:
                self._finish(self._groups[seq.request.request_id], "error", errors[seq.seq_id])
                add_update(SequenceUpdate(seq.seq_id, None, "error"))
                continue
            token_ids, request = seq.token_ids, seq.request
            token_ids.append(token)
            reason = None
            if token in request.stop_ids or len(token_ids) >= request.max_len:
                reason = self._stop(seq, token)
            add_update(_new_tuple(SequenceUpdate, (seq.seq_id, token, reason)))
        return updates

    def _stop(self, seq: Sequence, token: int) -> str | None:
        """Ends a sequence whose last token may be its last, and says why; None if it goes on."""
        params = seq.request.params
        if token in seq.request.stop_ids and seq.output_len >= params.min_tokens:
            reason, stop_reason = "stop", token if token in params.stop_token_ids else None
        elif len(seq.token_ids) >= seq.request.max_len:
            reason, stop_reason = "length", None
        else:
            return None
        self._finish(self._groups[seq.request.request_id], reason, stop_reason)
        return reason

    def _finish(self, group: SequenceGroup, reason: str, stop_reason: str | int | None) -> None:
        if group.sequences[0].status is SequenceStatus.WAITING:
            self._waiting.remove(group)
        for seq in group.sequences:
            if seq.status is SequenceStatus.RUNNING:
                self._running.remove(seq)
                self._release(seq)
            seq.status = _FINISHED
            seq.finish_reason = reason
            seq.stop_reason = stop_reason
        del self._groups[group.request.request_id]

    def _release(self, seq: Sequence) -> None:
        self.allocator.free(seq)
        self._free_slots.append(seq.slot)
        seq.slot = seq.prefill_len = seq.capacity = seq.decode_until = 0

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
        # The last token of all is never computed, so it needs no room.
        needed = min(length + 1, request.max_len - 1)
        num_blocks, block_size = self.allocator.num_blocks, self.allocator.block_size
        if needed > num_blocks * block_size:
            raise RequestTooLong(
                f"{name} has a prompt of {length} tokens and needs room for {needed}, but the whole pool holds "
                f"{num_blocks * block_size} ({num_blocks} blocks of {block_size} tokens)"
            )

    def _check_result(self, result: StepResult) -> list[Sequence]:
        if not self._in_flight:
            raise ValueError(f"the result of step {result.step} was given, but no step is in flight")
        step, sampling = self._in_flight[0]
        if result.step != step:
            raise ValueError(f"the result of step {result.step} was given, but step {step} is the next to be answered")
        if len(result.token_ids) != len(sampling):
            raise ValueError(f"step {step} samples {len(sampling)} tokens, but its result has {len(result.token_ids)}")
        if result.errors and (unknown := set(result.errors) - {seq.seq_id for seq in sampling}):
            raise ValueError(f"step {step} has errors for sequences {sorted(unknown)}, which do not sample in it")
        return sampling

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
