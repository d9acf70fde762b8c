"""The cache folder: where it is, and how several processes share it without harming it."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pagedjax.errors import DownloadError

_NOT_WRITABLE = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOTDIR,
    errno.EEXIST,
)


def cache_home() -> Path:
    """`~/.cache/pagedjax`, or what the environment variable PAGEDJAX_HOME says."""
    return Path(os.environ.get("PAGEDJAX_HOME") or "~/.cache/pagedjax").expanduser().absolute()


@contextmanager
def workspace(name: str) -> Iterator[Path]:
    """An empty folder inside the cache for work in progress on `name`; one process at a time, others wait.

    Finished things are renamed from here to their place, so whoever looks there finds all or nothing. What a killed
    process left is removed on the way in: the lock is the operating system's and dies with its holder.

    Raises:
        DownloadError: the cache folder cannot be written, or the disk is full.
    """
    home = cache_home()
    folder = home / "tmp" / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(FileLock(folder.with_suffix(".lock")), name):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise DownloadError(
            f"cannot write to the cache folder {home} ({error}): free some space there or set PAGEDJAX_HOME to a "
            "folder that can be written"
        ) from error


@contextmanager
def _locked(lock: FileLock, name: str) -> Iterator[None]:
    try:
        lock.acquire(timeout=1)
    except Timeout:
        print(f"waiting for another process that prepares {name}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
