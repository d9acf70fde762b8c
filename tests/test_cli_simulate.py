"""`pagedjax simulate`: a summary, its records, and one sentence for what cannot be."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagedjax.cli import main
from pagedjax.sim.config import SimulationConfig

SPLIT = ("token_states", "reserved", "internal_fragmentation", "external_fragmentation", "free")
SHORT = ["--rate", "4", "--duration", "30"]


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PAGEDJAX_DATA", raising=False)


def simulate(capsys, *flags):
    """The summary's row, the text that was printed."""
    assert main(["simulate", *flags, "--json", "row.json"]) == 0
    (row,) = json.loads(Path("row.json").read_text())
    return row, capsys.readouterr().out


def records(path="simulated.jsonl.gz"):
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt") as file:
        found = [json.loads(line) for line in file]
    return [[r for r in found if r["record"] == kind] for kind in ("step", "request")]


def test_the_summary_adds_up_and_says_what_was_simulated(capsys):
    row, out = simulate(capsys, "--model", "opt-13b", "--chip", "a100-40gb", "--allocator", "orca-pow2", *SHORT)
    assert sum(row[name] for name in SPLIT) == pytest.approx(1.0)
    assert row["mean_batched_requests"] > 1 and row["normalized_latency_s"] > 0 and row["preemptions"] == 0
    assert (row["chips"], row["num_blocks"], row["rate"]) == ("1 x a100-40gb", 983, 4.0)
    assert row["configuration"]["allocator"] == "orca-pow2" and row["configuration"]["seed"] == 0
    assert row["configuration"]["scheduler"]["max_num_batched_tokens"] == 2560
    assert row["provenance"]["seeds"] == {"simulation": 0} and "knee_rate" not in row
    assert out.startswith("lengths: statistics that pagedjax ships stand in for the real lengths (PAGEDJAX_DATA is not")
    assert row["lengths_are_statistics"] is True and "mean_batched_requests" in out
    steps, requests = records()
    assert len(requests) == row["requests"] and all(r["finish_reason"] == "length" for r in requests)
    assert steps[0]["num_tokens"] > 0 and steps[-1]["end"] == pytest.approx(row["seconds"])
    latencies = [r["normalized_latency_s"] for r in requests]
    assert sum(latencies) / len(latencies) == pytest.approx(row["normalized_latency_s"])
    late = [s for s in steps if 10 <= s["end"] <= 30]
    assert sum(s["num_running"] for s in late) / len(late) == pytest.approx(row["mean_batched_requests"])


def test_the_same_seed_gives_the_same_row_and_another_another(capsys):
    def row(*flags):
        found = simulate(capsys, *SHORT, "--no-records", *flags)[0]
        return {name: value for name, value in found.items() if name not in ("configuration", "provenance")}

    assert row() == row("--seed", "0") != row("--seed", "1")


def test_a_knee_is_found_and_is_what_is_summarized(capsys):
    row, _ = simulate(capsys, "--find-knee", "0.1", "--duration", "40", "--no-records", "--arrivals", "poisson")
    assert row["rate"] == row["knee_rate"] > 0.2 and row["normalized_latency_s"] <= 0.1
    above = simulate(capsys, "--rate", str(1.05 * row["knee_rate"]), "--duration", "40", "--arrivals", "poisson")[0]
    assert above["normalized_latency_s"] > 0.1


def test_every_system_runs_every_batching(capsys):
    # Static batches and contiguous memory each cost batched requests.
    batched = {}
    for allocator in ("paged", "orca-max"):
        for batching in ("continuous", "static"):
            flags = ["--allocator", allocator, "--batching", batching, "--max-num-seqs", "24", "--no-records"]
            row, _ = simulate(capsys, *SHORT, *flags)
            batched[allocator, batching] = row["output_tokens_per_s"]
    best = max(batched.values())
    assert batched["paged", "continuous"] == best and batched["orca-max", "static"] == min(batched.values())


def test_samples_and_beams_share(capsys):
    samples, _ = simulate(capsys, *SHORT, "--n", "4", "--workload", "alpaca", "--no-records")
    beams, _ = simulate(capsys, *SHORT, "--beam-width", "4", "--workload", "alpaca", "--no-records")
    assert 0.02 < samples["sharing_saving"] < 0.3 < beams["sharing_saving"] < 0.8


def test_a_trace_of_ones_own_comes_as_it_came_and_what_is_wrong_is_said(capsys, tmp_path):
    (tmp_path / "mine.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens\n0,10,5\n3,20,5\n2,30,5\n4,-7,5\n5,2040,10\n6,x,1\n7,50,5\n"
    )
    row, out = simulate(capsys, "--workload", "mine.csv", "--arrivals", "trace", "--records", "r.jsonl")
    assert row["requests"] == 4 and row["rate"] is None and row["lengths_are_statistics"] is False
    _, requests = records("r.jsonl")
    assert sum(row[name] for name in SPLIT) == pytest.approx(1.0)  # all of it, where no duration is given
    assert [(r["arrival"], r["prompt_len"]) for r in requests] == [(0, 10), (3, 20), (3, 30), (7, 50)]
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(row["notes"]) == 4
    for part in (
        "a negative length (first: line 5)",
        "a time before that of an earlier",
        "is no number",
        "2048 tokens",
    ):
        assert part in out


def test_what_a_duration_cuts_off_is_said(capsys, tmp_path):
    (tmp_path / "mine.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n3,20,5\n30,30,5\n40,3,5\n")
    row, _ = simulate(capsys, "--workload", "mine.csv", "--arrivals", "trace", "--duration", "30")
    assert row["requests"] == 2 and row["token_states"] is row["mean_batched_requests"] is None
    assert row["notes"] == [
        "2 rows have a time at or after the 30 seconds of the duration, left out",
        "no step ended from 10 to 30 seconds, so there is nothing to average of memory and batches",
    ]


def test_who_cannot_be_served_is_said_with_the_reason(capsys):
    row, _ = simulate(capsys, *SHORT, "--n", "257")
    assert row["requests"] == 0 and row["normalized_latency_s"] is None
    number = row["notes"][0].split()[0]
    assert row["notes"] == [
        f"{number} requests can never run (first: request '0' has n=257, but max_num_seqs=256 allows no more sequences "
        "at the same time), left out",
        "no request came",
    ]
    row, _ = simulate(capsys, *SHORT, "--n", "8", "--allocator", "orca-max")
    assert row["requests"] == row["failed_requests"] == int(number) and row["normalized_latency_s"] is None
    assert row["notes"][0].startswith(f"{number} requests failed (first: request '0': needs room for ")
    assert row["notes"][0].endswith("but the whole pool holds 15728 (983 blocks of 16 tokens))")


def test_a_short_file_is_repeated_and_said_so(capsys, tmp_path):
    (tmp_path / "mine.csv").write_text("prompt_tokens,output_tokens\n10,5\n20,5\n")
    row, out = simulate(capsys, "--workload", "mine.csv", *SHORT)
    assert row["requests"] > 100
    assert f"note: {row['requests'] - 2:,} rows come again: the workload has no more" in out


@pytest.fixture
def step_times(tmp_path):
    """A file of `bench --step-times`: steps of one token take 20 ms, others 50."""
    times = {"model": "smollm2-135m", "token_sizes": [1, 64], "token_seconds": [0.02, 0.05], "num_steps": 9}
    times |= dict.fromkeys(("seconds_per_seq", "seconds_per_context_token"), 0.0)
    times |= dict.fromkeys(("seconds_per_copied_block", "seconds_per_swapped_block"), 0.0)
    times["engine"] = {"block_size": 8, "num_blocks": 500, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    times["engine"] |= {"max_model_len": 1024, "enable_chunked_prefill": True, "overlap": True}
    (tmp_path / "steps.json").write_text(json.dumps([{"step_times": times}]))
    return ["--model", "smollm2-135m", "--cost-model", "steps.json"]


def test_measured_step_times_bring_their_engine_along(capsys, step_times):
    row, _ = simulate(capsys, "--rate", "1", "--duration", "20", *step_times, "--records", "r.jsonl")
    steps, _ = records("r.jsonl")
    took = {(s["num_tokens"] > 1, round(s["end"] - s["start"], 6)) for s in steps}
    assert took == {(False, 0.02), (True, 0.05)} and row["chips"] == "measured: steps.json"
    assert (row["num_blocks"], row["configuration"]["cache"]["block_size"]) == (500, 8)
    scheduler = row["configuration"]["scheduler"]
    assert (scheduler["max_num_seqs"], scheduler["max_model_len"], scheduler["enable_chunked_prefill"]) == (
        4,
        1024,
        True,
    )
    other, _ = simulate(capsys, "--rate", "1", "--duration", "20", *step_times, "--num-blocks", "300", "--no-overlap")
    assert other["num_blocks"] == 300 and other["normalized_latency_s"] != row["normalized_latency_s"]


def test_more_tokens_than_were_measured_are_refused_and_free_swaps_said(capsys, step_times):
    assert main(["simulate", "--rate", "1", *step_times, "--max-num-batched-tokens", "65"]) == 1
    message = "max_num_batched_tokens=65 is not allowed: max_num_batched_tokens must be at most 64, of which step times"
    assert message in capsys.readouterr().err
    pressed = ["--num-blocks", "140", "--preemption", "swap", "--swap-space", "1000000000", "--rate", "4"]
    row, _ = simulate(capsys, *step_times, *pressed, "--duration", "30")
    assert row["swapped_blocks"] > 0 and "swapping took no time: none was measured" in row["notes"]


def test_no_file_is_lost(capsys, tmp_path):
    (tmp_path / "mine.csv").write_text("prompt_tokens,output_tokens\n10,5\n")
    for flags, message in (
        (["--records", "mine.csv"], "--records and --workload are the same file"),
        (["--json", "./mine.csv"], "--json and --workload are the same file"),
        (["--records", "a", "--json", "a"], "--records and --json are the same file"),
    ):
        assert main(["simulate", "--workload", "mine.csv", *SHORT, *flags]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "simulated.jsonl.gz").write_text("precious")
    (tmp_path / "bad.csv").write_text("prompt_tokens,output_tokens\n-10,5\n")
    assert main(["simulate", "--workload", "bad.csv", *SHORT]) == 1
    assert (tmp_path / "simulated.jsonl.gz").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.csv", "mine.csv", "simulated.jsonl.gz"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gpt-5"], "model='gpt-5' is not allowed: model must be one of opt-13b, "),
        (["--chip", "tpu"], "chip='tpu' is not allowed: chip must be one of a100-40gb, "),
        (["--workload", "sharegtp"], "'sharegtp' is neither a file nor a known workload, which are sharegpt, "),
        (["--allocator", "buddy"], "allocator='buddy' is not allowed: allocator must be one of paged, orca-max, "),
        (["--arrivals", "uniform"], "arrivals='uniform' is not allowed: arrivals must be one of paper, poisson, "),
        (["--model", "opt-175b", "--chip", "a100-80gb", "--num-chips", "4"], "opt-175b does not fit 4 x a100-80gb"),
        (["--rate", "0"], "rate=0.0 is not allowed: rate must be above 0 and at most 1,000,000 requests a second"),
        (["--rate", "-1"], "rate=-1.0 is not allowed"),
        (["--rate", "nan"], "rate=nan is not allowed"),
        (["--duration", "0"], "duration=0.0 is not allowed: duration must be None, or above 0 and at most "),
        (
            ["--warmup", "900"],
            "warmup=900.0 is not allowed: warmup must be None, or from 0 to less than the 900 seconds",
        ),
        (["--find-knee", "0"], "find_knee=0.0 is not allowed"),
        (["--find-knee", "1e-6", "--duration", "9"], "requests are not served fast enough at 0.07"),
        (["--arrivals", "trace"], "arrivals='trace' is not allowed: arrivals must be paper or one of poisson, "),
        (["--arrivals", "trace", "--rate", "3"], "rate=3.0 is not allowed: rate must be None with arrivals"),
        (["--max-model-len", "4096"], "max_model_len=4096 is not allowed: max_model_len must be at most 2048"),
        (["--cost-model", "none.json"], "cost_model='none.json' cannot be read"),
        (["--rate", "1e9"], "rate=1000000000.0 is not allowed"),
        (["--rate", "1e5"], "rate must be at most 5555.56 a second for 900 seconds of arrivals="),
        (["--find-knee", "inf"], "find_knee=inf is not allowed: find_knee must be a finite number"),
        (["--find-knee", "0.5", "--num-blocks", "2", "--duration", "20"], "a request can never run: request '0' has"),
        (["--block-size", "0"], "block_size=0 is not allowed: block_size must be None or an integer from 1 to"),
        (["--block-size", "24"], "block_size=24 is not allowed: block_size must be None or a power of two"),
        (["--block-size", "1048576"], "block_size must be at most the 15,728 tokens that the memory for the KV cache"),
        (["--seed", "4294967296"], "seed=4294967296 is not allowed: seed must be an integer from 0 to 4,294,967,295"),
        (["--num-blocks", "99999999999999999999"], "num_blocks must be None or an integer from 1 to 10,000,000"),
        (["--n", "0"], "n=0 is not allowed: n must be an integer from 1 to 1,000,000"),
        (["--max-model-len", "2"], "no row of the workload can be served: 200,000 have more than 1 tokens"),
    ],
)
def test_what_cannot_be_is_one_sentence(capsys, flags, message):
    flags = flags if "--rate" in flags or "--find-knee" in flags or "trace" in flags else [*flags, "--rate", "1"]
    assert main(["simulate", *flags]) == 1
    err = capsys.readouterr().err
    assert err.startswith("pagedjax: ") and message in err and err.count("\n") == 1


def test_it_needs_no_jax():
    # With JAX loaded, its callbacks in Python's garbage collection would swallow a Ctrl-C now and then.
    program = (
        "import sys\n"
        "from pagedjax.cli import main\n"
        "status = main(['simulate', '--rate', '1', '--duration', '3', '--json', 'row.json'])\n"
        "print(status, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


def test_a_rate_is_asked_for(capsys):
    assert main(["simulate"]) == 1
    assert "rate=None is not allowed: rate must be given" in capsys.readouterr().err


def test_every_field_is_a_flag_with_its_meaning(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(SimulationConfig):
        assert f"--{field.name.replace('_', '-')}" in out, field.name
