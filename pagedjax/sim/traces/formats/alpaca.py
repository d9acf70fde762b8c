"""Stanford Alpaca: JSON, a task an entry. A prompt is the instruction and, if there is one, what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pagedjax.scalars import is_text
from pagedjax.sim.traces.formats.format import Format
from pagedjax.sim.traces.formats.records import read_records
from pagedjax.sim.traces.rows import Problem, Problems, RowMaker, TraceRow


def read(path: Path, problems: Problems, count_tokens: Callable[[str], int]) -> Iterator[TraceRow]:
    """The rows of such a file."""
    maker = RowMaker(problems)
    for where, record in read_records(path, problems):
        if not {"instruction", "output"} <= record.keys():
            problems.add(Problem.MISSING, where)
            continue
        texts = [record["instruction"], record.get("input", ""), record["output"]]
        if not all(map(is_text, texts)):
            problems.add(Problem.NO_TEXT, where)
            continue
        prompt = "\n".join(filter(None, texts[:2]))
        if row := maker.make(where, count_tokens(prompt), count_tokens(texts[2])):
            yield row


FORMAT = Format("alpaca", ("json",), (("instruction",), ("output",)), read, holds_text=True)
