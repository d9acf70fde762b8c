"""Progress: bars are for terminals; elsewhere a plain line, or nothing."""

from __future__ import annotations

import io
import sys
import time

import pytest

from pagedjax.models import progress
from pagedjax.models.progress import bar, said_if_slow, stages


class Terminal(io.StringIO):
    """A stderr that says it is one."""

    def isatty(self) -> bool:
        return True


def test_no_bar_is_drawn_where_nobody_can_see_it_move(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0)
    assert list(bar([1, 2], "count", True)) == [1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    list(bar([1, 2], "count", True))
    list(bar([1, 2], "silent", False))
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "count" in shown and "silent" not in shown


def test_stages_are_a_line_each_or_one_line_that_changes(capsys: pytest.CaptureFixture[str], monkeypatch):
    def prepare(said: bool) -> None:
        with stages("prepare x", 2, said) as begin:
            begin("fetch")
            begin("save")

    prepare(True)
    assert capsys.readouterr().err == "prepare x: fetch\nprepare x: save\n"
    prepare(False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    prepare(True)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\rprepare x: save [2/2]" in shown and "\nprepare x: save" not in shown


def test_what_is_quick_is_not_said(capsys: pytest.CaptureFixture[str], monkeypatch):
    with said_if_slow("quick", True):
        pass
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0)
    with said_if_slow("silent", False):
        time.sleep(0.05)
    with said_if_slow("slow", True):
        time.sleep(0.05)
    assert capsys.readouterr().err == "slow\n"
