"""Tables for people and the same records as JSON for programs."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagedjax.errors import PagedJaxError

Row = Mapping[str, object]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def format_table(rows: Sequence[Row]) -> str:
    """Lays records out, "-" where one has no value of a name.

    Few records of many fields stand side by side, with the names down the left, the first of which heads the table.
    Where there are more records than names, each has a line, and the names stand above.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[name, *(_cell(row.get(name)) for row in rows)] for name in names]
    if len(rows) > len(names):
        lines = [list(line) for line in zip(*lines, strict=True)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    if len(rows) > 1:
        text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in text)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises OSError where `write_json` could not write: to be asked before the work. Leaves nothing behind."""
    target = Path(path).resolve()
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if target.is_file() or not target.exists():
        partial = _partial(target)
        partial.touch()
        partial.unlink()


def write_json(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Writes the records as a JSON list whose keys are the column names; a reader never sees half a file.

    Raises:
        PagedJaxError: it cannot be written; nothing is left behind then.
    """
    target = Path(path).resolve()
    text = json.dumps([dict(row) for row in rows], indent=2) + "\n"
    try:
        if target.exists() and not target.is_file():  # a pipe or a terminal cannot be replaced
            Path(path).write_text(text, encoding="utf-8")
            return
        partial = _partial(target)
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise PagedJaxError(f"cannot write {path} ({error.strerror})") from error


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")
