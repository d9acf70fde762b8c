"""Figures of normalized latency over the rate of requests."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.frame.plots import COLOURS, MARKERS, NAMES, label_line
from experiments.frame.systems import BOUND, CUT, SYSTEMS


def draw_latencies(axes: Any, records: pd.DataFrame, *, names: dict[str, str] = NAMES) -> None:
    """A line a system, named where it crosses the bound."""
    knees: list[tuple[float, str]] = []
    for system in SYSTEMS:
        rows = records[(records["system"] == system) & records["latency_s"].notna()].sort_values("rate")
        if rows.empty:
            continue
        axes.plot(rows["rate"], rows["latency_s"], color=COLOURS[system], marker=MARKERS[system], label=names[system])
        knees.append((float(rows["knee_rate"].iloc[0]), system))
    axes.axhline(BOUND, color=COLOURS["paper"], linewidth=0.6, linestyle=":")
    axes.set(xlabel="requests/s", ylabel="normalized latency (s/token)", ylim=(0, CUT), xlim=(0, None))
    for at, (knee, system) in enumerate(sorted(knees)):
        height = CUT * (0.97 - 0.09 * at)
        axes.plot([knee, knee], [BOUND, height], color=COLOURS[system], linewidth=0.5, alpha=0.6)
        label_line(axes, knee, height, names[system], COLOURS[system], offset=(-2, 0), ha="right")
