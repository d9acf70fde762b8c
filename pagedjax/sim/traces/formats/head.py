"""What the beginning of a file tells: by it formats are told apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pagedjax.errors import ConfigError
from pagedjax.sim.traces.formats.files import first_lines, is_zip, read_arrays, reading
from pagedjax.sim.traces.formats.records import read_records
from pagedjax.sim.traces.formats.table import read_top
from pagedjax.sim.traces.rows import Problems

_NUM_RECORDS = 16
"""Whose keys are looked at: in the first record, one may be missing."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a file is.

    Attributes:
        kind: "csv", "json" (a list of objects, or an object a line) or "npz".
        names: of its columns, keys or arrays.
        notes: what it says about itself.
    """

    kind: str
    names: tuple[str, ...]
    notes: dict[str, str]


def read_head(path: Path) -> Head:
    """Reads no more of a file than it takes to tell what it is.

    Raises:
        ConfigError: it cannot be read, or is cut short before anything can be told.
    """
    problems = Problems()
    with reading(path):
        if is_zip(path):
            return _npz_head(path)
        first = next(first_lines(path, Problems()), "").lstrip()
        head = _json_head(path, problems) if first.startswith(("[", "{")) else _csv_head(path, problems)
    if problems.total and not head.names:
        raise ConfigError(f"{path} cannot be read: {'; '.join(problems.lines())}")
    return head


def _npz_head(path: Path) -> Head:
    arrays = read_arrays(path)
    try:
        meta = dict(json.loads(str(arrays["meta"])))
    except (KeyError, TypeError, ValueError):  # notes are ours, other files have none
        meta = {}
    return Head("npz", tuple(arrays), {key: value for key, value in meta.items() if isinstance(value, str)})


def _json_head(path: Path, problems: Problems) -> Head:
    records = islice(read_records(path, problems), _NUM_RECORDS)
    return Head("json", tuple(dict.fromkeys(key for _, record in records for key in record)), {})


def _csv_head(path: Path, problems: Problems) -> Head:
    top = read_top(first_lines(path, problems))
    return Head("csv", tuple(top.columns), top.notes)
