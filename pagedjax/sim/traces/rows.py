"""What a trace consists of, and what is wrong with the rows that a file gives. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

_NOT_READ = (TypeError, ValueError, OverflowError)
_LEFT_OUT = "left out"


class TraceRow(NamedTuple):
    """A request of a trace.

    Attributes:
        prompt_len: tokens, at least 1.
        output_len: tokens, at least 1.
        time: of its arrival, in seconds from the first request's; None where the trace has no times.
        block_hashes: ids of the prompt's blocks of a fixed size; an equal id is the same block behind the same prefix.
    """

    prompt_len: int
    output_len: int
    time: float | None = None
    block_hashes: tuple[int, ...] = ()


class Problem(Enum):
    """What can be wrong with a row ("3 rows have ..."), and what becomes of it then."""

    MISSING = ("a field missing", _LEFT_OUT)
    NO_NUMBER = ("a length or a time that is no number", _LEFT_OUT)
    NEGATIVE = ("a negative length", _LEFT_OUT)
    EMPTY = ("a length of zero tokens", _LEFT_OUT)
    NO_TEXT = ("something else where a text belongs", _LEFT_OUT)
    NO_TURN = ("no turn of a human with an answer of gpt behind it", _LEFT_OUT)
    NO_RECORD = ("no JSON object that can be read", _LEFT_OUT)
    NO_FIELDS = ("no CSV fields that can be read", _LEFT_OUT)
    CUT_OFF = ("been cut off with the rest of the file", _LEFT_OUT)
    BACKWARDS = ("a time before that of an earlier row", "kept with the latest time so far")
    HASHES = ("other than one hash for every block of the prompt", "kept without hashes")


class Problems:
    """Counts what is wrong with rows by kind, and remembers where each kind was found first."""

    def __init__(self) -> None:
        self._counts: dict[Problem, int] = {}
        self._first: dict[Problem, str] = {}

    def add(self, kind: Problem, where: str) -> None:
        """Counts one more row.

        Args:
            where: the row's place in its file, such as "line 17".
        """
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._first.setdefault(kind, where)

    @property
    def total(self) -> int:
        """Problems of all kinds."""
        return sum(self._counts.values())

    def lines(self) -> list[str]:
        """A sentence for every kind that was found."""
        return [
            f"{count:,} {'row has' if count == 1 else 'rows have'} {kind.value[0]} (first: {self._first[kind]}), "
            f"{kind.value[1]}"
            for kind, count in self._counts.items()
        ]


class RowMaker:
    """Makes rows of what a file gives, as text or as numbers, and counts what is wrong.

    Args:
        seconds: makes seconds of a time as the file gives it; None if it gives no times.
    """

    def __init__(self, problems: Problems, seconds: Callable[[Any], float] | None = None) -> None:
        self.problems = problems
        self._seconds = seconds
        self._first: float | None = None
        self._latest = 0.0

    def make(self, where: str, prompt: object, output: object, time: object = None) -> TraceRow | None:
        """The row, or None if it cannot be used.

        Args:
            where: the row's place in its file, such as "line 17".
            prompt: tokens; None or "" is a field that is missing.
            output: tokens, likewise.
            time: likewise, of whatever `seconds` takes.
        """
        given = (prompt, output) if self._seconds is None else (prompt, output, time)
        if None in given or "" in given:
            return self._refuse(Problem.MISSING, where)
        try:
            prompt_len, output_len = _whole(prompt), _whole(output)
            at = None if self._seconds is None else self._seconds(time)
        except _NOT_READ:
            return self._refuse(Problem.NO_NUMBER, where)
        if at is not None and not math.isfinite(at):
            return self._refuse(Problem.NO_NUMBER, where)
        if prompt_len < 1 or output_len < 1:
            return self._refuse(Problem.NEGATIVE if min(prompt_len, output_len) < 0 else Problem.EMPTY, where)
        return TraceRow(prompt_len, output_len, None if at is None else self._from_first(at, where))

    def _refuse(self, kind: Problem, where: str) -> None:
        self.problems.add(kind, where)

    def _from_first(self, at: float, where: str) -> float:
        if self._first is None:
            self._first = at
        if at - self._first < self._latest:
            self.problems.add(Problem.BACKWARDS, where)
        self._latest = max(self._latest, at - self._first)
        return self._latest


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a switch is no number")
    try:
        return int(value) if isinstance(value, str) else value.__index__()
    except (AttributeError, ValueError):
        number = float(value)  # "12.0" is what some programs write for 12
        if not number.is_integer():
            raise ValueError("no whole number") from None
        return int(number)
