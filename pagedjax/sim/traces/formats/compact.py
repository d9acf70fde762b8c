"""This project's own files of lengths: CSV with notes at the top, arrivals in seconds if there are any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pagedjax.sim.traces.formats.format import Format
from pagedjax.sim.traces.formats.table import read_table
from pagedjax.sim.traces.rows import Problems, TraceRow

_PROMPT, _OUTPUT, _TIME = ("prompt_tokens", "prompt_tokens_est"), ("output_tokens",), "arrival_s"


def read(path: Path, problems: Problems) -> Iterator[TraceRow]:
    """The rows of such a file."""
    return read_table(path, problems, _PROMPT, _OUTPUT, _TIME)


FORMAT = Format("compact", ("csv",), (_PROMPT, _OUTPUT), read, time=(_TIME,))
