"""Figures: of a page's width, the same bytes each time, for light and for dark pages."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba
from matplotlib.image import imread

from experiments.frame import plots

RECORDS = pd.DataFrame({"x": [0.0, 1.0], "y": [0.0, 1.0]})


def line(records: pd.DataFrame) -> Any:
    figure, (axes,) = plots.new_figure()
    axes.plot(records["x"], records["y"], label="a line")
    axes.set_xlabel("x")
    axes.legend()
    return figure


def pixels(png: bytes) -> np.ndarray:
    return imread(io.BytesIO(png), format="png")


@pytest.mark.parametrize("dark", [False, True])
def test_the_same_records_give_the_same_bytes(dark: bool) -> None:
    first = plots.drawn(line, RECORDS, "png", "svg", dark=dark)
    assert first == plots.drawn(line, RECORDS, "png", "svg", dark=dark)
    assert first != plots.drawn(line, RECORDS.assign(y=[1.0, 0.0]), "png", "svg", dark=dark)
    assert b"dc:date" not in first[1] and b"a line" in first[1]  # texts stay texts


def test_a_column_of_a_page_at_200_dots_an_inch() -> None:
    (png,) = plots.drawn(line, RECORDS, "png")
    assert pixels(png).shape[:2] == (round(2.3 * 200), round(plots.COLUMN_WIDTH * 200))
    figure, axes = plots.new_figure(3, 2, height=1.5)
    assert len(axes) == 6 and tuple(figure.get_size_inches()) == (plots.COLUMN_WIDTH * 3, 3.0)


def test_light_and_dark_pages() -> None:
    (light,), (dark,) = (plots.drawn(line, RECORDS, "png", dark=each) for each in (False, True))
    assert pixels(light)[0, 0, :3].min() == 1.0
    assert pixels(dark)[0, 0, :3].max() < 0.1
    assert pixels(dark)[..., :3].max() > 0.85  # ink that is seen


def test_a_figure_leaves_matplotlib_as_it_was() -> None:
    before = dict(mpl.rcParams)

    def fails(records: pd.DataFrame) -> Any:
        raise RuntimeError

    plots.drawn(line, RECORDS, "png", dark=True)
    with pytest.raises(RuntimeError):
        plots.drawn(fails, RECORDS, "png")
    assert dict(mpl.rcParams) == before


def contrast(one: str, other: str) -> float:
    """As the Web Content Accessibility Guidelines have it."""

    def luminance(colour: str) -> float:
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgba(colour)[:3]]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    lower, higher = sorted((luminance(one), luminance(other)))
    return (higher + 0.05) / (lower + 0.05)


def test_systems_are_told_apart_by_colour_and_by_marker_on_both_pages() -> None:
    systems = set(plots.COLOURS) - {"paper"}
    assert systems == set(plots.MARKERS) and len(set(plots.MARKERS.values())) == len(systems)
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)
    for colour in plots.COLOURS.values():
        for page in ("#FFFFFF", "#0D1117"):
            assert contrast(colour, page) > 2, (colour, page)
