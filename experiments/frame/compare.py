"""Two runs, or two stores, beside each other: what differs in configuration, origin and records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.frame.runs import Run, StoreError
from experiments.frame.store import Store

Row = dict[str, Any]
RESULTS, CONFIGURATION = "results", "configuration"
_ORIGINS = ("packages", "machine", "device", "git")


def compare(first: str, second: str, store: Store) -> list[Row]:
    """A row for each thing that differs; of two whole stores, for each run that is in one only too.

    A row's `part` says what it is about: the configuration, where the run comes from, or its results. Of these, columns
    that measure time are marked.

    Raises:
        StoreError: there is no such run.
    """
    if _is_store(first) or _is_store(second):
        if not (_is_store(first) and _is_store(second)):
            raise StoreError(f"{first!r} and {second!r}: one is a whole store, and the other is not")
        return list(_compare_stores(Store(first), Store(second)))
    return list(_compare_runs(store.named(first), store.named(second)))


def results_differ(rows: list[Row]) -> bool:
    """Whether any result does that is to be the same each time."""
    return any(row["part"] == RESULTS and not row["measures time"] for row in rows)


def _is_store(text: str) -> bool:
    try:
        return (Path(text) / "store.json").is_file()
    except OSError:  # a text that is too long for a path
        return False


def _compare_stores(first: Store, second: Store) -> Iterator[Row]:
    runs = [{(run.path.parent.name, run.path.name): run for run in store.runs()} for store in (first, second)]
    for key in sorted(runs[0].keys() | runs[1].keys()):
        one, other = (found.get(key) for found in runs)
        name = "/".join(key)
        if one is None or other is None:
            yield _row(name, RESULTS, "is there", one is not None, other is not None)
        else:
            yield from ({**row, "run": name} for row in _compare_records(one, other))


def _compare_runs(one: Run, other: Run) -> Iterator[Row]:
    for key in {**one.values, **other.values}:
        yield from _differing(CONFIGURATION, key, one.values.get(key), other.values.get(key))
    for part in _ORIGINS:
        ours, theirs = one.manifest.get(part) or {}, other.manifest.get(part) or {}
        for key in sorted(ours.keys() | theirs.keys()):
            yield from _differing(part, key, ours.get(key), theirs.get(key))
    yield from _compare_records(one, other)


def _compare_records(one: Run, other: Run) -> Iterator[Row]:
    yield from _differing(RESULTS, "status", one.manifest["status"], other.manifest["status"])
    records = one.records(), other.records()
    yield from _differing(RESULTS, "number of records", len(records[0]), len(records[1]))
    timed = {*one.manifest["timed_columns"], *other.manifest["timed_columns"]}
    for number, (ours, theirs) in enumerate(zip(*records, strict=False)):
        for key in {**ours, **theirs}:
            for row in _differing(RESULTS, f"record {number}: {key}", ours.get(key), theirs.get(key)):
                yield {**row, "measures time": key in timed}


def _differing(part: str, what: str, one: Any, other: Any) -> Iterator[Row]:
    if one != other:
        yield _row("", part, what, one, other)


def _row(run: str, part: str, what: str, one: Any, other: Any) -> Row:
    return {"run": run, "part": part, "what": what, "first": one, "second": other, "measures time": False}
