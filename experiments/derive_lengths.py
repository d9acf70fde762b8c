"""Derives the statistics of lengths that pagedjax ships from the real files, and says how far they are off.

    python experiments/derive_lengths.py DATA_FOLDER

Nothing of the files themselves is kept but their notes on source and licence. What the statistics' means and quantiles
will be is computed from the histograms, not drawn.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.sim.traces.formats import detect, read_file
from pagedjax.sim.traces.rows import Problems
from pagedjax.sim.traces.statistics import COARSE, FINE, Axis, LengthStatistics, fine_edges
from pagedjax.sim.traces.workloads import FILES
from pagedjax.tables import format_table

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
BINS = (
    f"From a length of 1: a fine bin is its lower end // {FINE} tokens wide, at least 1; a coarse bin takes fine ones "
    f"until it is its lower end // {COARSE} wide, at least 1. Counts are rows in fine bins. Cells are rows in pairs of "
    "coarse bins: for each bin of prompts those of outputs, without the zeros at the end."
)


@dataclass(frozen=True)
class Recipe:
    """What to make of a file: `max_total` leaves out rows whose prompt and output are longer together."""

    title: str
    max_total: int | None = None


RECIPES = {
    "sharegpt": Recipe("ShareGPT's first rounds as the paper's artifact has them, if shorter than 2,048 tokens", 2047),
    "sharegpt-v3": Recipe("the first turns of ShareGPT V3"),
    "alpaca": Recipe("Stanford Alpaca (prompts partly estimated)"),
    "sharegpt-multiturn": Recipe("ShareGPT in several rounds of up to 8,192 tokens", 8192),
    "arxiv": Recipe("arXiv-Summarization of up to 4,096 tokens", 4096),
    "azure-conv": Recipe("the conversations of Azure's trace of 2023"),
    "translation": Recipe("NTREX's English sentences and their German translations"),
    "mooncake-conv": Recipe("Mooncake's trace of conversations"),
}


@dataclass(frozen=True)
class Marginal:
    """Lengths with how many rows each stands for, which need be no whole number."""

    lengths: np.ndarray
    weights: np.ndarray

    def statistics(self) -> Iterator[tuple[str, float]]:
        """Mean and quantiles by name: a quantile is the least length that so many are no longer than."""
        below = np.cumsum(self.weights)
        yield "mean", float((self.lengths * self.weights).sum() / below[-1])
        for part in QUANTILES:
            # a rounding error must not carry it to the next length
            yield f"p{100 * part:.0f}", float(self.lengths[np.searchsorted(below, below[-1] * part * (1 - 1e-12))])


def histogram(pairs: np.ndarray) -> dict[str, Any]:
    """Counts of the [rows, 2] prompt and output lengths."""
    counts, bins = [], []
    for lengths in pairs.T:
        edges = fine_edges(1)
        while edges[-1] <= lengths.max():
            edges = fine_edges(2 * len(edges))
        fine = np.searchsorted(edges, lengths, "right") - 1
        counts.append(np.bincount(fine).tolist())
        bins.append(np.searchsorted(Axis(counts[-1]).edges, lengths, "right") - 1)
    cells = np.zeros([max(of) + 1 for of in bins], int)
    np.add.at(cells, tuple(bins), 1)
    rows = [np.trim_zeros(row, "b").tolist() for row in cells]
    return {"prompt_counts": counts[0], "output_counts": counts[1], "cells": rows}


def drawn(statistics: LengthStatistics) -> tuple[Marginal, Marginal, float]:
    """How often each prompt and output length is drawn, and the mean of their product."""
    prompts, outputs = (np.array(axis.values) for axis in (statistics.prompts, statistics.outputs))
    limit = statistics.max_total or prompts[-1] + outputs[-1]
    weights, product = (np.zeros(len(prompts)), np.zeros(len(outputs))), 0.0
    for (prompt_at, num_prompts), counts in zip(statistics.prompts.spans, statistics.cells, strict=False):
        for (output_at, num_outputs), count in zip(statistics.outputs.spans, counts, strict=False):
            if not count:
                continue
            mine = slice(prompt_at, prompt_at + num_prompts), slice(output_at, output_at + num_outputs)
            # with each prompt may go so many outputs of the cell, the shortest ones; and the other way round
            fits = np.searchsorted(outputs[mine[1]], limit - prompts[mine[0]], "right")
            others = np.searchsorted(prompts[mine[0]], limit - outputs[mine[1]], "right")
            weights[0][mine[0]] += count * fits / fits.sum()
            weights[1][mine[1]] += count * others / fits.sum()
            sums = np.concatenate([[0], np.cumsum(outputs[mine[1]])])
            product += count * (prompts[mine[0]] * sums[fits]).sum() / fits.sum()
    return Marginal(prompts, weights[0]), Marginal(outputs, weights[1]), product / statistics.num_rows


def errors(pairs: np.ndarray, statistics: LengthStatistics) -> list[dict[str, Any]]:
    """What each statistic of the real lengths is, and what it is of those drawn."""
    *marginals, product = drawn(statistics)
    found: list[dict[str, Any]] = []
    for length, column, marginal in zip(("prompt", "output"), pairs.T, marginals, strict=True):
        real = Marginal(*np.unique(column, return_counts=True))
        for (name, before), (_, after) in zip(real.statistics(), marginal.statistics(), strict=True):
            found.append({"length": length, "statistic": name, "real": round(before, 3), "histogram": round(after, 3)})
    means, deviations = zip(*(_moments(marginal) for marginal in marginals), strict=True)
    after = (product - math.prod(means)) / math.prod(deviations)
    before = float(np.corrcoef(pairs.T)[0, 1])
    found.append({"length": "both", "statistic": "correlation", "real": round(before, 3), "histogram": round(after, 3)})
    return found


def _moments(marginal: Marginal) -> tuple[float, float]:
    mean = np.average(marginal.lengths, weights=marginal.weights)
    return mean, np.sqrt(np.average((marginal.lengths - mean) ** 2, weights=marginal.weights))


def derive(name: str, folder: Path) -> dict[str, Any]:
    """The statistics of a workload, as they are shipped."""
    recipe, path, problems = RECIPES[name], folder / FILES[name][0], Problems()
    form, head = detect(path)
    pairs = np.array([row[:2] for row in read_file(path, form, head, problems, None)])
    if recipe.max_total is not None:
        pairs = pairs[pairs.sum(axis=1) <= recipe.max_total]
    data: dict[str, Any] = {
        "title": recipe.title,
        "max_total": recipe.max_total,
        "provenance": {
            "file": path.name,
            "filter": "none" if recipe.max_total is None else f"prompt + output < {recipe.max_total + 1} tokens",
            "rows": len(pairs),
            "problems": problems.lines(),
            "notes of the file": head.notes,
        },
        "bins": BINS,
        "errors": [],
        **histogram(pairs),
    }
    data["errors"] = errors(pairs, LengthStatistics(data))
    return data


def to_json(data: dict[str, Any]) -> str:
    """Text that can be compared: a line for each row of numbers and each record."""
    parts = []
    for key, value in data.items():
        text = json.dumps(value, indent=2, ensure_ascii=False) if key == "provenance" else json.dumps(value)
        if key in ("cells", "errors"):
            text = "[\n" + ",\n".join(json.dumps(row, separators=(",", ": ")) for row in value) + "\n]"
        elif key.endswith("_counts"):
            text = json.dumps(value, separators=(",", ":"))
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Writes the statistics and prints how far they are off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", type=Path, help="folder of the real files")
    parser.add_argument("--out", type=Path, default=Path(str(files("pagedjax.sim"))) / "data" / "lengths")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in RECIPES:
        data = derive(name, args.data)
        text = to_json(data)
        (args.out / f"{name}.json").write_text(text, encoding="utf-8")
        for error in data["errors"]:
            off = 100 * (error["histogram"] / error["real"] - 1) if error["length"] != "both" else None
            rows.append({"workload": name, **error, "off %": off})
        print(f"{name}: {len(text.encode()):,} bytes")
    print(format_table(rows))


if __name__ == "__main__":
    main()
