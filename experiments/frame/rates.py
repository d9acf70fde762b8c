"""Figures of normalized latency over the rate of requests."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.frame.plots import COLOURS, MARKERS, NAMES, label_line
from experiments.frame.systems import BOUND, CUT, SYSTEMS


def draw_latencies(axes: Any, records: pd.DataFrame) -> None:
    """A line a system, named above where it crosses the bound: slow ones on the right, fast ones on the left."""
    knees: list[tuple[float, str]] = []
    for system in SYSTEMS:
        rows: Any = records[records["system"] == system]
        if rows.empty:
            continue
        rows = rows[rows["latency_s"].notna()].sort_values("rate")
        axes.plot(rows["rate"], rows["latency_s"], color=COLOURS[system], marker=MARKERS[system], label=NAMES[system])
        knees.append((float(rows["knee_rate"].iloc[0]), system))
    axes.axhline(BOUND, color=COLOURS["paper"], linewidth=0.6, linestyle=":")
    axes.set(xlabel="requests/s", ylabel="normalized latency (s/token)", ylim=(0, CUT), xlim=(0, None))
    right = axes.get_xlim()[1]
    axes.set_ylim(0, CUT * 1.45)  # room for the names; the lines end at the cut
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    for at, (knee, system) in enumerate(sorted(knees)):
        height = CUT * (1.4 - 0.085 * at)
        axes.plot([knee, knee], [BOUND, height], color=COLOURS[system], linewidth=0.5, alpha=0.6)
        left = knee > 0.5 * right
        offset, side = ((-2, 0), "right") if left else ((2, 0), "left")
        label_line(axes, knee, height, NAMES[system], COLOURS[system], offset=offset, ha=side)
