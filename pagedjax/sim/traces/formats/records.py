"""JSON files: a list of objects, or an object a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from pagedjax.errors import ConfigError
from pagedjax.sim.traces.formats.files import Lines, first_lines, open_text, reading
from pagedjax.sim.traces.rows import Problem, Problems

_CHUNK = 1 << 16
_BETWEEN = re.compile(r"\s*,?\s*")
_UNREADABLE = (ValueError, RecursionError)


def read_records(path: Path, problems: Problems) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects and their places, one in memory at a time.

    Raises:
        ConfigError: while reading, if a list is broken or cut short. (A line that is broken is only counted.)
    """
    with reading(path), open_text(path) as file:
        for where, value in _entries(path, file) if _is_list(path) else _lines(file, problems):
            if isinstance(value, dict):
                yield where, value
            else:
                problems.add(Problem.NO_RECORD, where)


def _is_list(path: Path) -> bool:
    return next(first_lines(path, Problems()), "").lstrip().startswith("[")


def _lines(file: TextIO, problems: Problems) -> Iterator[tuple[str, object]]:
    lines = Lines(file, problems)
    for line in lines:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except _UNREADABLE:
            value = None
        yield lines.where, value


def _entries(path: Path, file: TextIO) -> Iterator[tuple[str, object]]:
    decode = json.JSONDecoder().raw_decode
    text, number = file.read(_CHUNK), 0
    at = text.find("[") + 1
    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  (it matches nothing, too)
        if text.startswith("]", at):
            return
        try:
            value, at = decode(text, at)
        except _UNREADABLE as error:
            text, at = text[at:], 0
            more = file.read(max(_CHUNK, len(text)))
            if not more:
                raise ConfigError(
                    f"{path} is no JSON: its list breaks off behind {number} entries ({error})"
                ) from error
            text += more
            continue
        number += 1
        yield f"entry {number}", value
