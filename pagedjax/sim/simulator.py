"""Requests come, steps take their time, and the project's own scheduler decides: a discrete-event simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pagedjax.errors import InvalidRequest
from pagedjax.host.plan import StepPlan, StepResult
from pagedjax.host.protocol import KVUsage
from pagedjax.host.scheduler import Scheduler
from pagedjax.request import SequenceGroup
from pagedjax.sim.cost import CostModel, StepShape
from pagedjax.sim.workload import TimedRequest

_TOKEN = 1  # what every step samples


class StepRecord(NamedTuple):
    """One step, when it has been made.

    Attributes:
        start, end: in seconds.
        num_running: requests that run.
    """

    start: float
    end: float
    num_tokens: int
    num_running: int
    usage: KVUsage


class RequestRecord(NamedTuple):
    """One request, when it has ended. Times in seconds."""

    request_id: str
    arrival: float
    first_token: float
    end: float
    prompt_len: int
    output_len: int
    num_preemptions: int

    @property
    def normalized_latency(self) -> float:
        """Seconds from its arrival to its end, for each token of its output."""
        return (self.end - self.arrival) / self.output_len


@dataclass(slots=True)
class _Open:
    time: float
    group: SequenceGroup
    first_token: float | None = None


class Simulator:
    """Runs a trace through a scheduler on a clock of its own.

    Args:
        scheduler: with any allocator and batching.
        cost: how long steps take.
        on_step, on_request: are told of each step, and of each request that ends. Nothing else is kept, so that memory
            does not grow with the trace.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel,
        on_step: Callable[[StepRecord], None],
        on_request: Callable[[RequestRecord], None],
    ) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.num_refused = 0
        self._cost = cost
        self._on_step = on_step
        self._on_request = on_request
        self._open: dict[str, _Open] = {}
        self._static = scheduler.config.batching == "static"

    def run(self, trace: Iterable[TimedRequest], until: float | None = None) -> None:
        """Runs the trace to its end, or up to a time in seconds."""
        arrivals = iter(trace)
        coming = next(arrivals, None)
        while until is None or self.now < until:
            while coming is not None and coming.time <= self.now:
                self._add(coming)
                coming = next(arrivals, None)
            if not self._step():
                if coming is None:
                    return
                self.now = coming.time

    def _add(self, coming: TimedRequest) -> None:
        try:
            group = self.scheduler.add(coming.request)
        except InvalidRequest:
            self.num_refused += 1
            return
        self._open[coming.request.request_id] = _Open(coming.time, group)

    def _step(self) -> bool:
        """Makes one step; False if there is nothing to do."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        if plan is None:
            return False
        if plan.failed or plan.ended:
            self._close_ended()
        start, shape = self.now, self._shape(plan)
        if plan.chunks or shape.num_swapped:
            self.now += self._cost.seconds(shape)
        if not plan.chunks:
            return True
        self._on_step(StepRecord(start, self.now, plan.num_tokens, len(scheduler.roster.running), scheduler.usage()))
        sampling = [chunk.seq_id for chunk in plan.chunks if chunk.samples]
        members = scheduler.roster.sequences
        fresh = [members[chunk.seq_id].request.request_id for chunk in plan.chunks if chunk.samples and chunk.token_ids]
        updates = scheduler.update(StepResult(plan.step, [_TOKEN] * len(sampling)))
        for request_id in fresh:
            entry = self._open[request_id]
            if entry.first_token is None:
                entry.first_token = self.now
        if any(update.finish_reason for update in updates):
            self._close_ended()
        return True

    def _shape(self, plan: StepPlan) -> StepShape:
        swapped, copied = len(plan.swap_outs) + len(plan.swap_ins), len(plan.copies)
        context = sum(chunk.start + chunk.num_tokens for chunk in plan.chunks)
        if not (self._static and plan.chunks):
            return StepShape(plan.num_tokens, len(plan.chunks), context, swapped, copied)
        # Every sequence of a static batch is padded to the longest, and computed until the longest is done.
        number = self.scheduler.num_running
        tokens = max(chunk.num_tokens for chunk in plan.chunks)
        longest = max(chunk.start + chunk.num_tokens for chunk in plan.chunks)
        return StepShape(number * tokens, number, number * longest, swapped, copied)

    def _close_ended(self) -> None:
        alive = self.scheduler.roster.groups
        for request_id in [request_id for request_id in self._open if request_id not in alive]:
            entry = self._open.pop(request_id)
            request = entry.group.request
            first = self.now if entry.first_token is None else entry.first_token
            prompt_len = len(request.prompt_token_ids)
            preemptions = sum(seq.num_preemptions for seq in entry.group.sequences)
            lengths = prompt_len, request.max_len - prompt_len
            self._on_request(RequestRecord(request_id, entry.time, first, self.now, *lengths, preemptions))
