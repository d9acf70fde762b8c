"""The report: verdicts that follow the records, what is missing or wrong said, and the same bytes again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.frame import Claim, cli
from experiments.frame.report import Section


def report(lab: Any) -> str:
    return (lab.results / "REPORT.md").read_text()


def run_all(lab: Any) -> None:
    lab.sweep(*(lab.task(number=number) for number in (1, 2, 3)))


def write(lab: Any) -> int:
    return lab.main("report", "--results", str(lab.results))


@pytest.mark.parametrize(
    ("ours", "low", "high", "needs", "verdict"),
    [
        (1.0, 1.0, 2.0, False, "reproduced"),
        (2.0, 1.0, 2.0, False, "reproduced"),
        (0.999, 1.0, 2.0, False, "not reproduced"),
        (2.001, 1.0, 2.0, False, "not reproduced"),
        (9.0, 1.0, None, False, "reproduced"),
        (0.0, None, 1.0, False, "reproduced"),
        (1.5, 1.0, 2.0, True, "needs an accelerator"),
        (None, 1.0, 2.0, True, "needs an accelerator"),
        (None, 1.0, 2.0, False, "no records"),
        (float("nan"), 1.0, 2.0, False, "no records"),
    ],
)
def test_verdict(ours: float | None, low: float | None, high: float | None, needs: bool, verdict: str) -> None:
    assert Claim("it", "there", ours, low, high, paper="so much", needs_accelerator=needs).verdict == verdict
    assert Claim("it", "there", ours, low, high, seed="so much", needs_accelerator=needs).verdict == verdict
    own = {"reproduced": "holds", "not reproduced": "does not hold"}  # nobody has said it but ourselves
    assert Claim("it", "there", ours, low, high, needs_accelerator=needs).verdict == own.get(verdict, verdict)


@pytest.mark.parametrize(
    ("claim", "figure", "accepted"),
    [
        (Claim("", "", 0.9634, 0.955, 0.97, unit="%"), "96.34 %", "95.5 % to 97 %"),
        (Claim("", "", 12_345_678, 1e7, None, unit="bytes"), "12,345,678 bytes", ">= 10,000,000 bytes"),
        (Claim("", "", 9, 9, 9), "9", "9"),
        (Claim("", "", 0.123456, None, 0.2), "0.1235", "<= 0.2"),
        (Claim("", "", 9999.7, None, 20_000), "10,000", "<= 20,000"),
        (Claim("", "", None, None, None), "-", "-"),
        (Claim("", "", float("nan"), 1, 2), "-", "1 to 2"),
    ],
)
def test_figures_as_printed(claim: Claim, figure: str, accepted: str) -> None:
    assert (claim.figure, claim.accepted) == (figure, accepted)


def test_a_record_that_changes_changes_the_verdict(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_all(lab)
    assert write(lab) == 0
    row = "| [the square \\| of 3](#squares) | page 1 | 9 | 8 | {} | 9 | {} | - | - |"
    assert row.format("9", "reproduced") in report(lab)
    assert report(lab).count(row.format("9", "reproduced")) == 2  # where the seed is told apart too
    assert "| needs an accelerator |" in report(lab)
    assert "1 reproduced; 1 needs an accelerator." in report(lab)
    records = lab.store_path / "squares" / lab.task(number=3).hash / "records.jsonl"
    records.write_text(records.read_text().replace("9.0", "9.5"))
    assert write(lab) == 0
    assert row.format("9.5", "**not reproduced**") in report(lab)
    assert "not reproduced" in capsys.readouterr().out


def test_report_of_an_empty_store(lab: Any) -> None:
    assert write(lab) == 0
    assert "| - | 9 | no records | - | - |" in report(lab)
    assert "Nothing has been run." in report(lab)
    assert [line for line in report(lab).splitlines() if line.startswith("- no records")] == [
        "- no records: `(defaults)` (not run)",
        "- no records: `number=2` (not run)",
        "- no records: `number=3` (not run)",
    ]
    assert "<picture>" not in report(lab)
    assert not lab.store_path.exists()


def test_report_when_some_failed_and_some_are_missing(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lab.edit("    match config", "    assert config.number != 2\n    match config")
    lab.sweep(lab.task(number=2), lab.task(number=3))
    assert write(lab) == 0
    assert "- no records: `number=2` (failed: AssertionError)" in report(lab)
    assert "- no records: `(defaults)` (not run)" in report(lab)
    assert "| 9 | 9 | reproduced |" in report(lab)
    assert "2 configurations have no records" in capsys.readouterr().out


def test_report_when_a_run_is_damaged(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_all(lab)
    (lab.store_path / "squares" / lab.task(number=2).hash / "records.jsonl").write_text("{\n")
    assert write(lab) == 1
    assert "records.jsonl, line 1: no JSON" in capsys.readouterr().err
    assert "records.jsonl, line 1: no JSON" in report(lab)
    assert "| 9 | 9 | reproduced |" in report(lab)  # the others are reported


def test_report_when_claims_or_figure_fail(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name, before, after in (
        ("claimless", "    found = figure_of", "    found = records['none'] = figure_of.none"),
        ("texts", 'page 1", found', "page 1\", 'nine'"),
        ("drawless", "    from matplotlib.figure import Figure\n", "    raise ValueError('no ink')\n"),
    ):
        lab.edit(before, after, name)
    lab.edit("def claims", "def claim", "broken")
    lab.main("run", "drawless", "--sweep", "number=1,2,3")
    run_all(lab)
    capsys.readouterr()
    assert write(lab) == 1
    errors = capsys.readouterr().err
    assert "broken.py is no experiment: it has no claims" in errors
    assert "claimless: its claims cannot be computed (3 configurations have no records): AttributeError" in errors
    assert "texts: its claims cannot be computed" in errors
    assert "drawless: its figure cannot be drawn: ValueError: no ink" in errors
    assert "[the square \\| of 3](#squares)" in report(lab) and "[the square \\| of 3](#drawless)" in report(lab)


def test_notes_of_records_are_in_the_report_once(lab: Any) -> None:
    lab.edit('yield {"power"', 'yield {"note": "squares are easy", "power"')
    run_all(lab)
    write(lab)
    assert report(lab).count("- squares are easy\n") == 1


def test_report_again_is_the_same(lab: Any) -> None:
    run_all(lab)
    contents = []
    for _ in range(2):
        write(lab)
        contents.append({path.name: path.read_bytes() for path in lab.results.rglob("*") if path.is_file()})
    assert contents[0] == contents[1]
    assert contents[0].keys() == {"REPORT.md", "records.json.gz", "squares.png", "squares.svg", "squares-dark.png"}
    records = json.loads(gzip.decompress(contents[0]["records.json.gz"]))["squares"]
    assert [values["number"] for values, _ in records] == [1, 2, 3] and records[2][1][1]["result"] == 9.0


def test_title_that_html_would_not_take(lab: Any) -> None:
    lab.edit('"""Squares of numbers', '"""Squares "of" <numbers')
    run_all(lab)
    write(lab)
    assert 'alt="Squares &quot;of&quot; &lt;numbers: what they are."' in report(lab)


def test_folder_that_cannot_be_written(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lab.results.write_text("a file")
    assert write(lab) == 1
    assert f"the report cannot be written into {lab.results} (" in capsys.readouterr().err
    assert lab.results.read_text() == "a file"


def test_report_that_cannot_be_finished_leaves_the_old_one(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all(lab)
    write(lab)
    before = report(lab)
    (lab.store_path / "squares" / lab.task(number=3).hash / "records.jsonl").write_text('{"power": 2}\n' * 2)
    write_bytes = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write_bytes(path, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert write(lab) == 1
    assert report(lab) == before
    assert sorted(path.name for path in lab.results.rglob(".*")) == []


def test_reproduce(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """All CPU sets and the report, though one file is broken; with a name, only that."""
    lab.write("broken", "class Config: (\n")
    lab.edit("def claims", 'TIMED = ["result"]\ndef claims', "timed")
    args = ("--results", str(lab.results), "--jobs", "2")
    assert lab.main("reproduce", *args) == 1
    output = capsys.readouterr()
    assert "6 run\n" in output.out and "broken.py cannot be loaded: SyntaxError" in output.err
    assert "## squares" in report(lab) and "## timed" in report(lab)
    assert {run.path.parent.name for run in lab.store.runs()} == {"squares", "timed"}
    assert lab.main("reproduce", "--only", "squares", "--only", "squares", *args) == 0
    output = capsys.readouterr()
    assert "0 run, 3 were finished already" in output.out
    assert report(lab).count("## squares") == 1 and "## timed" not in report(lab)
    before = report(lab)
    assert lab.main("reproduce", "--only", "timed", "--jobs", "1") == 0  # a part takes nobody's place unasked
    assert "REPORT.md" not in capsys.readouterr().out and report(lab) == before


def test_a_part_does_not_overwrite_the_report(lab: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(cli, "RESULTS", lab.results)
    lab.results.mkdir()
    (lab.results / "REPORT.md").write_text("whole")
    lab.sweep(lab.task(number=1))
    assert lab.main("report") == 1
    assert "has no records of 2 of the 3 configurations that the report is of" in capsys.readouterr().err
    assert report(lab) == "whole"
    lab.sweep(lab.task(number=2), lab.task(number=3))
    assert lab.main("report") == 0 and "## squares" in report(lab)


def test_reproduce_of_an_unknown_name_runs_nothing(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.main("reproduce", "--only", "squares", "--only", "square", "--results", str(lab.results)) == 2
    assert "no experiment 'square' (did you mean 'squares'?)" in capsys.readouterr().err
    assert not lab.store_path.exists() and not lab.results.exists()


def test_section_has_the_runs_of_its_cpu_set_only(lab: Any) -> None:
    """Sweeps of users are in the same store, and change no claim."""
    run_all(lab)
    lab.sweep(lab.task(number=3, factor=2.0), lab.task(number=3, seed=1))
    section = Section.of(lab.squares, lab.store)
    assert [manifest["configuration"]["number"] for manifest in section.runs] == [1, 2, 3]
    assert not section.missing and not section.problems
    assert json.loads(json.dumps([claim.ours for claim in section.claims])) == [9.0, 9.0]
