"""Sweeps as users run them: processes that are killed, interrupted, or share a store."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from experiments.frame.executors import LocalExecutor
from experiments.frame.sweep import Sweep

DEADLINE = 60


def lines_of(process: subprocess.Popen[str], number: int) -> list[str]:
    """So many lines of progress."""
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(number)]


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def kill(processes: list[psutil.Process]) -> None:
    """Those that a test which fails left behind."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def wait_until(happened: Callable[[], bool]) -> None:
    for _ in range(DEADLINE * 50):
        if happened():
            return
        time.sleep(0.02)
    raise AssertionError(f"it did not happen within {DEADLINE} s")


def identities(lab: Any) -> dict[str, int]:
    """Of the folders of runs: another number if one was written anew."""
    folder = lab.store_path / "squares"
    return {path.name: path.stat().st_ino for path in folder.glob("[!.]*")}


NUMBERS = ",".join(map(str, range(14)))
MANY = ("run", "squares", "--sweep", f"number={NUMBERS}", "--sweep", "what=fine,nap", "--jobs", "2")


def test_sweep_that_is_killed_ten_times(lab: Any, tmp_path: Path) -> None:
    chance, told, kept = random.Random(7), 0, {}
    for _ in range(10):
        process = lab.start(*MANY)
        with process:
            lines = lines_of(process, chance.randrange(3))
            time.sleep(chance.uniform(0, 0.2))
            children = descendants(process)
            process.kill()
        assert process.returncode == -signal.SIGKILL and all(lines)
        told += len(lines)
        _, alive = psutil.wait_procs(children, timeout=DEADLINE)
        assert not alive  # no child outlives it
        now = identities(lab) if (lab.store_path / "squares").is_dir() else {}
        assert kept.items() <= now.items()  # what was finished is still there, and was not run again
        assert len(now) < 28
        kept = now
    assert len(kept) >= told > 0
    last = lab.shell(*MANY)
    assert last.returncode == 0, last.stderr
    assert f"{28 - len(kept)} run, {len(kept)} were finished already" in last.stdout
    assert kept.items() <= identities(lab).items()
    records = lab.records()

    lab.environment["PAGEDJAX_STORE"] = str(tmp_path / "uninterrupted")
    assert lab.shell(*MANY).returncode == 0
    compared = lab.shell("compare", str(lab.store_path), str(tmp_path / "uninterrupted"))
    assert (compared.returncode, compared.stdout) == (0, "no difference\n"), compared.stdout
    lab.store_path = tmp_path / "uninterrupted"
    assert lab.records() == records
    assert [len(found) for _, found in records.values()] == [2] * 28
    assert not list(tmp_path.glob("*/squares/.*"))  # nothing that was begun lies about


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -INT", "kill -TERM", "kill -KILL"])
def test_processes_end_with_their_parent(lab: Any, request: pytest.FixtureRequest, how: str) -> None:
    """A terminal sends its Ctrl-C to all processes."""
    args = ("run", "squares", "--sweep", "number=1,2", "--sweep", "what=fine,sleep", "--jobs", "2")
    with lab.start(*args) as process:
        assert process.stdout is not None
        lines_of(process, 2)  # the others sleep
        children = descendants(process)
        request.addfinalizer(lambda: kill(children))
        number = getattr(signal, f"SIG{how[6:]}", signal.SIGINT)
        os.killpg(process.pid, number) if how == "Ctrl-C" else process.send_signal(number)
        process.wait(DEADLINE)
        _, alive = psutil.wait_procs(children, timeout=DEADLINE)
        assert len(children) >= 2 and not alive
        output, complaint = process.communicate()
    interrupted = number == signal.SIGINT
    assert process.returncode == (130 if interrupted else -number)
    assert complaint == ("interrupted: what is finished is kept, and the same command goes on\n" if interrupted else "")
    assert "Traceback" not in output
    assert sorted(values["number"] for values, _ in lab.records().values()) == [1, 2]


def test_interrupted_while_processes_begin(lab: Any) -> None:
    with lab.start("run", "squares", "--sweep", "number=1,2", "--set", "what=sleep", "--jobs", "2") as process:
        wait_until(lambda: bool(descendants(process)))
        os.killpg(process.pid, signal.SIGINT)
        output, complaint = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert complaint.startswith("interrupted") and "Traceback" not in output + complaint


def test_failures_are_kept_and_told_and_the_sweep_goes_on(lab: Any) -> None:
    """An error, a process that is killed, one that ends."""
    sweep = ("run", "squares", "--sweep", "what=raise,die,exit,quit,undrawn,fine", "--jobs", "1")
    lab.edit('        case "exit":', '        case "quit":\n            os._exit(7)\n        case "exit":')
    done = lab.shell(*sweep, "--set", "number=4")
    assert done.returncode == 1
    assert "2 run, 4 failed" in done.stdout
    errors = {
        "raise": "RuntimeError: no square of 4 and a second line",
        "die": "its process was killed by signal 9 (out of memory?)",
        "exit": "SystemExit: 3",
        "quit": "its process ended with status 7",
    }
    traces = {}
    for run in lab.store.runs("squares"):
        what = run.values["what"]
        assert run.manifest["status"] == ("failed" if what in errors else "finished")
        assert run.manifest.get("error") == errors.get(what)
        trace = run.path / "traceback.txt"
        traces[what] = trace.read_text() if trace.exists() else None
    for what, error in errors.items():
        name = next(run.path.name for run in lab.store.runs() if run.values["what"] == what)
        assert re.search(rf"^failed: squares/{name} number=4 what={what}: {re.escape(error)}", done.stdout, re.M)
        assert f"failed: squares number=4 what={what}: {error}\n" in done.stderr
    assert "no square of 4\nand a second line" in traces["raise"] and "in run" in traces["raise"]
    # What only lacks its figure has its records, and says so.
    assert "no figure: squares number=4 what=undrawn: RuntimeError: nothing to see\n" in done.stderr
    assert "nothing to see" in traces["undrawn"]
    # Again: what failed is run again, what is finished is not.
    lab.edit('case "raise"', 'case "rise"')
    again = lab.shell("run", "squares", "--sweep", "what=raise,undrawn,fine", "--set", "number=4")
    assert again.returncode == 0
    assert "1 run, 2 were finished already (--force runs them again)" in again.stdout


def test_idle_process_that_is_killed_takes_no_task_with_it(lab: Any) -> None:
    executor = LocalExecutor(1)
    try:
        sweep = Sweep(lab.store)
        sweep.run([lab.task(number=1)], executor)
        (worker,) = executor._workers
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGKILL)
        wait_until(lambda: not worker.process.is_alive())
        sweep.run([lab.task(number=2)], executor)
    finally:
        executor.close()
    assert len(sweep.tally.run) == 2 and not sweep.tally.failed


def test_force_runs_again_what_is_finished(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    task = lab.task()
    lab.sweep(task)
    before, records = identities(lab), lab.records()
    tally, started = lab.sweep(task)
    assert not started and tally.found == [task] and identities(lab) == before
    tally, started = lab.sweep(task, force=True)
    assert started == [task] and tally.run == [task] and not tally.found
    assert identities(lab) != before and lab.records() == records


def test_an_experiment_that_changed_is_told(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lab.sweep(lab.task())
    assert lab.main("run", "squares", "--jobs", "1") == 0
    assert "another version" not in capsys.readouterr().out
    lab.edit("# most tests", "# all tests")
    assert lab.main("run", "squares", "--jobs", "1") == 0
    assert "note: 1 of those finished were made by another version of the experiment's file" in capsys.readouterr().out


def test_a_failure_takes_no_finished_place(lab: Any) -> None:
    """What was found before an experiment was broken is still there, and so is where it broke."""
    task = lab.task()
    lab.sweep(task)
    before, records = identities(lab), lab.records()
    broken = '    print("on the way", file=sys.stderr)\n    raise OSError("broken")\n    for power in (1, 2):'
    lab.edit("    for power in (1, 2):", broken)
    done = lab.shell("run", "squares", "--force")
    assert done.returncode == 1 and "OSError: broken (" in done.stdout and "on the way" not in done.stderr
    assert identities(lab) == before and lab.records() == records
    hidden = lab.store_path / "squares" / f".failed-{task.hash}"
    assert 'raise OSError("broken")' in (hidden / "traceback.txt").read_text()
    assert (hidden / "stderr.txt").read_text() == "on the way\n"


def test_running_again_gives_the_same_bytes(lab: Any) -> None:
    lab.edit(
        "    return Figure((0.1, 0.1))  # most tests are not about figures\n",
        "    from experiments.frame.plots import new_figure\n"
        "    figure, (axes,) = new_figure()\n"
        "    axes.plot(records['number'], records['result'], 'o-', label='squares')\n"
        "    axes.legend()\n"
        "    return figure\n",
    )
    files = []
    for _ in range(2):
        assert lab.shell("run", "squares", "--force").returncode == 0
        (folder,) = (lab.store_path / "squares").glob("[!.]*")
        files.append({p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"})
    assert files[0] == files[1] and len(files[0]["figure.png"]) > 1000 and b"squares" in files[0]["figure.svg"]


def test_two_processes_share_a_store(lab: Any) -> None:
    """Each configuration is run by one of them, and both wait for all."""
    args = ("run", "squares", "--sweep", f"number={','.join(map(str, range(12)))}", "--set", "what=nap", "--jobs", "1")
    log = lab.folder / "log"
    lab.edit("    match config", f"    open({str(log)!r}, 'a').write(f'{{config.number}}\\n')\n    match config")
    with lab.start(*args) as one, lab.start(*args) as other:
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0]
    assert sorted(map(int, log.read_text().split())) == list(range(12))
    run = [re.search(r"^(\d+) run, (\d+) were finished already", output, re.M) for output in outputs]
    assert all(run) and sum(int(match[1]) for match in run if match) == 12
    assert len(lab.records()) == 12


def test_progress_without_a_terminal(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lab.sweep(lab.task(number=1))
    capsys.readouterr()
    lab.sweep(*(lab.task(number=number) for number in (1, 2, 3)))
    output = capsys.readouterr()
    assert re.fullmatch(
        r"\[2/3\] squares number=2: \d\.\d s; about \d+ s left\n\[3/3\] squares number=3: \d\.\d s; about 0 s left\n",
        output.out,
    )
    assert output.err == ""


def test_progress_on_a_terminal(lab: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    lab.sweep(*(lab.task(number=number) for number in (1, 2)), lab.task(what="raise"))
    bars = terminal.getvalue().replace("\r", "\n")
    assert re.search(r"^ *33%\|.*\| 1/3 \[\d\d:\d\d<\d\d:\d\d", bars, re.M)  # with the time left
    assert re.search(r"^failed: squares what=raise: RuntimeError: no square of 1 and a second line$", bars, re.M)
    assert capsys.readouterr().out == ""


def test_profile(lab: Any) -> None:
    lab.edit(
        "    match config", "    import jax.numpy as jnp\n    jnp.ones(3).sum().block_until_ready()\n    match config"
    )
    done = lab.shell("run", "squares", "--profile", "--set", "number=3")
    assert done.returncode == 0, done.stderr
    (folder,) = (lab.store_path / "squares").glob("[!.]*")
    assert list(folder.glob("profile/plugins/profile/*/*.xplane.pb"))
    ((_, records),) = lab.records().values()
    assert [record["result"] for record in records] == [3, 9]
    (run,) = lab.store.runs("squares")
    assert run.manifest["device"]["platform"] == "cpu"


def test_nobody_reads_on(lab: Any) -> None:
    """`python -m experiments list | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        lab.command("list", "squares"), env=lab.environment, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert done.returncode == 1 and done.stderr == ""
