"""Figures that a paper could print: one colour a system everywhere, readable at column width, light and dark."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

COLUMN_WIDTH = 3.35
"""Inches, of a page with two columns."""

# Okabe and Ito's colours, which colour-blind people tell apart, and which stand out from white and from black.
COLOURS = {
    "vllm": "#0072B2",
    "orca-oracle": "#009E73",
    "orca-pow2": "#E69F00",
    "orca-max": "#D55E00",
    "ft": "#CC79A7",
    "paper": "#7F7F7F",
}
NAMES = {
    "vllm": "vLLM",
    "orca-oracle": "Orca (Oracle)",
    "orca-pow2": "Orca (Pow2)",
    "orca-max": "Orca (Max)",
    "ft": "FasterTransformer",
    "paper": "paper",
}
MARKERS = {"vllm": "o", "orca-oracle": "s", "orca-pow2": "^", "orca-max": "v", "ft": "D"}
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#7F7F7F")

_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pagedjax",
    "axes.prop_cycle": cycler(color=CYCLE),
}
_INK, _PAPER = "#E6EDF3", "#0D1117"
_DARK: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), _PAPER),
}


def new_figure(columns: int = 1, rows: int = 1, *, height: float = 2.3, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, each one column of a page wide and `height` inches high, and its axes in order."""
    figure = Figure(figsize=(COLUMN_WIDTH * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def label_line(axes: Axes, x: float, y: float, text: str, colour: str, **options: Any) -> None:
    """Names a line at one of its ends, in its colour, instead of a legend."""
    offset = options.pop("offset", (3, 0))
    box = {"facecolor": mpl.rcParams["axes.facecolor"], "edgecolor": "none", "pad": 0.6}  # over other lines
    axes.annotate(
        text,
        (x, y),
        xytext=offset,
        textcoords="offset points",
        color=colour,
        fontsize=7,
        va="center",
        bbox=box,
        zorder=5,
        **options,
    )


def mixed(colour: str, part: float) -> tuple[float, ...]:
    """So much of a colour in white, on whatever background."""
    return tuple(1 - part * (1 - channel) for channel in to_rgb(colour))


def bar_labels(axes: Axes, bars: Any, form: Callable[[float], str]) -> None:
    """Writes the value of each bar at its end."""
    axes.bar_label(bars, labels=[form(bar.get_height()) for bar in bars], fontsize=6.5, padding=1)


def drawn(plot: Callable[[Any], Figure], records: Any, *endings: str, dark: bool = False) -> list[bytes]:
    """The figure that an experiment makes of its records, as "png" or "svg", for a light or for a dark background.

    The same records give the same bytes.
    """
    with mpl.rc_context(_STYLE | (_DARK if dark else {})):
        figure = plot(records)
        return [_saved(figure, ending) for ending in endings]


def _saved(figure: Figure, ending: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=ending, dpi=200, metadata={"Date": None} if ending == "svg" else {"Software": None})
    return file.getvalue()
