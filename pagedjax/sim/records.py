"""What is noted of a run, step by step and request by request: the same for a simulation and for a real engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pagedjax.host.plan import StepPlan
from pagedjax.host.protocol import KVUsage
from pagedjax.host.scheduler import Scheduler
from pagedjax.request import SequenceGroup


class StepShape(NamedTuple):
    """What a step does.

    Attributes:
        num_tokens: computed.
        num_seqs: that take part.
        num_context: tokens whose K and V are read, summed over the sequences.
        num_swapped: blocks moved to the host or back.
        num_copied: blocks copied on the device.
        num_shared: of `num_context`, tokens in blocks that another running sequence lists too, each but once.
    """

    num_tokens: int
    num_seqs: int
    num_context: int
    num_swapped: int = 0
    num_copied: int = 0
    num_shared: int = 0


class StepRecord(NamedTuple):
    """One step, when it has been made.

    Attributes:
        start, end: in seconds. A step that is planned while the device works starts when that is done.
        shape: what it did.
        num_running: requests that ran.
        usage: of the pool's slots.
        logical_blocks: that the tables of running sequences list, a shared one as often as it is listed.
        physical_blocks: the same, each counted once.
        swapped_blocks: moved to the host or back since the step before; a plan may do nothing else.
    """

    start: float
    end: float
    shape: StepShape
    num_running: int
    usage: KVUsage
    logical_blocks: int
    physical_blocks: int
    swapped_blocks: int = 0


class RequestRecord(NamedTuple):
    """One request, when it has ended.

    Attributes:
        arrival, first_token, end: in seconds; of one that ended without a token the last two are the same.
        prompt_len: tokens.
        output_len: tokens of its longest output.
        num_output_tokens: of all its samples or beams together.
        num_preemptions: of its sequences.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: what stopped its first output; the message of an error.
    """

    request_id: str
    arrival: float
    first_token: float
    end: float
    prompt_len: int
    output_len: int
    num_output_tokens: int
    num_preemptions: int
    finish_reason: str
    stop_reason: str | int | None = None

    @property
    def is_served(self) -> bool:
        """Whether it has all its output, so that it makes sense to ask how long it took."""
        return self.output_len > 0 and self.finish_reason in ("stop", "length")

    @property
    def normalized_latency(self) -> float:
        """Seconds from its arrival to its end, for each token of its output (paper section 6.1)."""
        return (self.end - self.arrival) / self.output_len


OnStep = Callable[[StepRecord], None]
OnRequest = Callable[[RequestRecord], None]


@dataclass(slots=True)
class Open:
    """A request that has not ended."""

    arrival: float
    group: SequenceGroup
    first_token: float | None = None


class _Planned(NamedTuple):
    """A step whose result has not come, and the requests that get their first token by it, if they had none."""

    shape: StepShape
    num_running: int
    usage: KVUsage
    logical_blocks: int
    physical_blocks: int
    swapped_blocks: int
    fresh: list[str]


class Recorder:
    """Makes the records of a scheduler's run, from being told what happens to it.

    Args:
        scheduler: asked only.
        on_step, on_request: are given each record when it is complete. Nothing else is kept, so that memory does not
            grow with the run.
    """

    def __init__(self, scheduler: Scheduler, on_step: OnStep, on_request: OnRequest) -> None:
        self._scheduler = scheduler
        self._on_step = on_step
        self._on_request = on_request
        self._planned: deque[_Planned] = deque()
        self._swapped = 0  # blocks, since the last step that computes was planned
        self._waiting: dict[str, Open] = {}
        self._started: dict[str, Open] = {}  # apart, since a queue may be long and is not to be searched each time

    def added(self, group: SequenceGroup, arrival: float) -> None:
        """A request has come."""
        self._waiting[group.request.request_id] = Open(arrival, group)

    def unfinished(self) -> list[Open]:
        """The requests that have not ended."""
        return [*self._started.values(), *self._waiting.values()]

    def planned(self, plan: StepPlan) -> StepShape:
        """A step with chunks, or with blocks to swap, has just been planned; a log's parts of it are mere lists."""
        sequences, fresh, context = self._scheduler.roster.sequences, [search[0] for search in plan.beams], 0
        for chunk in plan.chunks:
            context += chunk[2] + chunk[3]
            if chunk[4] and chunk[7]:  # the end of a prompt, or of what is computed again
                fresh.append(sequences[chunk[0]].request.request_id)
            if chunk[8] and self._waiting:
                self._start(sequences[chunk[0]].request.request_id)
        swapped = len(plan.swap_outs) + len(plan.swap_ins)
        shape = StepShape(plan.num_tokens, len(plan.chunks), context, swapped, len(plan.copies))
        self._swapped += swapped
        if plan.chunks:
            scheduler = self._scheduler
            blocks, running, usage = scheduler.allocator.occupancy(), len(scheduler.roster.running), scheduler.usage()
            shape = shape._replace(num_shared=(blocks.logical - blocks.physical) * scheduler.allocator.block_size)
            step = _Planned(shape, running, usage, blocks.logical, blocks.physical, self._swapped, fresh)
            self._planned.append(step)
            self._swapped = 0
        return shape

    def _start(self, request_id: str) -> None:
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._started[request_id] = entry

    def computed(self, start: float, end: float) -> None:
        """The scheduler has taken the result of the oldest step that was planned."""
        shape, running, usage, logical, physical, swapped, fresh = self._planned.popleft()
        self._on_step(StepRecord(start, end, shape, running, usage, logical, physical, swapped))
        for request_id in fresh:
            entry = self._started.get(request_id)
            if entry is not None and entry.first_token is None:
                entry.first_token = end

    def restored(self, now: float) -> None:
        """The scheduler has begun anew from a snapshot: no result will come of what was planned."""
        self._planned.clear()
        for request_id, group in self._scheduler.roster.groups.items():
            entry = self._started.get(request_id) or self._waiting.setdefault(request_id, Open(now, group))
            entry.group = group

    def close_ended(self, now: float, *, waiting: bool = False) -> None:
        """Records requests that have ended: of those that ran, or also of those that never did."""
        alive = self._scheduler.roster.groups
        for entries in (self._started, self._waiting) if waiting else (self._started,):
            for request_id in [name for name in entries if name not in alive]:
                self._on_request(_record(entries.pop(request_id), now))


def _record(entry: Open, now: float) -> RequestRecord:
    group, request = entry.group, entry.group.request
    if group.beam is not None:
        lengths = [len(hypothesis.token_ids) for hypothesis in group.beam.hypotheses]
    else:
        lengths = [seq.output_len for seq in group.sequences]
    return RequestRecord(
        request.request_id,
        entry.arrival,
        now if entry.first_token is None else entry.first_token,
        now,
        len(request.prompt_token_ids),
        max(lengths, default=0),
        sum(lengths),
        sum(seq.num_preemptions for seq in group.sequences),
        group.sequences[0].finish_reason or "error",
        group.sequences[0].stop_reason,
    )
