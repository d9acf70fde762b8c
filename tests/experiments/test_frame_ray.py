"""Sweeps that go out to a Ray cluster, here one of this machine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from experiments.frame.executors import RayExecutor, executor
from experiments.frame.sweep import Sweep
from pagedjax.errors import ConfigError

pytestmark = [pytest.mark.xdist_group("ray")]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="there is no Ray for this Python")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayExecutor]:
    """One that the executor begins itself."""
    with warnings.catch_warnings(), executor("ray", jobs=2, address=None) as made:
        warnings.simplefilter("ignore")  # Ray's own, such as of its log files
        assert isinstance(made, RayExecutor)
        yield made


@needs_ray
def test_failing_tasks_and_good_ones(lab: Any, cluster: RayExecutor, tmp_path: Path) -> None:
    """An error; a task that kills its process; one that ends it; and records that are a local sweep's."""
    tasks = [lab.task(number=number, what=what) for what in ("raise", "die", "exit", "fine") for number in (2, 3)]
    sweep = Sweep(lab.store)
    sweep.run(tasks, cluster)
    assert {task.values["what"] for task in sweep.tally.run} == {"fine"} and len(sweep.tally.run) == 2
    errors = {(task.values["what"], task.values["number"]): error for task, error in sweep.tally.failed}
    assert len(errors) == 6
    assert errors["raise", 2].startswith("RuntimeError: no square of 2 and a second line")
    assert errors["exit", 3].startswith("SystemExit: 3")
    assert errors["die", 3].startswith("Ray: WorkerCrashedError")
    for run in lab.store.runs("squares"):
        assert run.is_finished == (run.values["what"] == "fine")
        assert (run.path / "traceback.txt").exists() == (not run.is_finished)
    far = {name: found for name, found in lab.records().items() if found[1]}
    lab.store_path = tmp_path / "near"
    lab.sweep(*(task for task in tasks if task.values["what"] == "fine"))
    assert lab.records() == far and len(far) == 2


@needs_ray
def test_command_line_joins_a_cluster(lab: Any, cluster: RayExecutor) -> None:
    address = cluster._ray.get_runtime_context().gcs_address
    done = lab.shell("run", "squares", "--seeds", "0..1", "--executor", "ray", "--address", address, "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert "2 run" in done.stdout
    assert sorted(values["seed"] for values, _ in lab.records().values()) == [0, 1]


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "no.such.host.invalid:6379", "nonsense"])
def test_unreachable_address(lab: Any, address: str) -> None:
    """Said at once; in a process of its own, as Ray has one cluster a process."""
    done = lab.shell("run", "squares", "--executor", "ray", "--address", address)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: --address '{address}' leads to no Ray cluster: ")
    assert "Traceback" not in done.stderr


def test_without_ray(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--executor ray needs Ray: pip install 'pagedjax\[ray\]'"):
        RayExecutor(None, 1)
