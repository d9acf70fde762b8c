"""The experiments themselves: that they run, and that what the report says follows from records."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.frame.claims import NEEDS_ACCELERATOR, NO_RECORDS
from experiments.frame.experiment import OWN_FOLDER, Experiment, find_all, find_experiment
from experiments.frame.frames import to_frame
from experiments.frame.tasks import Task, execute
from experiments.frame.values import keys_of

RESULTS = OWN_FOLDER / "results"
NAMES = (
    "attention_io",
    "batch_size",
    "batched_requests",
    "batching_x_paging",
    "block_size",
    "chatbot",
    "chunk_size",
    "determinism",
    "kernel_overhead",
    "memory_waste",
    "parallel_and_beam",
    "preemption_policy",
    "prefix_caching",
    "shared_prefix",
    "sharing_saving",
    "swap_vs_recompute",
    "throughput_vs_rate",
    "watermark",
    "worked_example",
)
FEW = {"duration": 20.0, "lengths": "statistics"}
SMALL: dict[str, dict[str, Any]] = {
    "batch_size": FEW,
    "batched_requests": {**FEW, "warmup": 10.0},
    "batching_x_paging": FEW,
    "chatbot": FEW,
    "chunk_size": FEW,
    "memory_waste": FEW,
    "parallel_and_beam": {**FEW, "decoding": "beam", "size": 2, "duration": 4.0},
    "preemption_policy": FEW,
    "shared_prefix": {**FEW, "reuse_shared": True, "duration": 5.0},
    "sharing_saving": FEW,
    "swap_vs_recompute": {**FEW, "part": "serving", "block_size": 1},
    "throughput_vs_rate": FEW,
    "watermark": FEW,
}


@pytest.fixture(autouse=True)
def no_other_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDJAX_EXPERIMENTS", raising=False)
    monkeypatch.delenv("PAGEDJAX_DATA", raising=False)


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Any]]:
    """The records that the committed report was made of."""
    return json.loads(gzip.decompress((RESULTS / "records.json.gz").read_bytes()))


def claims_of(experiment: Experiment, records: list[Any]) -> list[Any]:
    return experiment.claims(to_frame(records, keys_of(experiment.config_class)))


def test_all_files_are_sound() -> None:
    found, wrong = find_all()
    assert not wrong and {each.name for each in found} >= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_claims_without_records_say_so(name: str) -> None:
    claims = claims_of(find_experiment(name), [])
    assert claims and {claim.verdict for claim in claims} <= {NO_RECORDS, NEEDS_ACCELERATOR}
    assert all(claim.figure == "-" for claim in claims if claim.verdict == NO_RECORDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_record_that_changes_changes_a_verdict(name: str, recorded: dict[str, list[Any]]) -> None:
    """Every claim is computed: none stays as it is whatever becomes of the records."""
    experiment = find_experiment(name)
    before = {claim.text: claim for claim in claims_of(experiment, recorded[name])}
    assert not [text for text, claim in before.items() if claim.verdict == NO_RECORDS]
    assert len(before) == len(claims_of(experiment, recorded[name]))  # no two of one text
    moved: set[str] = set()
    for records in changed(recorded[name]):
        try:
            after = claims_of(experiment, records)
        except (ValueError, ZeroDivisionError, KeyError):
            continue  # a text where a number was, two records where one was: not what is asked here
        moved |= {claim.text for claim in after if claim.ours != before[claim.text].ours}
    assert moved == before.keys()


def changed(records: list[Any]) -> Iterator[list[Any]]:
    """The records with other figures: each column for itself, in all configurations or in some."""
    columns = {column for _, rows in records for row in rows for column in row}
    for column in sorted(columns):
        for first, step in ((0, 1), (0, 2), (1, 2), (1, 3)):
            other = copy.deepcopy(records)
            for _, rows in other[first::step]:
                for row in rows:
                    if column in row:
                        row[column] = altered(row[column])
            yield other


def altered(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 10 * value + 1
    return f"{value}!" if isinstance(value, str) else value


def test_the_report_is_what_its_records_say(recorded: dict[str, list[Any]]) -> None:
    """Not one figure of the committed table was typed in, or is of other records than those beside it."""
    lines = (RESULTS / "REPORT.md").read_text().splitlines()
    for name in NAMES:
        for claim in claims_of(find_experiment(name), recorded[name]):
            label = claim.text.replace("|", "\\|")
            (row, *_) = [line for line in lines if line.startswith(f"| [{label}](#{name})")]
            cells = [cell.strip() for cell in row.replace("\\|", "¦").strip("|").split("|")]
            assert cells[4].rstrip("†") == claim.figure and cells[6].strip("*") == claim.verdict


def test_the_report_has_its_figures() -> None:
    for name in NAMES:
        for ending in (".png", ".svg", "-dark.png"):
            file = RESULTS / "figures" / f"{name}{ending}"
            assert 1000 < file.stat().st_size < 1_000_000


@pytest.mark.parametrize("name", SMALL)
def test_experiments_run(name: str) -> None:
    """At a small scale, the figure included; the same records again."""
    experiment = find_experiment(name)
    config = experiment.config_class(**SMALL[name])
    outcomes = [execute(Task.of(experiment, config)) for _ in range(2)]
    manifest = outcomes[0].manifest
    assert manifest["status"] == "finished" and "figure_error" not in manifest, manifest
    assert outcomes[0].lines == outcomes[1].lines and outcomes[0].lines
    assert outcomes[0].files["figure.png"] == outcomes[1].files["figure.png"]


@pytest.mark.parametrize(
    ("name", "values", "error"),
    [
        ("memory_waste", {"system": "vlm"}, r"one of vllm, .*\(did you mean 'vllm'\?\)"),
        ("memory_waste", {"model": "opt-13"}, r"did you mean 'opt-13b'"),
        ("watermark", {"workload": "sharegtp"}, r"did you mean 'sharegpt'"),
        ("watermark", {"watermark": 2.0}, "from 0 to less than 1"),
        ("watermark", {"rate": -1.0}, "above 0 and at most"),
        ("chatbot", {"duration": 0.0}, "above 0 and at most"),
        ("batched_requests", {"seed": -1}, "an integer from 0"),
        ("throughput_vs_rate", {"lengths": "foo"}, "one of real, statistics"),
        ("prefix_caching", {"cache_tokens": 0}, "at least the 16 of a block"),
        ("parallel_and_beam", {"size": 0}, "an integer of at least 1"),
        ("swap_vs_recompute", {"copy_seconds": -1.0}, "from 0 to 1 second"),
        ("block_size", {"block_size": 3}, "a power of two"),
        ("memory_waste", {"num_blocks": 1, "where": "engine"}, "None with where='engine', where it is not used"),
        ("sharing_saving", {"rate": 1.0, "where": "engine"}, "None with where='engine', where it is not used"),
    ],
)
def test_a_wrong_value_is_named_before_anything_runs(name: str, values: dict[str, Any], error: str) -> None:
    from pagedjax.errors import ConfigError

    key = next(iter(values))
    with pytest.raises(ConfigError, match=f"^{key}=.* is not allowed: {key} must be .*{error}"):
        find_experiment(name).config_class(**values)


def test_swapping_moves_the_blocks_of_256_tokens() -> None:
    experiment = find_experiment("swap_vs_recompute")
    for size in (1, 16, 256):
        (row,) = experiment.run(experiment.config_class(part="micro", block_size=size))
        assert row["copies"] == 256 // size * 80
        least, bytes_ms = row["copies"] * 3e-3, 256 * 819_200 / 32e9 * 1e3
        assert row["swap_ms"] == pytest.approx(2 * max(least, bytes_ms))


def test_the_engine_serves_scaled_requests() -> None:
    """The same tokens from two allocators; lengths are the workload's, so many times shorter."""
    from experiments.frame.engine import serve

    how: dict[str, Any] = {"workload": "alpaca", "lengths_from": "statistics", "num_requests": 3, "shrink": 8}
    rows = [serve(**how, allocator=allocator) for allocator in ("paged", "orca-oracle")]
    assert rows[0]["tokens_sha256"] == rows[1]["tokens_sha256"]
    assert rows[0]["requests"] == 3 and rows[0]["failed_requests"] == 0 and rows[0]["output_tokens"] > 3
    assert rows[0]["reserved"] == 0 < rows[1]["reserved"]
    assert rows[0]["lengths_are_statistics"] and "lengths of alpaca divided by 8" in rows[0]["note"]


def test_conversations_stand_in_for_the_trace() -> None:
    """Rounds of one conversation begin alike; what was said before and a message make a prompt."""
    import importlib

    module = importlib.import_module("experiments.prefix_caching")
    rows = module._conversations(module.Config(lengths="statistics"))
    assert rows == module._conversations(module.Config(lengths="statistics")) and len(rows) > 1000
    by_conversation: dict[int, list[Any]] = {}
    for row in rows:
        by_conversation.setdefault(row["hash_ids"][0] // 1000, []).append(row)
    for rounds in by_conversation.values():
        for one, other in zip(rounds, rounds[1:], strict=False):
            assert other["input_length"] > one["input_length"] + 32 * one["output_length"]
            assert other["hash_ids"][: len(one["hash_ids"])] == one["hash_ids"]


def test_lengths_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from experiments.frame.systems import simulation
    from pagedjax.errors import ConfigError

    refusal = "lengths='real' is not allowed: lengths must be statistics where PAGEDJAX_"
    with pytest.raises(ConfigError, match=refusal), simulation("vllm", lengths_from="real"):
        pass
    (tmp_path / "alpaca_lengths.csv.gz").write_bytes(gzip.compress(b"prompt_tokens,output_tokens\n3,4\n"))
    monkeypatch.setenv("PAGEDJAX_DATA", str(tmp_path))
    for kind, statistics in (("real", False), ("statistics", True)):
        with simulation("vllm", lengths_from=kind, workload="alpaca") as made:
            assert made.trace.is_statistics is statistics
    # That folder has no such file.
    absent = "lengths='real' is not allowed: lengths must be statistics for sharegpt"
    with pytest.raises(ConfigError, match=absent), simulation("vllm", lengths_from="real"):
        pass
    with pytest.raises(ConfigError, match=r"did you mean 'orca-max'\?"), simulation("orca-mx", lengths_from="real"):
        pass
