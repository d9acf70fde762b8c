"""The statistics of lengths that pagedjax ships, and when they stand in for the real files."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from bisect import bisect_right
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest

from pagedjax.errors import ConfigError
from pagedjax.sim.traces import TraceRow, open_trace, workload_names
from pagedjax.sim.traces.statistics import Axis, LengthStatistics, coarse_edges, fine_edges, load_statistics
from pagedjax.sim.traces.workloads import FILES

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "pagedjax" / "sim" / "data" / "lengths"
NUM_DRAWS = 40_000


@pytest.fixture
def real_data() -> Path:
    """The folder of the real files."""
    folder = Path(os.environ.get("PAGEDJAX_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / FILES["sharegpt"][0]).is_file():
        pytest.skip(f"{folder} does not hold the real files, which are not in the repository (see PAGEDJAX_DATA)")
    return folder


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.delenv("PAGEDJAX_DATA", raising=False)


def rows_of(statistics: LengthStatistics, number: int = NUM_DRAWS, seed: int = 0) -> list[TraceRow]:
    return list(islice(statistics.draw(seed), number))


def small(**changes) -> LengthStatistics:
    data = {
        "title": "three lengths",
        "max_total": None,
        "provenance": {},
        "errors": [],
        "prompt_counts": [0, 30, 10],
        "output_counts": [20, 0, 0, 20],
        "cells": [[], [20, 0, 0, 10], [0, 0, 0, 10]],
    }
    return LengthStatistics(data | changes)


def test_bins_are_exact_and_then_grow():
    fine = fine_edges(1000)
    assert fine[:202] == [*range(1, 201), 202, 204]
    assert all(1 < high / low < 1.0101 for low, high in pairwise(fine[99:]))
    coarse = coarse_edges(fine)
    assert coarse[:18] == [*range(1, 17), 18, 20] and set(coarse) <= set(fine) and coarse[-1] == fine[-1]
    assert all(high - low >= low // 8 and high / low < 1.15 for low, high in pairwise(coarse[7:-1]))


def test_the_values_of_a_bin_lie_in_it_at_equal_distances():
    counts = [0] * 250 + [1, 2, 3, 0]
    fine, axis = fine_edges(len(counts)), Axis(counts)
    assert fine[250:254] == [303, 306, 309, 312]
    assert list(axis.values) == [304, 306, 308, 309, 310, 311]
    assert sum(number for _, number in axis.spans) == 6


def test_each_pair_is_drawn_as_often_as_it_was_found():
    rows = rows_of(small())
    shares = {pair: sum(row[:2] == pair for row in rows) / NUM_DRAWS for pair in {row[:2] for row in rows}}
    assert shares == pytest.approx({(2, 1): 0.5, (2, 4): 0.25, (3, 4): 0.25}, abs=0.01)
    assert {row[2:] for row in rows} == {(None, ())}


def test_nothing_is_drawn_beyond_the_limit_but_each_cell_keeps_its_share():
    counts = [1] + [0] * 100 + [1] * 12  # of 1 and of 102 to 113, which a coarse bin holds together
    others = [0] * (len(Axis(counts).spans) - 2)
    cells = [[1], *[[]] * len(others), [0, *others, 12]]
    rows = rows_of(small(max_total=208, prompt_counts=counts, output_counts=counts, cells=cells))
    assert {row.prompt_len for row in rows} == {1, *range(102, 107)} and max(sum(row[:2]) for row in rows) == 208
    assert sum(row[:2] == (1, 1) for row in rows) / NUM_DRAWS == pytest.approx(1 / 13, abs=0.005)


@pytest.mark.parametrize("name", workload_names())
def test_shipped_statistics_say_where_they_come_from_and_add_up(name):
    statistics, text = load_statistics(name), (SHIPPED / f"{name}.json").read_text()
    source = statistics.provenance
    assert source["file"] == FILES[name][0] and source["filter"] and source["rows"] == statistics.num_rows > 1000
    assert {"dataset", "source", "licence"} <= source["notes of the file"].keys()
    assert len(text) < 40_000
    for axis, counts in ((statistics.prompts, "prompt_counts"), (statistics.outputs, "output_counts")):
        assert len(axis.values) == sum(json.loads(text)[counts]) == statistics.num_rows
    width = max(map(len, statistics.cells))
    padded = [[*row, *[0] * (width - len(row))] for row in statistics.cells]
    assert [sum(row) for row in padded] == [number for _, number in statistics.prompts.spans]
    assert [sum(column) for column in zip(*padded, strict=True)] == [number for _, number in statistics.outputs.spans]


def test_all_shipped_statistics_are_of_known_workloads_and_small():
    shipped = list(SHIPPED.iterdir())
    assert {path.stem for path in shipped} == set(workload_names())
    assert sum(path.stat().st_size for path in shipped) < 200_000


@pytest.mark.parametrize("name", workload_names())
def test_what_is_drawn_is_as_far_off_as_it_says(name):
    statistics = load_statistics(name)
    rows = rows_of(statistics)
    lengths = {"prompt": sorted(row.prompt_len for row in rows), "output": sorted(row.output_len for row in rows)}
    told = [error for error in statistics.errors if error["length"] in lengths]
    assert len(told) == 16
    for error in told:
        of, kind, real, here = error.values()
        assert here == pytest.approx(real, rel=0.005 if kind == "mean" else 0.02)
        values = lengths[of]
        if kind == "mean":
            assert abs(mean(values) - here) < 4 * stdev(values) / NUM_DRAWS**0.5
        else:
            part, spread = float(kind[1:]) / 100, 0.01
            low, high = (bisect_right(values, length) / NUM_DRAWS for length in (here - 1, here))
            assert low - spread < part < high + spread
    limit = statistics.max_total
    assert limit is None or max(sum(row[:2]) for row in rows) <= limit
    assert statistics.mean_error < 0.1


def test_the_same_seed_draws_the_same():
    statistics = load_statistics("sharegpt")
    assert rows_of(statistics, 100, 1) == rows_of(statistics, 100, 1) != rows_of(statistics, 100, 2)


def test_statistics_stand_in_and_say_so(no_data):
    assert workload_names()[:3] == ("sharegpt", "sharegpt-v3", "alpaca")
    for name in workload_names():
        trace = open_trace(name)
        assert trace.name == name and trace.is_statistics
        assert not trace.has_times and trace.block_tokens == 0
        assert list(islice(trace.rows(3), 9)) == rows_of(load_statistics(name), 9, 3)
        assert trace.problems.total == 0 and trace.description.startswith(
            "statistics that pagedjax ships stand in for the real lengths (PAGEDJAX_DATA is not set): joint histogram "
        )
    assert open_trace("sharegpt").description.endswith(
        "joint histogram of 79,725 rows of ShareGPT's first rounds as the paper's artifact has them, if shorter than "
        "2,048 tokens, means off by at most 0.07 %"
    )
    for argument in ({"format": "azure"}, {"tokenizer": "x"}):
        with pytest.raises(
            ConfigError, match=r"must be None where statistics stand in for a file \(PAGEDJAX_DATA is not"
        ):
            open_trace("alpaca", **argument)


def test_the_real_file_is_taken_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDJAX_DATA", str(tmp_path))
    assert "(the folder of PAGEDJAX_DATA has no sharegpt_paper_lengths.csv.gz)" in open_trace("sharegpt").description
    (tmp_path / "sharegpt_paper_lengths.csv.gz").write_text("# dataset: tiny\nprompt_tokens,output_tokens\n5,6\n")
    trace = open_trace("sharegpt")
    assert trace.name == "sharegpt" and not trace.is_statistics and list(trace.rows()) == [TraceRow(5, 6)]
    assert trace.description == "the real lengths of sharegpt_paper_lengths.csv.gz (tiny)"
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    trace = open_trace("azure-conv", format="azure")
    assert trace.has_times and list(trace.rows()) == [TraceRow(374, 44, 0.0)]
    monkeypatch.setenv("PAGEDJAX_DATA", "")
    assert open_trace("sharegpt").is_statistics
    monkeypatch.setenv("PAGEDJAX_DATA", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="PAGEDJAX_DATA='.*absent' is not allowed: PAGEDJAX_DATA must be a folder"):
        open_trace("sharegpt")


def test_what_is_neither_a_file_nor_a_workload_is_refused(tmp_path):
    for given in ("sharegtp", "", "a\0b", "x" * 5000, str(tmp_path / "absent.csv")):
        with pytest.raises(
            ConfigError, match="is neither a file nor a known workload, which are sharegpt, sharegpt-v3, "
        ):
            open_trace(given)
    with pytest.raises(ConfigError, match="is a folder: a trace is a file, or one of sharegpt, "):
        open_trace(tmp_path)


def test_drawing_and_reading_tables_import_neither_jax_nor_numpy(no_data):
    code = "import sys; from pagedjax.sim.traces import *; next(open_trace('arxiv').rows()); "
    code += "print({'jax', 'numpy', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_real_file_of_the_paper_is_what_the_paper_says(real_data, monkeypatch):
    monkeypatch.setenv("PAGEDJAX_DATA", str(real_data))
    trace = open_trace("sharegpt")
    rows = [row for row in trace.rows() if row.prompt_len + row.output_len < 2048]
    assert len(rows) == 79_725 and trace.problems.total == 0 and rows[0][:2] == (21, 518)
    assert mean(row.prompt_len for row in rows) == pytest.approx(161.18, abs=0.005)
    assert mean(row.output_len for row in rows) == pytest.approx(338.00, abs=0.005)


def test_the_real_files_of_production_have_arrivals_and_hashes(real_data, monkeypatch):
    monkeypatch.setenv("PAGEDJAX_DATA", str(real_data))
    azure, mooncake = open_trace("azure-conv"), open_trace("mooncake-conv")
    assert azure.has_times and azure.block_tokens == 0 and sum(1 for _ in azure.rows()) == 19_366
    rows = list(mooncake.rows())
    assert len(rows) == 12_031 and mooncake.problems.total == 0 and mooncake.block_tokens == 512
    assert rows[-1].time == pytest.approx(3600, rel=0.02)
    shared = sum(first.block_hashes[0] == second.block_hashes[0] for first, second in pairwise(rows))
    assert shared > 1000


def test_the_shipped_statistics_are_what_the_script_makes_of_the_real_files(real_data, tmp_path, monkeypatch, capsys):
    script = ROOT / "experiments" / "derive_lengths.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(real_data), "--out", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    for name in workload_names():
        assert (tmp_path / f"{name}.json").read_text() == (SHIPPED / f"{name}.json").read_text()
    assert "correlation" in capsys.readouterr().out
