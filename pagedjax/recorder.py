"""A scheduler that writes all that is asked of it, and all that it plans, to a log."""

from __future__ import annotations

from typing import Any

from pagedjax.config import SchedulerConfig
from pagedjax.event_log import EventLog
from pagedjax.host.plan import SequenceUpdate, StepPlan, StepResult
from pagedjax.host.protocol import KVAllocator
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.snapshot import dump_request
from pagedjax.request import Request, SequenceGroup


def dump_plan(plan: StepPlan) -> dict[str, Any]:
    """A plan's fields by name, but for the empty ones."""
    return {name: value for name, value in plan._asdict().items() if value != ()}


def dump_result(result: StepResult) -> dict[str, Any]:
    """A result's fields by name, but for those that are None; JSON knows no integer keys, so errors are pairs."""
    data: dict[str, Any] = {name: value for name, value in result._asdict().items() if value is not None}
    if result.errors is not None:
        data["errors"] = [[seq_id, message] for seq_id, message in result.errors.items()]
    return data


class RecordingScheduler(Scheduler):
    """Plans as `Scheduler` does. What raises is not written: it changed nothing, or `recover` says what it left.

    Args:
        log: where to; flushed with every plan and every result. With None nothing is written.
    """

    def __init__(self, config: SchedulerConfig, allocator: KVAllocator, log: EventLog | None = None) -> None:
        super().__init__(config, allocator)
        self._log = log

    def _record(self, event: str, **data: Any) -> None:
        if self._log is not None:
            self._log.write({"event": event, **data})

    def _flush(self) -> None:
        if self._log is not None:
            self._log.flush()

    def add(self, request: Request) -> SequenceGroup:
        """See `Scheduler.add`."""
        group = super().add(request)
        self._record("add", request=dump_request(request))
        return group

    def fork(self, request_id: str, request: Request) -> SequenceGroup:
        """See `Scheduler.fork`."""
        group = super().fork(request_id, request)
        self._record("fork", request_id=request_id, request=dump_request(request))
        return group

    def finish(self, request_id: str, reason: str, stop_reason: str | int | None = None) -> None:
        """See `Scheduler.finish`, by which `abort` ends requests too."""
        super().finish(request_id, reason, stop_reason)
        self._record("finish", request_id=request_id, reason=reason, stop_reason=stop_reason)

    def finish_sequence(self, seq_id: int, reason: str, stop_reason: str | int | None = None) -> None:
        """See `Scheduler.finish_sequence`."""
        super().finish_sequence(seq_id, reason, stop_reason)
        self._record("finish_sequence", seq_id=seq_id, reason=reason, stop_reason=stop_reason)

    def schedule(self) -> StepPlan | None:
        """See `Scheduler.schedule`. Where nothing is planned nothing has changed, and nothing is written."""
        plan = super().schedule()
        if plan is not None:
            self._record("plan", plan=dump_plan(plan))
        self._flush()
        return plan

    def update(self, result: StepResult) -> list[SequenceUpdate]:
        """See `Scheduler.update`."""
        updates = super().update(result)
        self._record("result", result=dump_result(result))
        self._flush()
        return updates

    def preempt_latest(self) -> None:
        """See `Scheduler.preempt_latest`."""
        super().preempt_latest()
        self._record("preempt")

    def unpin(self, name: str) -> None:
        """See `Scheduler.unpin`."""
        super().unpin(name)
        self._record("unpin", name=name)

    def reset_prefix_cache(self) -> None:
        """See `Scheduler.reset_prefix_cache`."""
        super().reset_prefix_cache()
        self._record("reset_prefix_cache")

    def recover(self) -> None:
        """See `Scheduler.recover`."""
        super().recover()
        self._record("recover", state=self.snapshot())

    def restore(self, data: Any) -> None:
        """See `Scheduler.restore`; the log stays this scheduler's own."""
        log = self._log
        super().restore(data)  # takes over all attributes of another scheduler, which has no log
        self._log = log
        self._record("restore", state=self.snapshot())
