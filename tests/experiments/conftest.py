"""An experiment in a folder of its own, with a store of its own, and ways to run it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from experiments.frame import cli
from experiments.frame import experiment as discovery
from experiments.frame.experiment import Experiment, find_experiment
from experiments.frame.store import Store
from experiments.frame.sweep import Sweep, Tally
from experiments.frame.tasks import Outcome, Task, execute

ROOT = Path(__file__).parent.parent.parent

SQUARES = '''"""Squares of numbers: what they are."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass

from experiments.frame import Claim
from experiments.frame.frames import figure_of


@dataclass(frozen=True)
class Config:
    """One number.

    Attributes:
        number: to be squared.
        factor: of the square.
        what: happens on the way.
        seed: of nothing.
        bound: that is not used, or
            only in words.
    """

    number: int = 1
    factor: float = 1.0
    what: str = ""
    seed: int = 0
    bound: int | None = None


CPU_SET = [Config(1), Config(2), Config(3)]


def run(config):
    match config.what:
        case "raise":
            raise RuntimeError(f"no square of {config.number}\\nand a second line")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "sleep":
            time.sleep(600)
        case "nap":
            time.sleep(0.2)
    for power in (1, 2):
        yield {"power": power, "result": config.factor * config.number**power, "type": type(config.factor).__name__}


def plot(records):
    from matplotlib.figure import Figure

    if set(records["what"]) == {"undrawn"}:
        raise RuntimeError("nothing to see")
    return Figure((0.1, 0.1))  # most tests are not about figures


def claims(records):
    found = figure_of(records, "result", number=3, power=2)
    return [
        Claim("the square | of\\n3", "page 1", found, 9, 9, paper="9", seed="8"),
        Claim("the square of 3, measured", "page 2", found, 0, 1, needs_accelerator=True),
    ]
'''


class Inline:
    """An executor that runs a task here when it is begun."""

    def __init__(self) -> None:
        self.started: list[Task] = []
        self._done: list[tuple[Task, Outcome]] = []

    @property
    def room(self) -> int:
        return 1 - self.busy

    @property
    def busy(self) -> int:
        return len(self._done)

    def start(self, task: Task) -> None:
        self.started.append(task)
        self._done.append((task, execute(task)))

    def wait(self, timeout: float) -> list[tuple[Task, Outcome]]:
        done, self._done = self._done, []
        return done


class Process(subprocess.Popen[str]):
    """One that a test which fails does not wait for."""

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        super().__exit__(*error)


class Lab:
    """The folder of experiments, and the store."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store_path, self.results = folder / "files", folder / "store", folder / "results"
        self.folder.mkdir()
        self.write("squares", SQUARES)
        # tests use the cores themselves, and Matplotlib is slow where it has to look for fonts
        self.environment = {
            **os.environ,
            "PAGEDJAX_EXPERIMENTS": str(self.folder),
            "PAGEDJAX_STORE": str(self.store_path),
            "PYTHONPATH": str(ROOT),
        }

    def write(self, name: str, source: str) -> Path:
        path = self.folder / f"{name}.py"
        path.write_text(source)
        return path

    def edit(self, before: str, after: str, name: str = "squares") -> None:
        """Writes an experiment that is the squares' with something else in it, or changes theirs."""
        source = (self.folder / "squares.py").read_text()
        assert before in source
        self.write(name, source.replace(before, after, 1))

    @property
    def store(self) -> Store:
        return Store(self.store_path)

    @property
    def squares(self) -> Experiment:
        return find_experiment("squares")

    def task(self, **values: Any) -> Task:
        return Task.of(self.squares, self.squares.config_class(**values))

    def sweep(self, *tasks: Task, force: bool = False) -> tuple[Tally, list[Task]]:
        """What became of tasks that are run here, and those that were begun."""
        sweep, executor = Sweep(self.store, force), Inline()
        sweep.run(tasks, executor)
        return sweep.tally, executor.started

    def main(self, *args: str) -> int:
        """The command line, in this process."""
        return cli.main(args)

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "experiments", *args]

    def start(self, *args: str) -> Process:
        """A process of the command line, the leader of its group."""
        return Process(
            self.command(*args),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def shell(self, *args: str) -> subprocess.CompletedProcess[str]:
        """The command line in a process of its own, to its end."""
        return subprocess.run(self.command(*args), env=self.environment, capture_output=True, text=True, timeout=120)

    def records(self, name: str = "squares") -> dict[str, tuple[dict[str, Any], Sequence[dict[str, Any]]]]:
        """Configuration and records of each run, by hash."""
        return {run.path.name: (run.values, run.records()) for run in self.store.runs(name)}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """With no other experiments than its own in this process."""
    lab = Lab(tmp_path)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    monkeypatch.setattr(discovery, "OWN_FOLDER", nothing)
    monkeypatch.setattr(cli, "find_data", lambda: None)  # it sets a variable for good
    monkeypatch.setenv("PAGEDJAX_EXPERIMENTS", str(lab.folder))
    monkeypatch.setenv("PAGEDJAX_STORE", str(lab.store_path))
    return lab
