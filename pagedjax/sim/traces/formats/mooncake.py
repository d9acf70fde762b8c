"""Mooncake's traces: arrivals in milliseconds, and a hash for every 512 tokens of a prompt.

They are published as JSON, a request a line. This project's own compact form is an `.npz` of the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pagedjax.errors import ConfigError
from pagedjax.sim.traces.formats.files import is_zip, read_arrays
from pagedjax.sim.traces.formats.format import Format
from pagedjax.sim.traces.formats.records import read_records
from pagedjax.sim.traces.rows import Problem, Problems, RowMaker, TraceRow

BLOCK_TOKENS = 512

_TIMES = ("timestamp", "timestamp_ms")


class _Given(NamedTuple):
    """A request as the file has it."""

    where: str
    prompt: object
    output: object
    milliseconds: object
    hashes: object


def read(path: Path, problems: Problems) -> Iterator[TraceRow]:
    """The rows of such a file, in either form."""
    maker = RowMaker(problems, lambda milliseconds: float(milliseconds) / 1000)
    for given in _arrays(path) if is_zip(path) else _json(path, problems):
        row = maker.make(given.where, given.prompt, given.output, given.milliseconds)
        if row is None:
            continue
        if _are_hashes(given.hashes, row.prompt_len):
            row = row._replace(block_hashes=tuple(given.hashes))  # type: ignore[arg-type]
        else:
            problems.add(Problem.HASHES, given.where)
        yield row


def _json(path: Path, problems: Problems) -> Iterator[_Given]:
    for where, record in read_records(path, problems):
        time = next((record[name] for name in _TIMES if name in record), None)
        yield _Given(where, record.get("input_length"), record.get("output_length"), time, record.get("hash_ids"))


def _arrays(path: Path) -> Iterator[_Given]:
    arrays = read_arrays(path)
    time = next(name for name in _TIMES if name in arrays)
    names = ("input_length", "output_length", time, "hash_offsets", "hash_ids")
    found = [arrays[name] for name in names if name in arrays]
    are_flat = all(array.ndim == 1 and array.dtype.kind in "iu" for array in found)
    if len(found) < len(names) or not are_flat or len({*map(len, found[:3]), len(found[3]) - 1}) > 1:
        raise ConfigError(
            f"{path} is no trace: {', '.join(names[:3])} must be integers, one a request, hash_offsets one more"
        )
    prompts, outputs, times, offsets, hashes = found
    for number, columns in enumerate(zip(prompts, outputs, times, offsets, offsets[1:], strict=False), 1):
        prompt, output, time, first, end = (column.item() for column in columns)
        yield _Given(f"row {number}", prompt, output, time, hashes[first:end].tolist())


def _are_hashes(hashes: object, prompt_len: int) -> bool:
    return (
        isinstance(hashes, list)
        and len(hashes) == -(-prompt_len // BLOCK_TOKENS)
        and all(type(block) is int for block in hashes)
    )


FORMAT = Format(
    "mooncake",
    ("json", "npz"),
    (_TIMES, ("input_length",), ("output_length",), ("hash_ids",)),
    read,
    time=_TIMES,
    block_tokens=BLOCK_TOKENS,
)
