"""The forms in which traces of requests are published, one a module, and how a file's is found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pagedjax.config import require
from pagedjax.errors import ConfigError
from pagedjax.scalars import shown
from pagedjax.sim.traces.formats import alpaca, azure, compact, mooncake, parallel, sharegpt, vidur
from pagedjax.sim.traces.formats.format import Format
from pagedjax.sim.traces.formats.head import Head, read_head
from pagedjax.sim.traces.rows import Problems, TraceRow

_FORMATS = {
    module.FORMAT.name: module.FORMAT for module in (compact, azure, vidur, mooncake, sharegpt, alpaca, parallel)
}


def format_names() -> tuple[str, ...]:
    """The formats there are."""
    return tuple(_FORMATS)


def detect(path: Path, name: str | None = None) -> tuple[Format, Head]:
    """The format of a file, by its columns or keys, and how the file begins.

    Args:
        name: the format that it has to be.

    Raises:
        ConfigError: there is no such format, the file cannot be read, or it is of no format there is, or not of `name`;
            it lists the columns that were found.
    """
    require(name is None or name in _FORMATS, "format", name, f"one of {', '.join(_FORMATS)}")
    allowed = [format for format in _FORMATS.values() if name in (None, format.name)]
    head = read_head(path)
    for format in allowed:
        if format.fits(head):
            return format, head
    wanted, known = f"the format {name}" if name else "a known format", "; ".join(map(str, allowed))
    raise ConfigError(f"{path} is no trace of {wanted}: it has {_found(head)}, and known are {known}")


def read_file(
    path: Path, format: Format, head: Head, problems: Problems, count_tokens: Callable[[str], int] | None
) -> Iterator[TraceRow]:
    """The rows of a file, in its order, read as they are asked for.

    Args:
        problems: counts the rows that something is wrong with.
        count_tokens: of a text, for a format that holds text.

    Raises:
        ConfigError: while reading, if the file cannot be read, or at its end if not one row of it could be used.
    """
    is_empty = True
    for row in format.read(path, problems, count_tokens) if format.holds_text else format.read(path, problems):
        is_empty = False
        yield row
    if is_empty:
        reason = "; ".join(problems.lines()) or "there are none"
        raise ConfigError(
            f"{path} has no row that can be used: {reason}; it has {_found(head)}, and was read as {format}"
        )


def _found(head: Head) -> str:
    what = {"csv": "the columns", "json": "the keys", "npz": "the arrays"}[head.kind]
    return f"{what} {shown(', '.join(head.names))}" if head.names else f"no {what.split()[1]}"
