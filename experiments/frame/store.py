"""The results on disk: a folder for each configuration, there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from experiments.frame.experiment import OWN_FOLDER
from experiments.frame.runs import (
    CONFIG,
    MANIFEST,
    OLD,
    RECORDS,
    DamagedRun,
    Run,
    StoreError,
    in_order,
    old_of,
    read_json,
    read_run,
)
from experiments.frame.tasks import Outcome, Task

FORMAT = 1
STORE_VARIABLE = "PAGEDJAX_STORE"

_STORE_FILE, _PART, _FAILED = "store.json", ".part-", ".failed-"


def default_store() -> Path:
    """The folder of PAGEDJAX_STORE, else one beside the results in the checkout."""
    return Path(os.environ.get(STORE_VARIABLE) or OWN_FOLDER / "results" / "store")


class Store:
    """A folder of results, which several processes may use at the same time. It is made when something is put there.

    Raises:
        StoreError: the folder is of another format, or is no store.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with _storing(self.path):
            others = self.path.exists() and any(not file.name.startswith(_PART) for file in self.path.iterdir())
            if not (self.path / _STORE_FILE).exists():  # asked last: another process may be making it
                if others:
                    raise StoreError(f"{self.path} has files but no {_STORE_FILE}: it is no store; choose another")
                return
        written = read_json(self.path / _STORE_FILE).get("format")
        if written != FORMAT:
            raise StoreError(
                f"{self.path} was written in format {written} by another version; this one reads format {FORMAT}: "
                "choose another folder with --store"
            )

    def run_of(self, task: Task) -> Run | None:
        """What is there of a task, finished or failed. Raises DamagedRun."""
        return read_run(self._path_of(task))

    def runs(self, name: str | None = None) -> Iterator[Run]:
        """All that is there, or that is there of one experiment, in the order of its configurations' values."""
        for experiment in self._experiments() if name is None else [name]:
            runs = filter(None, map(read_run, self._paths(experiment)))
            yield from sorted(runs, key=in_order)

    def named(self, text: str) -> Run:
        """The run of a folder's path, of "experiment/hash" or of a hash, whose ends may be left out.

        Raises:
            StoreError: there is none, or there are several.
        """
        with suppress(OSError):  # a text that is too long for a path
            if (Path(text) / MANIFEST).is_file():
                return Run.read(Path(text))
        name, _, start = text.rpartition("/")
        names = [name] if name else self._experiments()
        found = [path for each in names for path in self._paths(each) if start and path.name.startswith(start)]
        run = read_run(found[0]) if len(found) == 1 else None
        if run is None:
            what = f"{len(found)} runs begin like that" if len(found) > 1 else "no run is named so"
            raise StoreError(f"{text!r}: {what} in {self.path}; give a folder, experiment/hash, or a hash")
        return run

    def _experiments(self) -> list[str]:
        return sorted(path.name for path in _listed(self.path) if path.is_dir() and not path.name.startswith("."))

    def _paths(self, name: str) -> list[Path]:
        """The folders of an experiment's runs, those included that are being replaced."""
        found = {path.with_name(path.name.removeprefix(OLD)) for path in _listed(self.path / name) if path.is_dir()}
        return sorted(path for path in found if not path.name.startswith("."))

    def lock(self, task: Task) -> FileLock | None:
        """A task's lock, held; it ends with its holder. None: another process holds it.

        Raises:
            StoreError: the store cannot be written.
        """
        folder = self.path / ".locks"
        with _storing(self.path):
            self._make()
            folder.mkdir(exist_ok=True)
            lock = FileLock(folder / f"{task.name}-{task.hash}")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return None
        return lock

    def _make(self) -> None:
        file = self.path / _STORE_FILE
        if not file.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{_PART}{uuid.uuid4().hex}")
            part.write_text(json.dumps({"format": FORMAT}) + "\n")
            os.replace(part, file)

    def put(self, task: Task, outcome: Outcome) -> Path:
        """Puts a task's outcome in place of what was there, at once. To be called with the task's lock held.

        A failure takes no finished run's place: it is put beside it, into the hidden folder that is returned.

        Raises:
            StoreError: it cannot be written; what was there is still there.
        """
        final = self._path_of(task)
        if outcome.failed and self._is_finished(task):
            final = final.with_name(f"{_FAILED}{task.hash}")
        part = final.with_name(f"{_PART}{task.hash}")
        with _storing(self.path):
            try:
                final.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                _write(part / CONFIG, json.dumps(task.values, indent=1) + "\n")
                _write(part / RECORDS, "".join(f"{line}\n" for line in outcome.lines))
                _write(part / MANIFEST, json.dumps(outcome.manifest, indent=1) + "\n")
                for name, data in outcome.files.items():
                    (part / name).parent.mkdir(parents=True, exist_ok=True)
                    (part / name).write_bytes(data)
                self._replace(part, final)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
        return final

    def _is_finished(self, task: Task) -> bool:
        try:
            run = self.run_of(task)
        except DamagedRun:
            return False
        return run is not None and run.is_finished

    def _replace(self, part: Path, final: Path) -> None:
        old = old_of(final)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        try:
            os.rename(part, final)
        except BaseException:
            if old.exists():
                os.rename(old, final)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def recover(self, task: Task) -> None:
        """Clears up after a process that was killed while it put. To be called with the task's lock held."""
        final = self._path_of(task)
        old = old_of(final)
        with _storing(self.path):
            if old.is_dir() and not final.exists():
                os.rename(old, final)
            for rest in (old, final.with_name(f"{_PART}{task.hash}")):
                shutil.rmtree(rest, ignore_errors=True)

    def _path_of(self, task: Task) -> Path:
        return self.path / task.name / task.hash


def _listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing if it is not there."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"{folder} cannot be read: {error}") from error


@contextmanager
def _storing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space is left for it" if full else f"it cannot be used ({error.strerror or error})"
        raise StoreError(f"the store {path}: {what}; what is finished in it stays, and is not run again") from error


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
