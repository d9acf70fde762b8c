"""The log of an engine: what its scheduler was told and the plans that it made, one JSON object a line.

A file holds one run or several, one after another. Each begins with a line of its own, whose `config` has the fields
of `CacheConfig` and `SchedulerConfig`; `engine` is whatever the engine says of itself, and nobody needs it, and `clock`
says what the clock that arrival times are on showed then:

    {"event":"start","version":1,"time":"2025-01-31T09:30:00.125+00:00","clock":12.5,
     "config":{"cache":{},"scheduler":{}},"engine":{}}

Every other line has `t`, the seconds since its run began, and is written when its event has happened:

    event                further keys
    add                  request: as `pagedjax.host.snapshot.dump_request` writes it
    fork                 request_id: of the parent; request: the fork
    plan                 plan: the fields of `StepPlan` that are not empty; the tuples in them are lists
    result               result: the fields of `StepResult` that are not None; errors are [seq_id, message] pairs
    finish               request_id, reason, stop_reason; an abort is one with the reason "abort"
    finish_sequence      seq_id, reason, stop_reason
    preempt              the next step takes the memory of the latest arrival, as was asked from outside
    unpin                name: of the prefix
    reset_prefix_cache
    recover, restore     state: a snapshot of the scheduler, taken afterwards

A line is whole when it ends with a newline. Whatever kills a run can tear the last one, and no other.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from operator import index
from typing import Any

from pagedjax.errors import ConfigError
from pagedjax.scalars import shown

VERSION = 1

_BUFFER_BYTES = 2**20
_START = b'{"event":"start","version":'
_DRAWN = ("cache.prefix_hash_seed",)  # differs from run to run unless it is given, and no plan depends on it
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=index).encode


def encode(data: Any) -> bytes:
    """Data as one line of JSON without its end; equal bytes stand for equal data, floats to the last bit.

    Raises:
        TypeError: if it holds what JSON has not.
        ValueError: if it holds a float that is not finite.
    """
    return _to_json(data).encode()


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None if the line is torn, or holds none."""
    if not line.endswith(b"\n"):
        return None
    try:
        event = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class EventLog:
    """Appends events to a file. A disk that fills up, or any other failure to write, ends the log and not the run.

    Args:
        path: of a file that is made if there is none. One that is there must be a log of the same configuration; its
            last line, if torn, is cut off with a warning.
        header: {"config": {"cache": {...}, "scheduler": {...}}, "engine": {...}}, JSON-able; see the module.
        clock: seconds, never going back.

    Attributes:
        path: as given.
        num_events: written so far by this object, the start counted.
        failed: whether the log ended because it could not be written; events are dropped from then on.

    Raises:
        ConfigError: if the file cannot be written, is no log, or one of another version or configuration; it is left
            as it was then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = os.fspath(path)
        self.num_events = 0
        self.failed = False
        self._clock = clock
        self._began = clock()
        self._buffer: list[bytes] = []
        self._num_buffered = 0  # bytes
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        begin = {"event": "start", "version": VERSION, "time": now, "clock": self._began}
        start = encode({**begin, **header}) + b"\n"
        self._fd = -1
        self._fd, self._size = _begin(self.path, start)
        self.num_events = 1

    def write(self, event: Mapping[str, Any]) -> None:
        """Takes an event, its kind under "event", and stamps it; `flush` or a full buffer brings it to the file."""
        if self._fd < 0:
            return
        t = round(self._clock() - self._began, 6)
        try:
            line = encode({"event": event["event"], "t": t, **event}) + b"\n"
        except (TypeError, ValueError) as error:
            self.flush()
            self._fail(f"{event['event']} cannot be written as JSON, {error}")
            return
        self._buffer.append(line)
        self._num_buffered += len(line)
        if self._num_buffered > _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is buffered, whole lines only. Warns, once and for all, if that fails."""
        if not self._buffer or self._fd < 0:
            return
        data = b"".join(self._buffer)
        try:
            found = os.fstat(self._fd)
            if found.st_nlink == 0 or found.st_size != self._size:
                self._fail("something else writes to it" if found.st_nlink else "it was deleted")
                return
            _append(self._fd, data, self._size)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self.num_events += len(self._buffer)
        self._size += len(data)
        self._buffer, self._num_buffered = [], 0

    def close(self) -> None:
        """Writes what is buffered and lets go of the file; events are dropped from then on."""
        self.flush()
        self._let_go()

    def _fail(self, why: str) -> None:
        if self._fd < 0:
            return
        self.failed = True
        self._let_go()
        warnings.warn(
            f"event_log={shown(self.path)} cannot be written ({why}): it ends with event {self.num_events} of this "
            "run, and what comes after is not logged",
            RuntimeWarning,
            stacklevel=3,
        )

    def _let_go(self) -> None:
        self._buffer, self._num_buffered = [], 0
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:  # an engine that was dropped, not closed
            self.close()


# ---------------------------------------------------------------------- the file


def _begin(path: str, start: bytes) -> tuple[int, int]:
    """Opens a file for appending and writes a start line; returns its descriptor and size in bytes."""
    try:
        # In binary where that makes a difference; made as `open` would make it.
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    except (OSError, ValueError) as error:
        raise _unwritable(path, getattr(error, "strerror", None) or str(error)) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _unwritable(path, "it is no file")
        size = _cut_torn_line(fd, path, json.loads(start)["config"])
        _append(fd, start, size)
    except OSError as error:
        os.close(fd)
        raise _unwritable(path, error.strerror or str(error)) from error
    except BaseException:
        os.close(fd)
        raise
    return fd, size + len(start)


def _append(fd: int, data: bytes, size: int) -> None:
    """Writes all of it behind the first `size` bytes, or none of it and raises OSError."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, size)
        raise


def _unwritable(path: str, why: str) -> ConfigError:
    return ConfigError(f"event_log={shown(path)} is not allowed ({why}): event_log must be a file that can be written")


def _cut_torn_line(fd: int, path: str, config: dict[str, Any]) -> int:
    """Checks that a file is empty or a log of `config`, and cuts a torn line off its end; returns its size in bytes."""
    size = os.fstat(fd).st_size
    if not size:
        return 0
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as data:
        head = data.find(b"\n") + 1
        if head:
            _check_start(data[:head], path, config)
        elif data[: len(_START)] != _START[:size]:
            raise _no_log(path)
        whole = data.rfind(b"\n") + 1
        if head < whole == size:
            last = data.rfind(b"\n", 0, size - 1) + 1
            whole = last if parse_line(data[last:]) is None else size
    if whole < size:
        os.ftruncate(fd, whole)
        warnings.warn(
            f"event_log={shown(path)}: its last line was torn, as when a run is killed, and is cut off "
            f"({size - whole} bytes)",
            RuntimeWarning,
            stacklevel=4,
        )
    return whole


def _no_log(path: str) -> ConfigError:
    return ConfigError(
        f"event_log={shown(path)} is not allowed (it holds something else): event_log must be a new file, or a log to "
        "be continued"
    )


def _check_start(line: bytes, path: str, config: dict[str, Any]) -> None:
    start = parse_line(line)
    if start is None or start["event"] != "start":
        raise _no_log(path)
    if start.get("version") != VERSION:
        different = [f"version is {start.get('version')!r} there and {VERSION} here"]
    else:
        different = _differences(start.get("config"), config)
    if different:
        raise ConfigError(
            f"event_log={shown(path)} is a log of another configuration ({', '.join(different)}): give another path"
        )


def _differences(there: Any, here: dict[str, Any]) -> list[str]:
    """What two configurations do not have in common, in words."""
    a, b = _flat(there), _flat(here)
    pairs = {name: (a.get(name, "unknown"), b.get(name, "unknown")) for name in {**b, **a} if name not in _DRAWN}
    return [f"{name} is {one} there and {other} here" for name, (one, other) in pairs.items() if one != other]


def _flat(config: Any) -> dict[str, str]:
    """{"cache.num_blocks": "8", ...}"""
    parts = config.items() if isinstance(config, dict) else ()
    return {
        f"{part}.{name}": shown(value)
        for part, values in parts
        for name, value in (values.items() if isinstance(values, dict) else ())
    }
