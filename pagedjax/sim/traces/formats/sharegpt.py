"""ShareGPT: JSON, a conversation an entry.

A request is a conversation's first round, as in the paper: the first turn of a human that gpt answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from pagedjax.scalars import is_text
from pagedjax.sim.traces.formats.format import Format
from pagedjax.sim.traces.formats.records import read_records
from pagedjax.sim.traces.rows import Problem, Problems, RowMaker, TraceRow


def read(path: Path, problems: Problems, count_tokens: Callable[[str], int]) -> Iterator[TraceRow]:
    """The first round of each conversation."""
    maker = RowMaker(problems)
    for where, record in read_records(path, problems):
        texts = _first_round(record.get("conversations"))
        if texts is None:
            problems.add(Problem.NO_TURN, where)
        elif not all(map(is_text, texts)):
            problems.add(Problem.NO_TEXT, where)
        elif row := maker.make(where, *(count_tokens(str(text)) for text in texts)):
            yield row


def _first_round(turns: object) -> tuple[object, object] | None:
    turns = [turn if isinstance(turn, dict) else {} for turn in turns] if isinstance(turns, list) else []
    for turn, answer in pairwise(turns):
        if (turn.get("from"), answer.get("from")) == ("human", "gpt"):
            return turn.get("value"), answer.get("value")
    return None


FORMAT = Format("sharegpt", ("json",), (("conversations",),), read, holds_text=True)
