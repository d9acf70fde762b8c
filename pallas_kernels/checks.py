"""Argument checks of the public ops: what is wrong is named before anything is traced."""

from __future__ import annotations

import math
from typing import Any

from jaxtyping import Array

FLOATS = ("float32", "bfloat16", "float16")


def attention(q: Array, k_pool: Array, v_pool: Array, block_tables: Array, seq_lens: Array) -> None:
    """Shapes and dtypes that `paged_decode` and `paged_attention` have in common."""
    pools(k_pool, v_pool)
    _rank("q", q, "[tokens or seqs, heads, head_dim]")
    _dtype("q", q, FLOATS)
    _, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    if head_dim != k_pool.shape[3]:
        raise ValueError(f"q has head_dim {head_dim}, but k_pool has {k_pool.shape[3]}; they must be equal")
    if heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads; they must be a multiple of the {kv_heads} KV heads of k_pool")
    _rank("block_tables", block_tables, "[seqs, max_blocks]")
    _dtype("block_tables", block_tables, ("int32",))
    if 0 in block_tables.shape:
        raise ValueError(f"block_tables is {block_tables.shape}; it must hold a row and a column at least")
    _shape("seq_lens", seq_lens, block_tables.shape[:1], "one length for each row of block_tables")
    _dtype("seq_lens", seq_lens, ("int32",))


def pools(k_pool: Array, v_pool: Array) -> None:
    """Shapes and dtypes of the two pools."""
    _rank("k_pool", k_pool, "[blocks, kv_heads, block_size, head_dim]")
    _dtype("k_pool", k_pool, FLOATS)
    if v_pool.shape != k_pool.shape or v_pool.dtype != k_pool.dtype:
        raise ValueError(
            f"v_pool is {v_pool.dtype} {v_pool.shape}; it must be as k_pool, {k_pool.dtype} {k_pool.shape}"
        )
    if 0 in k_pool.shape:
        raise ValueError(f"k_pool is {k_pool.shape}; no axis may be empty")
    block_size = k_pool.shape[2]
    if block_size & (block_size - 1):
        raise ValueError(f"k_pool has block_size {block_size} (its axis 2); it must be a power of two")


def one_query_a_sequence(q: Array, block_tables: Array) -> None:
    """Of `paged_decode`."""
    if q.shape[0] != block_tables.shape[0]:
        raise ValueError(
            f"q has {q.shape[0]} rows; paged_decode takes one for each row of block_tables, and those are "
            f"{block_tables.shape[0]}"
        )


def query_start_loc(starts: Array, block_tables: Array) -> None:
    """Of `paged_attention`."""
    expected = (block_tables.shape[0] + 1,)
    _shape("query_start_loc", starts, expected, "one more than there are rows of block_tables")
    _dtype("query_start_loc", starts, ("int32",))


def new_kv(k: Array, v: Array, k_pool: Array, slot_mapping: Array) -> None:
    """The new tokens of `write_kv`."""
    for name, new in (("k", k), ("v", v)):
        _rank(name, new, "[tokens, kv_heads, head_dim]")
        _dtype(name, new, FLOATS)
        _shape(name, new, (k.shape[0], k_pool.shape[1], k_pool.shape[3]), "heads and head_dim as in k_pool")
    _shape("slot_mapping", slot_mapping, k.shape[:1], "one slot for each token of k")
    _dtype("slot_mapping", slot_mapping, ("int32",))


def options(q: Array, scale: Any, sliding_window: Any, soft_cap: Any) -> dict[str, Any]:
    """The options as the backends take them."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not _is_number(scale):
        raise ValueError(f"scale is {scale!r}; it must be a finite number, or None for head_dim ** -0.5")
    if sliding_window is not None and (type(sliding_window) is not int or sliding_window < 1):
        raise ValueError(f"sliding_window is {sliding_window!r}; it must be an integer >= 1 (tokens) or None")
    if soft_cap is not None and (not _is_number(soft_cap) or soft_cap <= 0):
        raise ValueError(f"soft_cap is {soft_cap!r}; it must be a finite number above 0, or None")
    return {
        "scale": float(scale),
        "sliding_window": sliding_window,
        "soft_cap": None if soft_cap is None else float(soft_cap),
    }


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _rank(name: str, array: Array, axes: str) -> None:
    rank = axes.count(",") + 1
    if len(array.shape) != rank:
        raise ValueError(f"{name} is {array.shape}; it must have {rank} axes, {axes}")


def _shape(name: str, array: Array, expected: tuple[int, ...], why: str) -> None:
    if array.shape != expected:
        raise ValueError(f"{name} is {array.shape}; it must be {expected}: {why}")


def _dtype(name: str, array: Array, allowed: tuple[str, ...]) -> None:
    if str(array.dtype) not in allowed:
        raise ValueError(f"{name} is {array.dtype}; it must be {' or '.join(allowed)}")
