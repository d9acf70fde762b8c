"""The results on disk: a folder for each configuration, there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from experiments.frame.experiment import OWN_FOLDER
from experiments.frame.tasks import FINISHED, Outcome, Task
from pagedjax.errors import PagedJaxError

FORMAT = 1
STORE_VARIABLE = "PAGEDJAX_STORE"

_STORE_FILE, _CONFIG, _MANIFEST, _RECORDS = "store.json", "config.json", "manifest.json", "records.jsonl"
_PART, _OLD = ".part-", ".old-"


class StoreError(PagedJaxError):
    """A store, or something in it, cannot be read or written."""


def default_store() -> Path:
    """The folder of PAGEDJAX_STORE, else one beside the results in the checkout."""
    return Path(os.environ.get(STORE_VARIABLE) or OWN_FOLDER / "results" / "store")


@dataclass(frozen=True)
class Run:
    """A configuration's folder.

    Attributes:
        values: of its configuration's fields.
        manifest: what is known of how it ran.
    """

    path: Path
    values: dict[str, Any]
    manifest: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Run:
        """Raises StoreError: the folder lacks a file, or one does not parse."""
        return cls(path, _read_json(path / _CONFIG), _read_json(path / _MANIFEST))

    @property
    def is_finished(self) -> bool:
        """Whether it has all its records; otherwise it failed."""
        return self.manifest.get("status") == FINISHED

    def records(self) -> list[dict[str, Any]]:
        """All of them. Raises StoreError: a line does not parse, or lines are missing."""
        path, found = self.path / _RECORDS, []
        for number, line in enumerate(_read_text(path).splitlines(), start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise StoreError(f"{path}, line {number}: no JSON ({error})") from error
            if not isinstance(record, dict):
                raise StoreError(f"{path}, line {number}: a record must be an object, not {type(record).__name__}")
            found.append(record)
        if len(found) != self.manifest["num_records"]:
            raise StoreError(f"{path} has {len(found)} records; its manifest says {self.manifest['num_records']}")
        return found


class Store:
    """A folder of results, which several processes may use at the same time.

    Raises:
        StoreError: the folder is of another format, or is no store, or cannot be made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file = self.path / _STORE_FILE
        if file.exists():
            written = _read_json(file).get("format")
            if written != FORMAT:
                raise StoreError(
                    f"{self.path} was written in format {written} by another version; this one reads format {FORMAT}: "
                    "choose another folder with --store"
                )
            return
        with _storing(self.path):
            if self.path.is_dir() and any(self.path.iterdir()):
                raise StoreError(f"{self.path} has files but no {_STORE_FILE}: it is no store; choose an empty folder")
            self.path.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{_PART}{uuid.uuid4().hex}")
            part.write_text(json.dumps({"format": FORMAT}) + "\n")
            os.replace(part, file)

    def run_of(self, task: Task) -> Run | None:
        """What is there of a task, finished or failed."""
        path = self._path_of(task)
        return Run.read(path) if path.is_dir() else None

    def runs(self, name: str | None = None) -> Iterator[Run]:
        """All that is there, or that is there of one experiment, in the order of its configurations' values."""
        folders = [self.path / name] if name is not None else sorted(self.path.iterdir())
        for folder in folders:
            if folder.is_dir() and not folder.name.startswith("."):
                runs = [Run.read(path) for path in folder.iterdir() if not path.name.startswith(".")]
                yield from sorted(runs, key=lambda run: json.dumps(run.values, sort_keys=True))

    def named(self, text: str) -> Run:
        """The run of a folder's path, of "experiment/hash" or of a hash, whose ends may be left out.

        Raises:
            StoreError: there is none, or there are several.
        """
        if (Path(text) / _MANIFEST).is_file():
            return Run.read(Path(text))
        name, _, start = text.rpartition("/")
        found = [run for run in self.runs(name or None) if start and run.path.name.startswith(start)]
        if len(found) != 1:
            what = f"{len(found)} runs begin like that" if found else "no run is named so"
            raise StoreError(f"{text!r}: {what} in {self.path}; give a folder, experiment/hash, or a hash")
        return found[0]

    def lock(self, task: Task) -> FileLock:
        """A task's lock, which ends with the process that holds it."""
        folder = self.path / ".locks"
        with _storing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{task.name}-{task.hash}")

    def put(self, task: Task, outcome: Outcome) -> Path:
        """Puts a task's outcome in place of what was there, at once. To be called with the task's lock held.

        Raises:
            StoreError: it cannot be written; what was there is still there.
        """
        final = self._path_of(task)
        part = final.with_name(f"{_PART}{task.hash}")
        with _storing(self.path):
            try:
                final.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                _write(part / _CONFIG, json.dumps(task.values, indent=1) + "\n")
                _write(part / _RECORDS, "".join(f"{line}\n" for line in outcome.lines))
                _write(part / _MANIFEST, json.dumps(outcome.manifest, indent=1) + "\n")
                for name, data in outcome.files.items():
                    (part / name).parent.mkdir(parents=True, exist_ok=True)
                    (part / name).write_bytes(data)
                self._replace(part, final)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
        return final

    def _replace(self, part: Path, final: Path) -> None:
        old = final.with_name(f"{_OLD}{final.name}")
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(part, final)
        shutil.rmtree(old, ignore_errors=True)

    def recover(self, task: Task) -> None:
        """Clears up after a process that was killed while it put. To be called with the task's lock held."""
        final = self._path_of(task)
        old = final.with_name(f"{_OLD}{final.name}")
        with _storing(self.path):
            if old.is_dir() and not final.exists():
                os.rename(old, final)
            for rest in (old, final.with_name(f"{_PART}{task.hash}")):
                shutil.rmtree(rest, ignore_errors=True)

    def _path_of(self, task: Task) -> Path:
        return self.path / task.name / task.hash


def finished_records(runs: Iterable[Run]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Configurations and records of the finished ones."""
    return [(run.values, run.records()) for run in runs if run.is_finished]


@contextmanager
def _storing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space is left for it" if full else f"cannot be written ({error.strerror or error})"
        raise StoreError(f"the store {path}: {what}; what is finished in it stays, and is not run again") from error


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read_text(path))
    except ValueError as error:
        raise StoreError(f"{path} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise StoreError(f"{path} holds no object")
    return found
