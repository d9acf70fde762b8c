"""Measured winners among the kernels' configurations, by chip, op and shape: `tuned.json`, which `tune` fills.

The table is empty so far: no chip was at hand to measure on, and every kernel runs with its own `default_config`. A
kernel asks for its winner as `tuned(Config, "triton", "paged_decode", q, k_pool)`, and takes its default on None.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Array

from pallas_kernels.bench.cases import OPS
from pallas_kernels.chips import CHIPS, chip_here
from pallas_kernels.dispatch import PALLAS

TUNED = Path(__file__).with_name("tuned.json")

Shape = Mapping[str, int | str]
C = TypeVar("C")

_PAGED = ("heads", "kv_heads", "head_dim", "block_size", "dtype", "pool_dtype")
SHAPE_FIELDS: dict[str, tuple[str, ...]] = {
    "paged_decode": _PAGED,
    "paged_attention": _PAGED,
    "flash_attention": ("heads", "kv_heads", "head_dim", "dtype", "pool_dtype"),
    "write_kv": ("kv_heads", "head_dim", "block_size", "dtype", "pool_dtype"),
    "copy_blocks": ("block_bytes", "pool_dtype"),
}


class Key(NamedTuple):
    """What a winner is a winner for; `shape` is as `shape_of` gives it, sorted by name."""

    chip: str
    backend: str
    op: str
    shape: tuple[tuple[str, int | str], ...]


class Winner(NamedTuple):
    """The fields of a `Config`, and what a call took with it and with the default, in microseconds."""

    config: Mapping[str, int]
    microseconds: float
    default_microseconds: float


def shape_of(op: str, *arrays: Array | jax.ShapeDtypeStruct) -> Shape:
    """What a configuration depends on, of an op's operands: those that `unsupported` takes (for copies, one pool)."""
    first, last = arrays[0], arrays[-1]
    if op == "copy_blocks":
        return {"block_bytes": math.prod(last.shape[1:]) * last.dtype.itemsize, "pool_dtype": str(last.dtype)}
    paged = op != "flash_attention"
    whole = {
        "heads": first.shape[-2],
        "kv_heads": last.shape[1 if paged else 2],
        "head_dim": last.shape[-1],
        "block_size": last.shape[2] if paged else 0,
        "dtype": str(first.dtype),
        "pool_dtype": str(last.dtype),
    }
    return {name: whole[name] for name in SHAPE_FIELDS[op]}


def key(chip: str, backend: str, op: str, shape: Shape) -> Key:
    """Where a winner stands in the table."""
    return Key(chip, backend, op, tuple(sorted(shape.items())))


def tuned(config: type[C], backend: str, op: str, *arrays: Array | jax.ShapeDtypeStruct) -> C | None:
    """The measured winner for these operands on the chip that is here; None without one.

    Args:
        config: the kernel's own `Config`, which checks itself.
        backend: one of `dispatch.PALLAS`.
        op: one of `SHAPE_FIELDS`.
        arrays: the op's operands, as `unsupported` takes them.

    Raises:
        ValueError: the table is damaged, or holds a configuration that the kernel refuses.
    """
    chip = chip_here()
    winner = None if chip is None else _table().get(key(chip.name, backend, op, shape_of(op, *arrays)))
    if winner is None:
        return None
    try:
        return config(**winner.config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{TUNED.name} has {dict(winner.config)} for {backend} {op}: {error}") from error


@functools.cache
def _table() -> dict[Key, Winner]:
    return load(TUNED)


def load(path: Path) -> dict[Key, Winner]:
    """The table in a file.

    Raises:
        ValueError: it is no JSON, or an entry is not as `save` writes it; says which and why.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is no table of tuned configurations: {error!r}") from error
    table: dict[Key, Winner] = {}
    for number, entry in enumerate(entries):
        if problem := _problem(entry):
            raise ValueError(f"entry {number} of {path.name}: {problem}")
        place = key(entry["chip"], entry["backend"], entry["op"], entry["shape"])
        if place in table:
            raise ValueError(f"entry {number} of {path.name} is there twice: {' '.join(map(str, place))}")
        table[place] = Winner(entry["config"], entry["microseconds"], entry["default_microseconds"])
    return table


def entries(table: Mapping[Key, Winner]) -> list[dict[str, Any]]:
    """The table as it stands in the file, in a fixed order."""
    return [
        place._asdict() | {"shape": dict(place.shape)} | winner._asdict() | {"config": dict(winner.config)}
        for place, winner in sorted(table.items(), key=lambda item: repr(item[0]))
    ]


def _problem(entry: Any) -> str | None:
    """What is wrong with an entry."""
    wanted = {*Key._fields, *Winner._fields}
    if not isinstance(entry, dict) or set(entry) != wanted:
        return f"it must be an object of {', '.join(sorted(wanted))}"
    ops = tuple(op for op in OPS if op in SHAPE_FIELDS)
    for name, allowed in (("chip", tuple(CHIPS)), ("backend", PALLAS), ("op", ops)):
        if entry[name] not in allowed:
            return f"{name} is {entry[name]!r}; it must be one of {', '.join(allowed)}"
    fields = SHAPE_FIELDS[entry["op"]]
    if not isinstance(entry["shape"], dict) or set(entry["shape"]) != set(fields):
        return f"shape is {entry['shape']!r}; it must have {', '.join(fields)}"
    config = entry["config"]
    if not isinstance(config, dict) or not config or not all(_is_count(value) for value in config.values()):
        return f"config is {config!r}; it must have integers >= 0, by field"
    for name in ("microseconds", "default_microseconds"):
        if not isinstance(entry[name], int | float) or not 0 < entry[name] < math.inf:
            return f"{name} is {entry[name]!r}; it must be above 0"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def merged(table: Mapping[Key, Winner], found: Iterable[tuple[Key, Winner | None]]) -> dict[Key, Winner]:
    """The table with what was measured now; None (the default won) takes an entry out."""
    result = dict(table)
    for place, winner in found:
        result.pop(place, None)
        if winner is not None:
            result[place] = winner
    return result
