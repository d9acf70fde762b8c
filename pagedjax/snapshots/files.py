"""A folder of snapshots, each a folder of its own: written beside and renamed, checked before anything in it is used.

    <root>/00000007/
        state.json        requests, scheduler, allocator: all that is not an array
        arrays/           an Orbax checkpoint: blocks of both pools
        manifest.json     size and SHA-256 of every other file; its second line is the SHA-256 of its first
    <root>/00000008/

A snapshot is there wholly or not at all, and a new one does not touch those before it. The newest `KEPT` are kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from pagedjax.errors import SnapshotError
from pagedjax.interrupt import interrupts_deferred
from pagedjax.models.checkpoint import quiet_orbax
from pagedjax.scalars import shown

KEPT = 2
MANIFEST, STATE, ARRAYS = "manifest.json", "state.json", "arrays"
_UNFINISHED = ".unfinished-"

Arrays = dict[str, np.ndarray]


def list_snapshots(root: Path) -> list[Path]:
    """The snapshots in a folder, oldest first; nothing else that lies there is one, whatever its name."""
    if not root.is_dir():
        return []
    named = (path for path in root.iterdir() if re.fullmatch(r"[0-9]{8,}", path.name))
    found = [path for path in named if (path / MANIFEST).is_file() or (path / STATE).is_file()]
    return sorted(found, key=lambda path: int(path.name))


def snapshot_root(path: object) -> Path:
    """A path that a user gave. Raises SnapshotError for what is none."""
    try:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise TypeError
        os.fsencode(path)
        if "\0" in str(path):
            raise ValueError
    except (TypeError, ValueError):
        raise SnapshotError(f"path={shown(path)} is not allowed: it must be the path of a folder") from None
    return Path(path)  # type: ignore[arg-type]


def check_root(root: Path) -> None:
    """Makes the folder if need be. Raises OSError if nothing can be written into it."""
    root.mkdir(parents=True, exist_ok=True)
    probe = root / f"{_UNFINISHED}{os.getpid()}"
    probe.mkdir()
    probe.rmdir()


def write_snapshot(root: Path, state: dict[str, Any], arrays: Arrays) -> Path:
    """Writes a snapshot behind those there are; returns its folder.

    Raises:
        OSError: it could not be written; nothing is left of it then, and those before it are untouched.
    """
    root.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(root)
    before = list_snapshots(root)
    name = _next_name(root, before)
    unfinished = root / f"{_UNFINISHED}{name}"
    try:
        with interrupts_deferred():
            _write_files(unfinished, state, arrays)
            os.rename(unfinished, root / name)
            _sync(root)
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code and not isinstance(error, OSError):  # TensorStore's are ValueErrors
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
        raise
    for old in before[: len(before) + 1 - KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return root / name


def read_snapshot(folder: Path) -> tuple[dict[str, Any], Arrays]:
    """A snapshot's state and arrays, after every byte of it was checked.

    Raises:
        SnapshotError: a file is missing, cut short or altered.
    """
    files = _read_manifest(folder)
    found = {path.relative_to(folder).as_posix() for path in _files(folder)}
    for name, (size, digest) in files.items():
        path = folder / name
        if name not in found:
            raise SnapshotError(f"{path} is missing")
        if path.stat().st_size != size:
            raise SnapshotError(f"{path} has {path.stat().st_size} bytes, not {size}: it was cut short or altered")
        if _sha256(path) != digest:
            raise SnapshotError(f"{path} was altered: its SHA-256 is not the one of the manifest")
    state = json.loads((folder / STATE).read_text())
    return state, _read_arrays(folder) if ARRAYS in {name.partition("/")[0] for name in files} else {}


def _next_name(root: Path, before: list[Path]) -> str:
    number = int(before[-1].name) + 1 if before else 1
    while (root / f"{number:08d}").exists():  # something of somebody else's
        number += 1
    return f"{number:08d}"


def _write_files(folder: Path, state: dict[str, Any], arrays: Arrays) -> None:
    folder.mkdir()
    (folder / STATE).write_text(json.dumps(state))
    if arrays:
        with quiet_orbax(logging.CRITICAL), ocp.Checkpointer(_handler()) as checkpointer:
            checkpointer.save((folder / ARRAYS).absolute(), args=ocp.args.PyTreeSave(arrays))
    files = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _sha256(path)] for path in sorted(_files(folder))
    }
    text = json.dumps({"files": files})
    (folder / MANIFEST).write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
    for path in [*_files(folder), *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(path)


def _read_manifest(folder: Path) -> dict[str, list[Any]]:
    path = folder / MANIFEST
    try:
        text, digest = path.read_text().splitlines()
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise ValueError("its own SHA-256 is another")
        return json.loads(text)["files"]
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read ({error.strerror}): the snapshot is incomplete, or none") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{path} was cut short or altered ({error})") from error


def _read_arrays(folder: Path) -> Arrays:
    with interrupts_deferred(), ocp.Checkpointer(_handler()) as checkpointer:
        tree = checkpointer.metadata((folder / ARRAYS).absolute()).item_metadata.tree
        args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in tree}
        restore = ocp.args.PyTreeRestore(item=dict.fromkeys(tree, 0), restore_args=args)
        return checkpointer.restore((folder / ARRAYS).absolute(), args=restore)


def _handler() -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _remove_unfinished(root: Path) -> None:
    for path in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        if path.is_dir():  # not everywhere can a folder be opened
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
