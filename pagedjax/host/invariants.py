"""What always holds of a scheduler's state."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pagedjax.errors import InvariantError
from pagedjax.request import Sequence, SequenceStatus

if TYPE_CHECKING:
    from pagedjax.host.scheduler import Scheduler


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise InvariantError(what)


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises InvariantError, saying what is broken, if the state is one that can never be reached."""
    scheduler.allocator.check_invariants()
    _check_queues(scheduler)
    _check_slots(scheduler)
    _check_in_flight(scheduler)
    for seq in scheduler._running:
        _check_running(scheduler, seq)
    for group in scheduler._waiting:
        for seq in group.sequences:
            _check_waiting(seq)


def _check_queues(scheduler: Scheduler) -> None:
    """Every unfinished sequence runs or waits, in order of arrival, and just those that run hold memory."""
    for name, group in scheduler._groups.items():
        _require(bool(group.sequences) and group.request.request_id == name, f"request {name!r} has no sequences")
    running = [seq.seq_id for seq in scheduler._running]
    waiting = [seq.seq_id for group in scheduler._waiting for seq in group.sequences]
    known = [seq.seq_id for group in scheduler._groups.values() for seq in group.sequences]
    _require(running + waiting == known, f"running {running} and waiting {waiting} are not {known} in order")
    _require(known == sorted(set(known)), f"sequences {known} are not in order of arrival")
    _require(not known or known[-1] < scheduler._next_seq_id, f"sequence {known[-1:]} was never added")
    holders = sorted(scheduler.allocator.seq_ids())
    _require(holders == running, f"sequences {holders} hold memory, but {running} run")
    unfinished = sum(seq.num_computed < seq.request.max_len - 1 for seq in scheduler._running)
    limit = scheduler.config.max_num_batched_tokens
    _require(unfinished <= limit, f"{unfinished} sequences run, but a step has {limit} tokens")


def _check_slots(scheduler: Scheduler) -> None:
    slots = sorted([seq.slot for seq in scheduler._running] + scheduler._free_slots)
    expected = list(range(1, scheduler.config.max_num_seqs + 1))
    _require(slots == expected, f"slots {slots} are in use or free, not 1 to {len(expected)} once each")


def _check_in_flight(scheduler: Scheduler) -> None:
    steps = [step for step, _ in scheduler._in_flight]
    _require(steps == sorted(set(steps)), f"steps {steps} in flight are out of order")
    _require(not steps or steps[-1] < scheduler.num_steps, f"step {steps[-1:]} in flight was never planned")
    pending = Counter(seq.seq_id for _, sampling in scheduler._in_flight for seq in sampling)
    for group in scheduler._groups.values():
        for seq in group.sequences:
            found = pending[seq.seq_id]
            _require(
                found == seq.num_pending,
                f"sequence {seq.seq_id} has {seq.num_pending} tokens pending, {found} in flight",
            )


def _check_running(scheduler: Scheduler, seq: Sequence) -> None:
    name = f"running sequence {seq.seq_id}"
    known, blocks = len(seq.token_ids) + seq.num_pending, scheduler.allocator.block_table(seq.seq_id)
    _require(seq.status is SequenceStatus.RUNNING, f"{name} has status {seq.status.value}")
    _require(
        seq.capacity == len(blocks) * scheduler.allocator.block_size,
        f"{name} believes in {seq.capacity} slots, but has {len(blocks)} blocks",
    )
    _require(known <= seq.request.max_len, f"{name} has {known} tokens, but may reach {seq.request.max_len}")
    _require(0 < seq.num_computed <= seq.capacity, f"{name} has {seq.num_computed} tokens in {seq.capacity} slots")
    if seq.num_computed < seq.prefill_len:
        _require(seq.decode_until == 0 and seq.num_pending == 0, f"{name} decodes before its prefill is done")
        _require(known == seq.prefill_len, f"{name} has {known} tokens, but is prefilling {seq.prefill_len}")
    else:
        limit = min(seq.capacity, seq.request.max_len - 1)
        _require(seq.decode_until == limit, f"{name} decodes until {seq.decode_until}, not {limit}")
        _require(known == seq.num_computed + 1, f"{name} has {known} tokens, {seq.num_computed} of them computed")


def _check_waiting(seq: Sequence) -> None:
    name = f"waiting sequence {seq.seq_id}"
    _require(seq.status is SequenceStatus.WAITING, f"{name} has status {seq.status.value}")
    held = (seq.slot, seq.num_computed, seq.prefill_len, seq.capacity, seq.decode_until)
    _require(not any(held), f"{name} still holds {held}")
    _require(len(seq.token_ids) < seq.request.max_len, f"{name} is complete")
