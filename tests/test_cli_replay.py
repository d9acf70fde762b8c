"""`pagedjax replay`: a table, an exit status, and one sentence on what differs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from log_harness import read, record, rewrite

from pagedjax.cli import main


@pytest.fixture
def log(tmp_path):
    record(tmp_path / "log", 3)
    return tmp_path / "log"


def test_a_log_that_replays_alike(log, capsys):
    assert main(["replay", str(log)]) == 0
    out, err = capsys.readouterr()
    table = dict(line.split() for line in out.splitlines())
    num_plans = sum(event["event"] == "plan" for event in read(log))
    assert table["runs"] == "1"
    assert table["plans"] == table["same_plans"] == str(num_plans)
    assert (table["first_difference"], table["last_line_torn"]) == ("-", "False")
    assert err == ""


def test_a_log_that_does_not(log, capsys):
    events = read(log)
    changed = [event for event in events if event["event"] == "plan"][4]
    changed["plan"]["num_tokens"] = 1000
    assert main(["replay", str(rewrite(log, events)), "--json", str(log.parent / "row.json")]) == 1
    out, err = capsys.readouterr()
    where = f"line {events.index(changed) + 1}, step 4: plan.num_tokens is 1000 in the log, but "
    assert err.startswith(f"pagedjax: the replay differs at {where}") and err.count("\n") == 1
    (row,) = json.loads((log.parent / "row.json").read_text())
    assert row["first_difference"].startswith(where)
    assert row["same_plans"] == 4
    assert row["first_difference"] in out


def test_a_torn_last_line_is_told_and_no_difference(log, capsys):
    log.write_bytes(log.read_bytes()[:-5])
    assert main(["replay", str(log)]) == 0
    assert dict(line.split() for line in capsys.readouterr().out.splitlines())["last_line_torn"] == "True"


def test_the_trace_is_written_beside(log, capsys):
    trace = log.parent / "trace.json"
    assert main(["replay", str(log), "--trace", str(trace), "--check-invariants"]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"waiting", "prefill", "decode", "blocks"} <= {event["name"] for event in events}


def test_metrics_and_records_are_those_of_a_simulation(log, capsys):
    path = log.parent / "records.jsonl"
    assert main(["replay", str(log), "--metrics", "--records", str(path), "--json", str(log.parent / "row.json")]) == 0
    (row,) = json.loads((log.parent / "row.json").read_text())
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record for record in records if record["record"] == "step"]
    ended = [record for record in records if record["record"] == "request"]
    results = [event for event in read(log) if event["event"] == "result"]
    assert len(steps) == len(results) > 10 and len(ended) == row["requests"] > 3
    split = ("token_states", "reserved", "internal_fragmentation", "external_fragmentation", "free")
    assert sum(row[name] for name in split) == pytest.approx(1.0)
    assert row["mean_batched_requests"] == pytest.approx(sum(step["num_running"] for step in steps) / len(steps))
    plans = [event["plan"] for event in read(log) if event["event"] == "plan"]
    moved = sum(len(plan.get(moves, ())) for plan in plans for moves in ("swap_outs", "swap_ins"))
    assert row["swapped_blocks"] == moved > row["swapped_out_blocks"] > 0


def test_metrics_are_those_of_the_latest_run(log, capsys):
    def metrics(path):
        main(["replay", str(path), "--metrics", "--json", str(log.parent / "row.json")])
        (row,) = json.loads((log.parent / "row.json").read_text())
        return [row[name] for name in ("seconds", "output_tokens_per_s", "mean_batched_requests", "token_states")]

    record(log.parent / "other", 4)
    both = log.parent / "both"
    both.write_bytes(log.read_bytes() + (log.parent / "other").read_bytes())
    assert metrics(both) == metrics(log.parent / "other") != metrics(log)


@pytest.mark.parametrize("flag", ["--trace", "--json", "--records"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(log, capsys, flag):
    with pytest.raises(SystemExit) as stopped:
        main(["replay", str(log), flag, str(log.parent)])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "(Is a directory)" in err


@pytest.mark.parametrize("flag", ["--trace", "--json", "--records"])
def test_the_log_is_not_overwritten(log, capsys, flag):
    before = log.read_bytes()
    assert main(["replay", str(log), flag, str(log.parent / "." / "log")]) == 1
    assert capsys.readouterr().err.endswith("log is the log itself, which would be lost: give another file\n")
    assert log.read_bytes() == before


def test_what_is_no_log_is_one_sentence(log, capsys):
    log.write_text("hello\n")
    assert main(["replay", str(log)]) == 1
    told = f"pagedjax: {log} is no log of events: its first line does not start one\n"
    assert capsys.readouterr() == ("", told)


def test_it_needs_neither_jax_nor_numpy(log):
    program = (
        "import sys\n"
        "from pagedjax.cli import main\n"
        "status = main(['replay', sys.argv[1]])\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(status, sorted(loaded & {'jax', 'jaxlib', 'numpy', 'flax'}))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(log)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
