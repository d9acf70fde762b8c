"""The processed traces of Vidur and Sarathi-Serve: CSV, arrivals in seconds if there are any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pagedjax.sim.traces.formats.format import Format
from pagedjax.sim.traces.formats.table import read_table
from pagedjax.sim.traces.rows import Problems, TraceRow

_PROMPT, _OUTPUT, _TIME = ("num_prefill_tokens",), ("num_decode_tokens",), "arrived_at"


def read(path: Path, problems: Problems) -> Iterator[TraceRow]:
    """The rows of such a file."""
    return read_table(path, problems, _PROMPT, _OUTPUT, _TIME)


FORMAT = Format("vidur", ("csv",), (_PROMPT, _OUTPUT), read, time=(_TIME,))
