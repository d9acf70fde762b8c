"""Tables for people, the same rows as JSON for programs, and what a result has to say about where it comes from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "nvidia-cuda-nvcc-cu12", "numpy")


def format_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """One line a row under a line of names; "-" for what a row does not have. Numbers stand to the right."""
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    right = [any(isinstance(row.get(name), int | float) for row in rows) for name in columns]

    def line(parts: Sequence[str]) -> str:
        aligned = (x.rjust(w) if r else x.ljust(w) for x, w, r in zip(parts, widths, right, strict=True))
        return "  ".join(aligned).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def first_line(words: object) -> str:
    """Of what an error or a compiler says, the first line that is not empty; the error's kind if it says nothing."""
    return next(filter(None, map(str.strip, str(words).splitlines())), repr(words))


def writable(path: str) -> Path:
    """`path`, where a file can be made, found out by making one beside it.

    Raises:
        ValueError: the folder is missing or cannot be written to, or the path is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{path} is a folder; a file is to be written there")
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            return target
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def write_json(target: Path, record: Mapping[str, Any]) -> None:
    """Writes the record; a reader never sees half a file."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(target)


def provenance() -> dict[str, Any]:
    """What a result depends on beside its arguments: versions, the commit, and whether the tree was as committed.

    No date and no name of a machine: running again gives the same.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--", ".")
    return {"versions": versions, "commit": commit, "clean": None if status is None else status == ""}


def _git(*arguments: str) -> str | None:
    """What git says of the folder that holds this package; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
