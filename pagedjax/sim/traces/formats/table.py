"""CSV files: notes at the top (`# key: value`), the names of the columns, and a row a line.

Where the names are separated by tabs, so are the rows, and quotation marks are marks like any other.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pagedjax.sim.traces.formats.files import Lines, open_text, reading
from pagedjax.sim.traces.rows import Problem, Problems, RowMaker, TraceRow


class Top(NamedTuple):
    """The notes, the names of the columns, and how the csv module is to read the rows."""

    notes: dict[str, str]
    columns: list[str]
    dialect: dict[str, Any]


def read_top(lines: Iterator[str]) -> Top:
    """How a file begins; at its end there are no columns."""
    notes: dict[str, str] = {}
    for line in lines:
        if line.startswith("#"):
            key, _, value = line[1:].partition(":")
            notes[key.strip()] = value.strip()
        elif line.strip():
            dialect = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if "\t" in line else {}
            return Top(notes, [name.strip() for name in next(csv.reader([line], **dialect))], dialect)
    return Top(notes, [], {})


def read_table(
    path: Path,
    problems: Problems,
    prompt: tuple[str, ...],
    output: tuple[str, ...],
    time: str,
    seconds: Callable[[Any], float] = float,
) -> Iterator[TraceRow]:
    """The rows of a CSV, one in memory at a time.

    Args:
        prompt: names of the column of prompt lengths; the first that is there counts.
        output: names of the column of output lengths, likewise.
        time: name of the column of arrivals, which need not be there.
        seconds: makes seconds of a time as the file gives it.
    """
    with reading(path), open_text(path) as file:
        lines = Lines(file, problems)
        rest = iter(lines)
        _, columns, dialect = read_top(rest)
        prompt_at, output_at = (
            next(columns.index(name) for name in names if name in columns) for names in (prompt, output)
        )
        time_at = columns.index(time) if time in columns else None
        num_fields = 1 + max(prompt_at, output_at, time_at or 0)
        maker = RowMaker(problems, None if time_at is None else seconds)
        for fields in _fields(csv.reader(rest, **dialect), lines, problems):
            fields += [""] * (num_fields - len(fields))
            at = None if time_at is None else fields[time_at]
            row = maker.make(lines.where, fields[prompt_at], fields[output_at], at)
            if row is not None:
                yield row


def _fields(reader: Iterator[list[str]], lines: Lines, problems: Problems) -> Iterator[list[str]]:
    while True:
        try:
            fields = next(reader, None)
        except csv.Error:  # a field without end, as behind a stray quotation mark
            problems.add(Problem.NO_FIELDS, lines.where)
            continue
        if fields is None:
            return
        if fields:
            yield fields
