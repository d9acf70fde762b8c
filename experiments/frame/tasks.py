"""One configuration run, wherever that is: what comes back is plain data, that any process can put into a store."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments.frame.experiment import Experiment, describe_config, load_experiment, values_hash
from experiments.frame.values import plain_values, record_line, said
from pagedjax.errors import ConfigError
from pagedjax.provenance import provenance

FINISHED, FAILED = "finished", "failed"


@dataclass(frozen=True)
class Task:
    """A configuration to run; it can be pickled, as can what it comes to.

    Attributes:
        name: of the experiment.
        path: of its file.
        values: of the configuration's fields.
        label: the configuration in short.
        profile: write a trace of `jax.profiler`.
    """

    name: str
    path: str
    values: dict[str, Any]
    label: str
    profile: bool = False

    @classmethod
    def of(cls, experiment: Experiment, config: Any, profile: bool = False) -> Task:
        """For a configuration of an experiment. Raises ConfigError: it cannot be stored."""
        try:
            values = plain_values(config)
        except ConfigError as error:
            raise ConfigError(f"{experiment.name}: {error}") from error
        return cls(experiment.name, str(experiment.path), values, describe_config(config), profile)

    @property
    def hash(self) -> str:
        """What its folder is named by."""
        return values_hash(self.name, self.values)


@dataclass(frozen=True)
class Outcome:
    """What a task came to.

    Attributes:
        lines: its records as JSON, one a line.
        manifest: where they come from, how long they took, whether they are all there, why there is no figure.
        files: what else goes into its folder, by name.
    """

    lines: list[str]
    manifest: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether there are no records because of an error."""
        return self.manifest["status"] == FAILED


def execute(task: Task) -> Outcome:
    """Runs a task, here; an error becomes part of the outcome."""
    begun = time.perf_counter()
    files: dict[str, bytes] = {}
    try:
        experiment = load_experiment(Path(task.path))
        begun = time.perf_counter()  # imports are not what an experiment is about
        with _profiled(task.profile, files), _told(files):
            lines = [record_line(record) for record in experiment.run(experiment.config_class(**task.values))]
    except (Exception, SystemExit) as error:  # whatever an experiment raises: the others go on
        return failure(task, said(error), traceback.format_exc(), time.perf_counter() - begun, _device(), files)
    seconds = time.perf_counter() - begun
    manifest = _manifest(task, FINISHED, seconds, len(lines), experiment.timed, _device())
    try:
        files |= _figures(experiment, task.values, lines)
    except (Exception, SystemExit) as error:  # the records, which took the time, are there all the same
        manifest["figure_error"] = said(error)
        files["traceback.txt"] = traceback.format_exc().encode(errors="backslashreplace")
    return Outcome(lines, manifest, files)


def failure(
    task: Task,
    error: str,
    trace: str,
    seconds: float,
    device: Any = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> Outcome:
    """The outcome of a task that gave no records."""
    manifest = _manifest(task, FAILED, seconds, 0, (), device) | {"error": error}
    return Outcome([], manifest, {**files, "traceback.txt": trace.encode(errors="backslashreplace")})


def _manifest(
    task: Task, status: str, seconds: float, num_records: int, timed: tuple[str, ...], device: Any
) -> dict[str, Any]:
    seed = task.values.get("seed")
    return {
        "experiment": task.name,
        "hash": task.hash,
        "status": status,
        "num_records": num_records,
        "wall_s": round(seconds, 3),
        "timed_columns": list(timed),
        "source_sha256": source_hash(task),
        **provenance(task.values, {} if seed is None else {"experiment": seed}, device),
    }


def source_hash(task: Task) -> str:
    """Of an experiment's file: what it was may have been another when a run was made."""
    try:
        return hashlib.sha256(Path(task.path).read_bytes()).hexdigest()
    except OSError:  # it has gone
        return ""


def _device() -> Any:
    """The device that JAX computed on, if the experiment used JAX."""
    if "jax" not in sys.modules:
        return None
    import jax

    try:
        return jax.devices()[0]
    except RuntimeError:  # no backend begins, which the experiment noticed if it wanted one
        return None


def _figures(experiment: Experiment, values: dict[str, Any], lines: list[str]) -> dict[str, bytes]:
    from experiments.frame.frames import to_frame
    from experiments.frame.plots import drawn

    records = to_frame([(values, [json.loads(line) for line in lines])])
    png, svg = drawn(experiment.plot, records, "png", "svg")
    return {"figure.png": png, "figure.svg": svg}


@contextmanager
def _told(files: dict[str, bytes]) -> Iterator[None]:
    """What is written to stderr (what compiles, warnings) goes into a file, and not between others' progress."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            yield
    finally:
        if told.getvalue():
            files["stderr.txt"] = told.getvalue().encode(errors="backslashreplace")


@contextmanager
def _profiled(wanted: bool, files: dict[str, bytes]) -> Iterator[None]:
    if not wanted:
        yield
        return
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                files[f"profile/{path.relative_to(folder)}"] = path.read_bytes()
