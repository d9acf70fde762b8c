"""Reads a log of events, and says what each of them does to a scheduler. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from operator import methodcaller
from typing import Any

from pagedjax.baselines import make_allocator
from pagedjax.config import CacheConfig, SchedulerConfig
from pagedjax.errors import LogError, PagedJaxError
from pagedjax.event_log import VERSION, encode, parse_line
from pagedjax.host.beam import BeamCandidate
from pagedjax.host.plan import StepResult
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.snapshot import load_request
from pagedjax.scalars import is_number, shown

Event = dict[str, Any]

_UNREADABLE = (AttributeError, KeyError, TypeError, ValueError, PagedJaxError)


class LogReader:
    """The events of a log with the numbers of their lines, from 1, read as they are asked for.

    Attributes:
        last_line_torn: whether the last line was left out, because it is not whole; known at the end.

    Raises:
        LogError: while reading, if there is no such file, it is no log, or any other line is no event.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.last_line_torn = False

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        try:
            yield from self._read()
        except OSError as error:
            raise LogError(f"{self.path} cannot be read ({error.strerror})") from error

    def _read(self) -> Iterator[tuple[int, Event]]:
        number = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                event = parse_line(line)
                if event is not None and (number > 1 or event["event"] == "start"):
                    yield number, event
                elif number == 1:
                    raise LogError(f"{self.path} is no log of events: its first line does not start one")
                elif file.peek(1):
                    raise LogError(f"{self.path}, line {number}: this is no event")
                else:
                    self.last_line_torn = True
        if not number:
            raise LogError(f"{self.path} is no log of events: it is empty")


def make_scheduler(start: Event) -> Scheduler:
    """The scheduler, over blocks that are only counted, that a start line describes. Raises LogError."""
    if start.get("version") != VERSION:
        raise LogError(f"a log of version {shown(start.get('version'))}, but this program reads version {VERSION}")
    config = start.get("config")
    if not isinstance(config, dict):
        raise LogError("the start of a run without its configuration")
    cache, scheduler = _make(CacheConfig, config.get("cache")), _make(SchedulerConfig, config.get("scheduler"))
    return Scheduler(scheduler, make_allocator(cache, scheduler.max_model_len))


def _make(cls: type[Any], values: object) -> Any:
    if not isinstance(values, dict):
        raise LogError(f"the start of a run without a {cls.__name__}")
    if unknown := values.keys() - {field.name for field in fields(cls)}:
        raise LogError(f"a {cls.__name__} with {', '.join(sorted(unknown))}, which this program does not know")
    try:
        return cls(**values)
    except (TypeError, PagedJaxError) as error:
        raise LogError(f"a {cls.__name__} that makes no sense: {error}") from error


def load_event(event: Event) -> Callable[[Scheduler], Any]:
    """What an event other than a start does to a scheduler. Raises LogError."""
    if not is_number(event.get("t")):
        raise LogError(f"an event {event['event']!r} without its time")
    try:
        return _load(event)
    except LogError:
        raise
    except _UNREADABLE as error:
        raise LogError(f"an event {event['event']!r} that cannot be read: {error!r}") from error


def _load(event: Event) -> Callable[[Scheduler], Any]:
    match event["event"]:
        case "add":
            return methodcaller("add", load_request(event["request"]))
        case "fork":
            return methodcaller("fork", event["request_id"], load_request(event["request"]))
        case "plan":
            encode(event["plan"])  # to be compared: 1e999 is read as infinity, and could not be written
            count_preemptions(event["plan"])
            return methodcaller("schedule")
        case "result":
            return methodcaller("update", _load_result(event["result"]))
        case "finish":
            return methodcaller("finish", event["request_id"], event["reason"], event["stop_reason"])
        case "finish_sequence":
            return methodcaller("finish_sequence", event["seq_id"], event["reason"], event["stop_reason"])
        case "preempt":
            return methodcaller("preempt_latest")
        case "unpin":
            return methodcaller("unpin", event["name"])
        case "reset_prefix_cache":
            return methodcaller("reset_prefix_cache")
        case "recover" | "restore":
            return methodcaller("restore", event["state"])
        case kind:
            raise LogError(f"an event {shown(kind)}, which this program does not know")


def _load_result(data: Any) -> StepResult:
    """Inverse of `recorder.dump_result`."""
    errors, beams = data.get("errors"), data.get("beams")
    return StepResult(
        int(data["step"]),
        [int(token) for token in data["token_ids"]],
        errors and {int(seq_id): str(message) for seq_id, message in errors},
        beams and [[BeamCandidate(int(beam), int(token), float(p)) for beam, token, p in found] for found in beams],
    )


def count_preemptions(plan: Event) -> tuple[int, int]:
    """Sequences that a logged plan preempts, and blocks that it swaps out."""
    return len(plan.get("preempted", ())), len(plan.get("swap_outs", ()))
