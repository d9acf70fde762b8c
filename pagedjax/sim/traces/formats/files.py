"""Opening files, compressed or not, and what can go wrong with them."""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO, cast

from pagedjax.errors import ConfigError
from pagedjax.sim.traces.rows import Problem, Problems

if TYPE_CHECKING:
    import numpy as np

_GZIP_MAGIC = b"\x1f\x8b"
_ZIP_MAGIC = b"PK\x03\x04"

_CUT = (EOFError, zlib.error, gzip.BadGzipFile)
"""What Python raises where compressed data ends too early or is damaged."""

_LINE_CHARS = 1 << 16
"""Of a line, where the file may be no text at all and all of it one line."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Makes a ConfigError that names the file of whatever goes wrong with it."""
    try:
        yield
    except (OSError, *_CUT) as error:
        raise ConfigError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from error


def open_file(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed if it is a gzip, whatever its name ends in."""
    with open(path, "rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    return cast(IO[bytes], gzip.open(path)) if is_gzip else open(path, "rb")


def open_text(path: Path) -> TextIO:
    """The file's text, without a byte order mark."""
    return io.TextIOWrapper(open_file(path), encoding="utf-8-sig", errors="replace", newline="")


class Lines:
    """The lines of a text; a compressed one that is cut short ends there, and that is counted.

    Attributes:
        number: of the line that was given last, from 1.
    """

    def __init__(self, file: Iterable[str], problems: Problems) -> None:
        self.number = 0
        self._file = file
        self._problems = problems

    @property
    def where(self) -> str:
        """The place of the line that was given last."""
        return f"line {self.number}"

    def __iter__(self) -> Iterator[str]:
        try:
            for line in self._file:
                self.number += 1
                yield line
        except _CUT:
            self.number += 1
            self._problems.add(Problem.CUT_OFF, self.where)


def first_lines(path: Path, problems: Problems) -> Iterator[str]:
    """The lines that are not blank, each cut where it is very long, as far as they are asked for."""
    with open_text(path) as file:
        for line in Lines(iter(partial(file.readline, _LINE_CHARS), ""), problems):
            if line.strip():
                yield line


def is_zip(path: Path) -> bool:
    """Whether it is a zip file, as numpy's `.npz` are."""
    with open_file(path) as file:
        return file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an `.npz`. Raises ConfigError if it cannot be read."""
    import numpy as np

    with reading(path), open_file(path) as file:
        try:
            with np.load(io.BytesIO(file.read()), allow_pickle=False) as arrays:
                return dict(arrays)
        except (zipfile.BadZipFile, ValueError, KeyError) as error:
            raise ConfigError(f"{path} cannot be read as .npz ({error})") from error
