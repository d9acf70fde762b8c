"""Sentences and their translations, with the tokens of both counted: a source is a prompt, a target an output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pagedjax.sim.traces.formats.format import Format
from pagedjax.sim.traces.formats.table import read_table
from pagedjax.sim.traces.rows import Problems, TraceRow

_PROMPT, _OUTPUT, _TIME = ("english_tokens", "source_tokens"), ("german_tokens", "target_tokens"), "arrival_s"


def read(path: Path, problems: Problems) -> Iterator[TraceRow]:
    """The rows of such a file."""
    return read_table(path, problems, _PROMPT, _OUTPUT, _TIME)


FORMAT = Format("parallel", ("csv",), (_PROMPT, _OUTPUT), read, time=(_TIME,))
