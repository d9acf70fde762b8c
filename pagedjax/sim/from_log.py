"""Records of a real engine's run, from its event log: the same that a simulation gives."""

from __future__ import annotations

from collections import deque

from pagedjax.host.plan import StepPlan
from pagedjax.host.scheduler import Scheduler
from pagedjax.log_reader import Event
from pagedjax.sim.metrics import Summary
from pagedjax.sim.records import OnRequest, OnStep, Recorder, RequestRecord, StepRecord

_ENDS = ("finish", "finish_sequence", "plan", "result")


class LogRecords:
    """Watches a replay (`replay(log, observer=LogRecords(...).observe)`) and makes records of what it sees.

    Times are in seconds since the first request came, of each run in the log. A request comes when the engine was told
    that it did (`add_request(arrival_time=...)`), which may be before it was told.

    Args:
        on_step, on_request: are given the records; of several runs one after another.
    """

    def __init__(self, on_step: OnStep, on_request: OnRequest) -> None:
        self._on_step = on_step
        self._on_request = on_request
        self._run: _Run | None = None
        self._clock: float | None = None

    def observe(self, event: Event, scheduler: Scheduler) -> None:
        """Takes an event that the scheduler has taken."""
        if event["event"] == "start":
            self._run, self._clock = None, event.get("clock")
            return
        if self._run is None:
            self._run = _Run(Recorder(scheduler, self._on_step, self._on_request), self._clock, event)
        self._run.observe(event, scheduler)


class LogMetrics:
    """Watches a replay likewise, and adds up the records of the latest run: every run has a clock of its own."""

    def __init__(self) -> None:
        self._summary: Summary | None = None
        self._records = LogRecords(self._on_step, self._on_request)

    def observe(self, event: Event, scheduler: Scheduler) -> None:
        """Takes an event that the scheduler has taken."""
        if event["event"] == "start":
            self._summary = Summary(scheduler.allocator.num_blocks * scheduler.allocator.block_size)
        self._records.observe(event, scheduler)

    def _on_step(self, step: StepRecord) -> None:
        assert self._summary is not None
        self._summary.on_step(step)

    def _on_request(self, request: RequestRecord) -> None:
        assert self._summary is not None
        self._summary.on_request(request)

    def row(self) -> dict[str, object]:
        """See `Summary.row`; nothing of an empty log."""
        return {} if self._summary is None else self._summary.row()


class _Run:
    def __init__(self, recorder: Recorder, clock: float | None, first: Event) -> None:
        self._recorder = recorder
        self._clock = clock
        self._origin = self._arrival(first) if "request" in first else float(first["t"])
        self._planned: deque[float] = deque()  # when each step in flight was
        self._computed = 0.0  # when the last result came

    def _arrival(self, event: Event) -> float:
        """When a request came; when it was added, if it does not say, or by another clock."""
        if self._clock is None:
            return float(event["t"])
        return min(float(event["request"]["arrival_time"]) - self._clock, float(event["t"]))

    def observe(self, event: Event, scheduler: Scheduler) -> None:
        kind, now = event["event"], float(event["t"]) - self._origin
        match kind:
            case "add" | "fork":
                group = scheduler.get(event["request"]["request_id"])
                self._recorder.added(group, self._arrival(event) - self._origin)
            case "plan":
                plan = StepPlan(**{"chunks": (), **event["plan"]})
                self._recorder.planned(plan)
                if plan.chunks:
                    self._planned.append(now)
            case "result":
                start = max(self._planned.popleft(), self._computed)
                self._recorder.computed(start, now)
                self._computed = now
            case "recover" | "restore":
                self._recorder.restored(now)
                self._planned.clear()
        if kind in _ENDS:
            self._recorder.close_ended(now, waiting=kind == "finish")
