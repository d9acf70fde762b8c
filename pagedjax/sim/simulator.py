"""Requests come, steps take their time, and the project's own scheduler decides: a discrete-event simulation."""

from __future__ import annotations

import random
from collections.abc import Iterable

from pagedjax.errors import InvalidRequest
from pagedjax.host.beam import BeamCandidate
from pagedjax.host.plan import ScheduledBeams, StepPlan, StepResult
from pagedjax.host.scheduler import Scheduler
from pagedjax.sim.cost import CostModel
from pagedjax.sim.records import OnRequest, OnStep, Recorder, StepShape
from pagedjax.sim.workload import TimedRequest

_TOKEN = 1  # what every step samples


class Simulator:
    """Runs a trace through a scheduler on a clock of its own.

    The requests must have outputs whose lengths are known beforehand, as those of `workload.RequestMaker` makes have.

    Args:
        scheduler: with any allocator and batching.
        cost: how long steps take.
        trace: requests in order of arrival.
        on_step, on_request: are given the records. Nothing else is kept, so that memory does not grow with the trace.
        overlap: plan a step while the one before it is computed, as `EngineConfig(overlap=True)` does.
        pad_batches: whether a step costs as if all sequences were as long as the longest, and none had ended, which is
            how FasterTransformer computes a static batch.
        seed: of the beams' parents.

    Attributes:
        now: seconds since the start.
        num_refused: requests that the scheduler did not take.
        refusal: what it said of the first of them.
        recorder: knows the requests that have not ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel,
        trace: Iterable[TimedRequest],
        on_step: OnStep,
        on_request: OnRequest,
        *,
        overlap: bool = False,
        pad_batches: bool = False,
        seed: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.num_refused = 0
        self.refusal = ""
        self.recorder = Recorder(scheduler, on_step, on_request)
        self._cost = cost
        self._arrivals = iter(trace)
        self._coming = next(self._arrivals, None)
        self._overlap = overlap
        self._rng = random.Random(seed)
        self._in_flight: tuple[StepPlan, StepShape] | None = None
        self._pads = pad_batches

    def run(self, until: float | None = None) -> None:
        """Runs the trace to its end, or up to a time in seconds."""
        while until is None or self.now < until:
            if not self.advance():
                return

    def advance(self) -> bool:
        """Lets those come whose time it is, and makes a step or waits for the next; False when nobody is left."""
        while self._coming is not None and self._coming.time <= self.now:
            self.add(self._coming)
            self._coming = next(self._arrivals, None)
        if self.step():
            return True
        if self._coming is None:
            return False
        self.now = self._coming.time
        return True

    def add(self, coming: TimedRequest) -> None:
        """Takes a request in; one that can never run is counted instead."""
        try:
            self.recorder.added(self.scheduler.add(coming.request), coming.time)
        except InvalidRequest as error:
            self.num_refused += 1
            self.refusal = self.refusal or str(error)

    def step(self) -> bool:
        """Plans a step and takes the result of one, as an engine does; False if there was nothing to do."""
        plan = self.scheduler.schedule()
        if plan is not None and (plan.failed or plan.ended):
            self.recorder.close_ended(self.now, waiting=True)
        dispatched = self._dispatch(plan) if plan is not None else None
        finished, self._in_flight = self._in_flight, dispatched
        if finished is not None:
            self._complete(*finished)
        if self._in_flight is not None and not self._overlap:
            finished, self._in_flight = self._in_flight, None
            self._complete(*finished)
        return plan is not None or finished is not None

    def _dispatch(self, plan: StepPlan) -> tuple[StepPlan, StepShape] | None:
        shape = self.recorder.planned(plan)
        if plan.chunks:
            return plan, self._padded(plan, shape) if self._pads else shape
        if shape.num_swapped:  # blocks move, and nothing is computed
            self.now += self._cost.seconds(shape)
        return None

    def _complete(self, plan: StepPlan, shape: StepShape) -> None:
        start = self.now
        self.now += self._cost.seconds(shape)
        tokens = [_TOKEN] * sum([chunk.samples for chunk in plan.chunks])
        beams = [self._continuations(search) for search in plan.beams] or None
        updates = self.scheduler.update(StepResult(plan.step, tokens, None, beams))
        self.recorder.computed(start, self.now)
        if beams or any([update.finish_reason for update in updates]):
            self.recorder.close_ended(self.now)

    def _continuations(self, search: ScheduledBeams) -> list[BeamCandidate]:
        """As many as are wanted; which beams they continue is drawn evenly, since no model says."""
        best = max(search.logprobs)
        return [
            BeamCandidate(self._rng.randrange(search.num_chunks), _TOKEN + rank, best - 1 - rank)
            for rank in range(search.num_candidates)
        ]

    def _padded(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """With all sequences as long as the longest."""
        number = self.scheduler.num_running
        tokens = max([chunk.num_tokens for chunk in plan.chunks])
        longest = max([chunk.start + chunk.num_tokens for chunk in plan.chunks])
        return shape._replace(num_tokens=number * tokens, num_seqs=number, num_context=number * longest)
