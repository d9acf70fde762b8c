"""What is in a run's folder, read while other processes may be replacing it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.frame.experiment import values_hash
from experiments.frame.tasks import FINISHED
from pagedjax.errors import PagedJaxError

CONFIG, MANIFEST, RECORDS = "config.json", "manifest.json", "records.jsonl"
OLD = ".old-"
"""Begins the name of a run's folder while another is put in its place."""

_KNOWN = ("experiment", "hash", "status", "num_records", "timed_columns", "packages", "machine", "device", "git")
_TRIES, _PAUSE = 50, 0.01  # of reading what another process replaces


class StoreError(PagedJaxError):
    """A store, or something in it, cannot be read or written."""


class DamagedRun(StoreError):
    """A run's folder lacks something, or something in it does not parse."""


@dataclass(frozen=True)
class Run:
    """A configuration's folder.

    Attributes:
        values: of its configuration's fields.
        manifest: what is known of how it ran.
        text: of its records.
    """

    path: Path
    values: dict[str, Any]
    manifest: dict[str, Any]
    text: str = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Run:
        """Raises DamagedRun: the folder lacks a file, or its configuration or manifest does not parse."""
        manifest = read_json(path / MANIFEST)
        if missing := [key for key in _KNOWN if key not in manifest]:
            raise DamagedRun(f"{path / MANIFEST} has no {', '.join(missing)}")
        values = read_json(path / CONFIG)
        if values_hash(manifest["experiment"], values) != manifest["hash"]:
            raise DamagedRun(f"{path / CONFIG} is not what the run was made with: its hash is not {manifest['hash']}")
        return cls(path, values, manifest, _read_text(path / RECORDS))

    @property
    def is_finished(self) -> bool:
        """Whether it has all its records; otherwise it failed."""
        return self.manifest.get("status") == FINISHED

    def records(self) -> list[dict[str, Any]]:
        """All of them. Raises DamagedRun: a line does not parse, or lines are missing."""
        path, found = self.path / RECORDS, []
        for number, line in enumerate(self.text.removesuffix("\n").split("\n") if self.text else (), start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DamagedRun(f"{path}, line {number}: no JSON ({error})") from error
            if not isinstance(record, dict):
                raise DamagedRun(f"{path}, line {number}: a record must be an object, not {type(record).__name__}")
            found.append(record)
        if len(found) != self.manifest["num_records"]:
            raise DamagedRun(f"{path} has {len(found)} records; its manifest says {self.manifest['num_records']}")
        return found


def old_of(final: Path) -> Path:
    """Where a run is while another is put in its place."""
    return final.with_name(f"{OLD}{final.name}")


def read_run(final: Path) -> Run | None:
    """A run's folder, whole, though another process may be replacing it."""
    for tries_left in reversed(range(_TRIES)):
        path = next((path for path in (final, old_of(final), final) if path.is_dir()), None)
        if path is None:
            return None
        before = _identity(path)
        try:
            run = Run.read(path)
        except DamagedRun:
            if _identity(path) == before is not None or not tries_left:
                raise
        else:
            if _identity(path) == before:
                return replace(run, path=final)
        time.sleep(_PAUSE)
    raise StoreError(f"{final} cannot be read, as other processes keep replacing it")


def _identity(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def in_order(run: Run) -> list[tuple[str, int, Any]]:
    """Numbers as numbers, before texts; None first."""
    order = []
    for key, value in sorted(run.values.items()):
        is_number = isinstance(value, (bool, int, float))
        kind = 0 if value is None else 1 if is_number else 2
        order.append((key, kind, value if is_number else json.dumps(value)))
    return order


def finished_records(runs: Iterable[Run]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Configurations and records of the finished ones."""
    return [(run.values, run.records()) for run in runs if run.is_finished]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedRun(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read_text(path))
    except ValueError as error:
        raise DamagedRun(f"{path} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise DamagedRun(f"{path} holds no object")
    return found
