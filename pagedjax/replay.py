"""Plays a log through a scheduler of its own, and says whether that makes the same plans, byte for byte.

Standard library only: what a GPU was told can be looked into where there is neither a GPU nor JAX.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from pagedjax.errors import InvariantError, LogError, PagedJaxError
from pagedjax.event_log import encode
from pagedjax.host.plan import ScheduledBeams, ScheduledChunk, StepPlan
from pagedjax.host.scheduler import Scheduler
from pagedjax.log_reader import Event, LogReader, count_preemptions, load_event, make_scheduler
from pagedjax.recorder import dump_plan
from pagedjax.scalars import shown

Observer = Callable[[Event, Scheduler], None]
"""Told of each event when the scheduler has taken it; of a run that differs, up to the difference."""

_NOTHING = object()
_PARTS = {"chunks": ScheduledChunk._fields, "beams": ScheduledBeams._fields}
_REFUSED = (AssertionError, LookupError, TypeError, ValueError, PagedJaxError)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a run and its replay part.

    Attributes:
        line: of the log, from 1.
        step: that is planned there, or would be next.
        field: of the event, such as "plan.chunks[2].new_blocks".
        logged: its value in the log, cut where it is long.
        replayed: what there is instead, in words.
    """

    line: int
    step: int
    field: str
    logged: str
    replayed: str

    def __str__(self) -> str:
        return f"line {self.line}, step {self.step}: {self.field} is {self.logged} in the log, but {self.replayed}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a log holds, and how its replay went.

    Attributes:
        runs: starts of an engine.
        events: whole lines.
        plans: steps planned.
        same_plans: those that the replay made alike.
        plans_not_compared: those behind the first difference of their run, where a replay means nothing any more.
        requests: added, forks counted.
        preempted_sequences: counted each time.
        swapped_out_blocks: moved to the host, counted each time.
        first_difference: None if there is none.
        last_line_torn: whether the last line was left out, because it is not whole.
    """

    runs: int
    events: int
    plans: int
    same_plans: int
    plans_not_compared: int
    requests: int
    preempted_sequences: int
    swapped_out_blocks: int
    first_difference: Difference | None
    last_line_torn: bool

    def row(self) -> dict[str, object]:
        """The report as a record of plain values."""
        difference = self.first_difference
        return {**asdict(self), "first_difference": difference and str(difference)}


def replay(
    path: str | os.PathLike[str], *, check_invariants: bool = False, observer: Observer | None = None
) -> ReplayReport:
    """Reads a log line by line and does again what it says.

    Args:
        path: of the log; see `pagedjax.event_log`.
        check_invariants: check the scheduler's state after every event.
        observer: told of every event.

    Raises:
        LogError: if the file cannot be read, is no log, or one of another version, or is damaged before its last line.
        InvariantError: if the scheduler comes into a state that can never be: a bug.
    """
    reader = LogReader(path)
    player = _Player(check_invariants, observer)
    for number, event in reader:
        try:
            player.take(number, event)
        except LogError as error:
            raise LogError(f"{reader.path}, line {number}: {error}") from error
    return ReplayReport(**player.counts, first_difference=player.first, last_line_torn=reader.last_line_torn)


class _Player:
    """Takes events one by one, and counts.

    Attributes:
        counts: those of a `ReplayReport`.
        first: the first difference.
    """

    def __init__(self, check_invariants: bool, observer: Observer | None) -> None:
        self.counts = dict.fromkeys(
            (
                "runs",
                "events",
                "plans",
                "same_plans",
                "plans_not_compared",
                "requests",
                "preempted_sequences",
                "swapped_out_blocks",
            ),
            0,
        )
        self.first: Difference | None = None
        self._check_invariants = check_invariants
        self._observer = observer
        self._scheduler: Scheduler | None = None  # of the run at hand, as long as it does not differ

    def take(self, line: int, event: Event) -> None:
        """Does what one event says."""
        self.counts["events"] += 1
        if event["event"] == "start":
            self.counts["runs"] += 1
            self._scheduler = make_scheduler(event)
        else:
            act = load_event(event)
            self._count(event)
            if self._scheduler is not None and (found := self._act(self._scheduler, act, line, event)):
                self.first = self.first or found
                self._scheduler = None
        if self._scheduler is not None:
            self._look(line, event, self._scheduler)

    def _count(self, event: Event) -> None:
        counts, kind = self.counts, event["event"]
        counts["requests"] += kind in ("add", "fork")
        if kind == "plan":
            preempted, swapped = count_preemptions(event["plan"])
            counts["plans"] += 1
            counts["plans_not_compared"] += self._scheduler is None
            counts["preempted_sequences"] += preempted
            counts["swapped_out_blocks"] += swapped

    def _act(self, scheduler: Scheduler, act: Callable[[Scheduler], Any], line: int, event: Event) -> Difference | None:
        """Lets an event happen; what then is not as it was."""
        kind, step = event["event"], scheduler.num_steps
        try:
            answer = act(scheduler)
        except _REFUSED as error:
            data = {name: value for name, value in event.items() if name not in ("event", "t")}
            why = error if isinstance(error, PagedJaxError | ValueError) else repr(error)
            return Difference(line, step, kind, shown(data), f"the replay cannot do it: {why}")
        found = find_difference(event["plan"], answer) if kind == "plan" else None
        if found is not None:
            return Difference(line, step, *found)
        self.counts["same_plans"] += kind == "plan"
        return None

    def _look(self, line: int, event: Event, scheduler: Scheduler) -> None:
        if self._check_invariants:
            try:
                scheduler.check_invariants()
            except InvariantError as error:
                raise InvariantError(f"line {line}, after {event['event']!r}: {error}") from error
        if self._observer is not None:
            self._observer(event, scheduler)


# ---------------------------------------------------------------------- comparing


def find_difference(logged: Event, plan: StepPlan | None) -> tuple[str, str, str] | None:
    """Compares a logged plan with one just made, byte for byte.

    Returns:
        The first field that differs, its value in the log, and what there is instead; None if they are the same.
    """
    if plan is None:
        return "plan", shown(logged), "the replay plans nothing"
    written = encode(dump_plan(plan))
    if encode(logged) == written:
        return None
    field, one, other = _first_difference("plan", _named(logged), _named(json.loads(written)))
    return field, _text(one), f"{_text(other)} in the replay"


def _named(plan: Event) -> Event:
    """A plan whose chunks and beams have names for their fields, where they have as many as they should."""
    return {part: _named_items(value, _PARTS[part]) if part in _PARTS else value for part, value in plan.items()}


def _named_items(items: Any, names: tuple[str, ...]) -> Any:
    if not isinstance(items, list):
        return items
    return [
        dict(zip(names, item, strict=True)) if isinstance(item, list) and len(item) == len(names) else item
        for item in items
    ]


def _first_difference(name: str, one: Any, other: Any) -> tuple[str, object, object]:
    """Goes down to the innermost values that differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        parts = [(f"{name}.{key}", one.get(key, _NOTHING), other.get(key, _NOTHING)) for key in {**other, **one}]
    elif isinstance(one, list) and isinstance(other, list):
        both = zip_longest(one, other, fillvalue=_NOTHING)
        parts = [(f"{name}[{index}]", a, b) for index, (a, b) in enumerate(both)]
    else:
        return name, one, other
    for inner, a, b in parts:
        if a is _NOTHING or b is _NOTHING or encode(a) != encode(b):
            return _first_difference(inner, a, b)
    return name, one, other  # the same fields in another order


def _text(value: object) -> str:
    return "nothing" if value is _NOTHING else shown(value)
