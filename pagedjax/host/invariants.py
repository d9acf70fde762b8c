"""What always holds of a scheduler's state."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pagedjax.errors import InvariantError
from pagedjax.request import Sequence, SequenceGroup, SequenceStatus

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
    for group in scheduler.roster.groups.values():
        _check_group(group)
    for group in scheduler.roster.running:
        for seq in group.unfinished:
            _check_running(scheduler, group, seq)
    for group in [*scheduler.roster.waiting, *scheduler.roster.swapped]:
        _require(not group.spare_slots, f"request {group.request.request_id!r} keeps slots, but does not run")
        for seq in group.unfinished:
            _check_waiting(seq) if seq.status is SequenceStatus.WAITING else _check_swapped(seq)
    for queue, status in (
        (scheduler.roster.waiting, SequenceStatus.WAITING),
        (scheduler.roster.running, SequenceStatus.RUNNING),
        (scheduler.roster.swapped, SequenceStatus.SWAPPED),
    ):
        for group in queue:
            _require(group.unfinished[0].status is status, f"{group.request.request_id!r} is not {status.value}")


def _check_queues(scheduler: Scheduler) -> None:
    """Every unfinished request runs, waits or is swapped, in order of arrival, and holds memory accordingly."""
    roster = scheduler.roster
    for name, group in roster.groups.items():
        _require(bool(group.unfinished) and group.request.request_id == name, f"request {name!r} has no sequences")
    queues = (roster.running, roster.swapped, roster.waiting)
    running, swapped, waiting = ([group.request.request_id for group in queue] for queue in queues)
    listed = f"running {running}, swapped {swapped} and waiting {waiting}"
    _require(
        sorted(running + swapped + waiting) == sorted(roster.groups),
        f"{listed} are not {list(roster.groups)}, once each",
    )
    for queue in queues:
        order = [group.arrival for group in queue]
        _require(order == sorted(order), f"{listed} are not in order of arrival")
    arrivals = [group.arrival for queue in queues for group in queue]
    _require(not arrivals or max(arrivals) < scheduler.roster.num_arrivals, "a request is waiting that was never added")
    _require(scheduler.roster.next_index.keys() <= set(arrivals), "a family of forks has no member left")
    known = sorted(seq.seq_id for group in scheduler.roster.groups.values() for seq in group.unfinished)
    _require(
        known == sorted(scheduler.roster.sequences), f"sequences {known} are not {sorted(scheduler.roster.sequences)}"
    )
    _require(not known or known[-1] < scheduler.roster.next_seq_id, f"sequence {known[-1:]} was never added")
    for where, holders, queue in (
        ("the pool", scheduler.allocator.seq_ids(), roster.running),
        ("the swap space", scheduler.allocator.swapped_ids(), roster.swapped),
    ):
        members = sorted(seq.seq_id for group in queue for seq in group.unfinished)
        _require(sorted(holders) == members, f"sequences {sorted(holders)} are in {where}, but {members} should be")
    unfinished = sum(
        seq.done is None and seq.num_computed < seq.request.max_len - 1
        for group in scheduler.roster.running
        for seq in group.unfinished
    )
    limit = scheduler.config.max_num_batched_tokens
    _require(unfinished <= limit, f"{unfinished} sequences run, but a step has {limit} tokens")


def _check_slots(scheduler: Scheduler) -> None:
    used = [seq.slot for group in scheduler.roster.running for seq in group.unfinished]
    spare = [slot for group in scheduler.roster.running for slot in group.spare_slots]
    slots = sorted(used + spare + scheduler.roster.free_slots)
    expected = list(range(1, scheduler.config.max_num_seqs + 1))
    _require(slots == expected, f"slots {slots} are in use or free, not 1 to {len(expected)} once each")


def _check_in_flight(scheduler: Scheduler) -> None:
    steps = [flight.step for flight in scheduler._in_flight]
    _require(steps == sorted(set(steps)), f"steps {steps} in flight are out of order")
    _require(not steps or steps[-1] < scheduler.num_steps, f"step {steps[-1:]} in flight was never planned")
    pending = Counter(seq.seq_id for flight in scheduler._in_flight for seq in flight.sampling)
    searching = [group for flight in scheduler._in_flight for group in flight.searching]
    pending.update(seq.seq_id for group in searching for seq in group.sequences)
    for seq in scheduler.roster.sequences.values():
        found = pending[seq.seq_id]
        _require(
            found == seq.num_pending,
            f"sequence {seq.seq_id} has {seq.num_pending} tokens pending, {found} in flight",
        )


def _check_group(group: SequenceGroup) -> None:
    name, count = f"request {group.request.request_id!r}", len(group.sequences)
    _require(len({seq.status for seq in group.unfinished}) == 1, f"{name} runs in part")
    if group.sequences[0].done is not None and group.beam is not None:
        return
    if group.beam is None:
        _require(count == group.request.width, f"{name} has {count} samples, but wants {group.request.width}")
        return
    _require(count == len(group.beam.logprobs), f"{name} has {count} beams, but {len(group.beam.logprobs)} logprobs")
    _require(len({len(seq.token_ids) for seq in group.sequences}) == 1, f"{name} has beams of several lengths")
    kept = len(group.spare_slots) + count
    running = group.sequences[0].status is SequenceStatus.RUNNING
    _require(count <= group.request.width, f"{name} has {count} beams, but wants {group.request.width}")
    _require(not running or kept == group.request.width, f"{name} keeps {kept} slots for {group.request.width} beams")


def _check_running(scheduler: Scheduler, group: SequenceGroup, seq: Sequence) -> None:
    name = f"running sequence {seq.seq_id}"
    size, blocks = scheduler.allocator.block_size, scheduler.allocator.block_table(seq.seq_id)
    known = len(seq.token_ids) + seq.num_pending
    _require(seq.status is SequenceStatus.RUNNING, f"{name} has status {seq.status.value}")
    _require(
        seq.capacity == len(blocks) * size, f"{name} believes in {seq.capacity} slots, but has {len(blocks)} blocks"
    )
    if seq.done is not None:
        _require(scheduler.roster.batching.holds and not seq.decode_until, f"{name} is done, and still runs")
        return
    _require(known <= seq.request.max_len, f"{name} has {known} tokens, but may reach {seq.request.max_len}")
    least = int(group.only is not None)  # others may wait for those before them
    _require(least <= seq.num_computed <= seq.capacity, f"{name} has {seq.num_computed} tokens in {seq.capacity} slots")
    if seq.leader_id is not None:
        leaders = [other for other in group.unfinished if other.seq_id == seq.leader_id]
        _require(len(leaders) == 1 and leaders[0].leader_id is None, f"{name} follows {seq.leader_id}")
        _require(seq.num_computed == 0 and seq.fresh, f"{name} computes, though it follows")
    if group.beam is not None:
        _require(seq.decode_until == 0, f"{name} is a beam, but decodes ahead")
        limit = len(seq.token_ids) - (not seq.num_pending)
        ok = seq.num_computed == limit if seq.num_pending else seq.num_computed <= limit
        _require(ok, f"{name} has computed {seq.num_computed} of {limit} tokens")
    elif seq.num_computed < seq.prefill_len:
        _require(seq.decode_until == 0 and seq.num_pending == 0, f"{name} decodes before its prefill is done")
        _require(known == seq.prefill_len, f"{name} has {known} tokens, but is prefilling {seq.prefill_len}")
    else:
        limit = min(seq.capacity, seq.request.max_len - 1)
        _require(seq.decode_until in (limit, seq.num_computed), f"{name} decodes until {seq.decode_until}, not {limit}")
        _require(known == seq.num_computed + 1, f"{name} has {known} tokens, {seq.num_computed} of them computed")


def _check_swapped(seq: Sequence) -> None:
    name = f"swapped sequence {seq.seq_id}"
    _require(not (seq.slot or seq.decode_until or seq.fresh), f"{name} still runs")
    _require(0 < seq.prefill_len <= seq.capacity, f"{name} was never admitted")
    known = len(seq.token_ids) + seq.num_pending
    _require(seq.num_computed <= min(seq.capacity, known), f"{name} has {seq.num_computed} of {known} tokens")


def _check_waiting(seq: Sequence) -> None:
    name = f"waiting sequence {seq.seq_id}"
    _require(seq.status is SequenceStatus.WAITING, f"{name} has status {seq.status.value}")
    held = (seq.slot, seq.num_computed, seq.prefill_len, seq.capacity, seq.decode_until, seq.num_cached, seq.num_sealed)
    _require(not any(held) and not seq.fresh and seq.leader_id is None, f"{name} still holds {held}")
    _require(len(seq.token_ids) < seq.request.max_len, f"{name} is complete")
