"""Statistics of real lengths that come with pagedjax: joint histograms of prompt and output lengths, to draw from.

Two kinds of bins, both exact at small lengths and growing geometrically. The fine ones hold the lengths of prompts and
of outputs, each alone; the coarse ones, unions of fine ones, say which go together. To draw is to choose a pair of
coarse bins, and in each of them a length among its fine ones. So each length alone is drawn to a per cent, and a
workload takes some 12 KB.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from pagedjax.sim.traces.rows import TraceRow

FINE, COARSE = 100, 8
"""A bin is at least 1/FINE or 1/COARSE of its lower end wide, and at least one token."""


def fine_edges(num_bins: int) -> list[int]:
    """The lower ends of so many fine bins, from a length of 1, and the upper end of the last."""
    edges = [1]
    while len(edges) <= num_bins:
        edges.append(edges[-1] + max(1, edges[-1] // FINE))
    return edges


def coarse_edges(fine: Sequence[int]) -> list[int]:
    """The same of coarse bins over the same lengths, of which the last may be narrower."""
    edges = [fine[0]]
    while edges[-1] < fine[-1]:
        least = edges[-1] + max(1, edges[-1] // COARSE)
        edges.append(fine[min(bisect_left(fine, least), len(fine) - 1)])
    return edges


class Axis:
    """Prompt or output lengths alone.

    Args:
        counts: rows in each fine bin.

    Attributes:
        values: lengths, ascending, that stand for the rows: those of a fine bin lie in it at equal distances.
        spans: for each coarse bin, the index of its first value and how many it has.
        edges: the lower ends of the coarse bins, and the upper end of the last.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        fine = fine_edges(len(counts))
        self.values = array("q")
        for low, high, count in zip(fine, fine[1:], counts, strict=False):
            self.values.extend(low + (2 * index + 1) * (high - low) // (2 * count) for index in range(count))
        self.edges = coarse_edges(fine)
        starts = [bisect_left(self.values, edge) for edge in self.edges]
        self.spans = [(start, end - start) for start, end in zip(starts, starts[1:], strict=False)]


class LengthStatistics:
    """Statistics of a workload's lengths.

    Attributes:
        title: what they are of, to stand in a sentence.
        num_rows: rows that they were made of.
        max_total: tokens of a prompt and its output together that no row exceeds, or None.
        provenance: what they were made of: file, filter, rows, and what the file says of its source and licence.
        errors: a record for each statistic of each length: what it was, and what it is of lengths drawn from here.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.title: str = data["title"]
        self.max_total: int | None = data["max_total"]
        self.provenance: dict[str, Any] = data["provenance"]
        self.errors: list[dict[str, Any]] = data["errors"]
        self.prompts, self.outputs = Axis(data["prompt_counts"]), Axis(data["output_counts"])
        self.cells: list[list[int]] = data["cells"]
        self.num_rows = sum(map(sum, self.cells))

    @property
    def mean_error(self) -> float:
        """By how many per cent the mean prompt or output length is off, whichever is more; rounded up to hundredths."""
        off = max(abs(error["histogram"] / error["real"] - 1) for error in self.errors if error["statistic"] == "mean")
        return math.ceil(off * 10_000) / 100

    def draw(self, seed: int) -> Iterator[TraceRow]:
        """Rows without end, the same for the same seed."""
        spans, choices = self._cells()
        prompts, outputs, number = self.prompts.values, self.outputs.values, self.num_rows
        limit = self.max_total or prompts[-1] + outputs[-1]
        uniform = random.Random(seed).random
        while True:
            first_prompt, num_prompts, first_output, num_outputs = spans[choices[int(uniform() * number)]]
            while True:
                prompt = prompts[first_prompt + int(uniform() * num_prompts)]
                output = outputs[first_output + int(uniform() * num_outputs)]
                if prompt + output <= limit:  # else once more: a cell may lie across the limit
                    break
            yield TraceRow(prompt, output)

    def _cells(self) -> tuple[list[tuple[int, int, int, int]], array[int]]:
        """The spans of values of each pair of coarse bins, and for each row the number of its pair."""
        spans, choices = [], array("l")
        for prompt_span, counts in zip(self.prompts.spans, self.cells, strict=False):
            for output_span, count in zip(self.outputs.spans, counts, strict=False):
                if count:
                    choices.extend([len(spans)] * count)
                    spans.append((*prompt_span, *output_span))
        return spans, choices


@cache
def load_statistics(name: str) -> LengthStatistics:
    """The statistics of a workload, by its name."""
    path = files("pagedjax.sim").joinpath("data", "lengths", f"{name}.json")
    return LengthStatistics(json.loads(path.read_text(encoding="utf-8")))
