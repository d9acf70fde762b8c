"""The LLM inference traces of AzurePublicDataset, 2023 and 2024: CSV, arrivals as dates and times in UTC."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pagedjax.sim.traces.formats.format import Format
from pagedjax.sim.traces.formats.table import read_table
from pagedjax.sim.traces.rows import Problems, TraceRow

_PROMPT, _OUTPUT, _TIME = ("ContextTokens",), ("GeneratedTokens",), "TIMESTAMP"


def read(path: Path, problems: Problems) -> Iterator[TraceRow]:
    """The rows of such a file."""
    return read_table(path, problems, _PROMPT, _OUTPUT, _TIME, _seconds)


def _seconds(text: str) -> float:
    # the files of 2023 do not say UTC; the seventh digit of their seconds is lost
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


FORMAT = Format("azure", ("csv",), (_PROMPT, _OUTPUT, (_TIME,)), read, time=(_TIME,))
