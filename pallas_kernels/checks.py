"""Argument checks of the public ops: what is wrong is named before anything is traced."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from pallas_kernels.constants import FLOATS, QUANTIZED

_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_WINDOW = 2**31 - 1


def arrays(**given: Any) -> None:
    """By the names of the arguments."""
    for name, value in given.items():
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise ValueError(f"{name} is {_short(value)}; it must be an array")


def flags(**given: Any) -> None:
    """By the names of the arguments."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {_short(value)}; it must be True or False")


def attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    seq_lens: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> None:
    """Shapes and dtypes that `paged_decode` and `paged_attention` have in common."""
    arrays(q=q, block_tables=block_tables, seq_lens=seq_lens)
    pools(k_pool, v_pool, k_scale, v_scale)
    _rank("q", q, "[tokens or seqs, heads, head_dim]")
    _dtype("q", q, FLOATS)
    _, heads, head_dim = q.shape
    kv_heads, stored_dim = k_pool.shape[1], k_pool.shape[3]
    _stored("q", head_dim, stored_dim)
    _heads("q", heads, kv_heads, "k_pool")
    _rank("block_tables", block_tables, "[seqs, max_blocks]")
    _dtype("block_tables", block_tables, ("int32",))
    if 0 in block_tables.shape:
        raise ValueError(f"block_tables is {block_tables.shape}; it must hold a row and a column at least")
    _shape("seq_lens", seq_lens, block_tables.shape[:1], "one length for each row of block_tables")
    _dtype("seq_lens", seq_lens, ("int32",))


def pools(k_pool: Array, v_pool: Array, k_scale: Array | None = None, v_scale: Array | None = None) -> None:
    """Shapes and dtypes of the two pools and their scales."""
    scales = {name: scale for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)) if scale is not None}
    arrays(k_pool=k_pool, v_pool=v_pool, **scales)
    _rank("k_pool", k_pool, "[blocks, kv_heads, block_size, stored_dim]")
    _dtype("k_pool", k_pool, (*FLOATS, *QUANTIZED))
    if v_pool.shape != k_pool.shape or v_pool.dtype != k_pool.dtype:
        raise ValueError(
            f"v_pool is {v_pool.dtype} {v_pool.shape}; it must be as k_pool, {k_pool.dtype} {k_pool.shape}"
        )
    if 0 in k_pool.shape:
        raise ValueError(f"k_pool is {k_pool.shape}; no axis may be empty")
    block_size = k_pool.shape[2]
    if block_size & (block_size - 1):
        raise ValueError(f"k_pool has block_size {block_size} (its axis 2); it must be a power of two")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _scale(name, scale, k_pool)


def _scale(name: str, scale: Array | None, k_pool: Array) -> None:
    if str(k_pool.dtype) not in QUANTIZED:
        if scale is not None:
            raise ValueError(f"{name} is given, but k_pool is {k_pool.dtype}; scales are for {' and '.join(QUANTIZED)}")
        return
    if scale is None:
        raise ValueError(f"{name} is None; a pool of {k_pool.dtype} needs float32 scales {k_pool.shape[:3]}")
    _shape(name, scale, k_pool.shape[:3], "one scale per token and head, [blocks, kv_heads, block_size]")
    _dtype(name, scale, ("float32",))


def one_query_a_sequence(q: Array, block_tables: Array) -> None:
    """Of `paged_decode`."""
    if q.shape[0] != block_tables.shape[0]:
        raise ValueError(
            f"q has {q.shape[0]} rows; paged_decode takes one for each row of block_tables, and those are "
            f"{block_tables.shape[0]}"
        )


def query_start_loc(starts: Array, block_tables: Array) -> None:
    """Of `paged_attention`."""
    arrays(query_start_loc=starts)
    expected = (block_tables.shape[0] + 1,)
    _shape("query_start_loc", starts, expected, "one more than there are rows of block_tables")
    _dtype("query_start_loc", starts, ("int32",))


def new_kv(k: Array, v: Array, k_pool: Array, slot_mapping: Array) -> None:
    """The new tokens of `write_kv`."""
    arrays(k=k, v=v, slot_mapping=slot_mapping)
    _, kv_heads, _, stored_dim = k_pool.shape
    for name, new in (("k", k), ("v", v)):
        _rank(name, new, "[tokens, kv_heads, head_dim]")
        _dtype(name, new, FLOATS)
        _shape(name, new, (k.shape[0], kv_heads, k.shape[2]), "heads as in k_pool")
        _stored(name, new.shape[2], stored_dim)
    _shape("slot_mapping", slot_mapping, k.shape[:1], "one slot for each token of k")
    _dtype("slot_mapping", slot_mapping, ("int32",))


def pool_tree(tree: Any) -> int:
    """The pools of `copy_blocks`, `gather_blocks` and `scatter_blocks`: how many blocks they have."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError("pools is a pytree without an array; there must be one at least")
    for leaf in leaves:
        arrays(**{"an array of pools": leaf})
    if any(len(leaf.shape) < 1 for leaf in leaves):
        raise ValueError("pools holds a scalar; the first axis of every array must be the block")
    counts = sorted({leaf.shape[0] for leaf in leaves})
    if len(counts) > 1 or counts[0] == 0:
        raise ValueError(f"pools holds arrays of {counts} blocks; all must have as many, and one at least")
    return counts[0]


def block_ids(name: str, ids: Array, like: Array | None = None) -> None:
    """A list of blocks."""
    arrays(**{name: ids})
    _rank(name, ids, "[blocks]")
    _dtype(name, ids, ("int32",))
    if like is not None:
        _shape(name, ids, like.shape, "one destination for each source in src")


def swapped_blocks(tree: Any, ids: Array, blocks: Any) -> None:
    """The blocks of `scatter_blocks`."""
    if jax.tree.structure(tree) != jax.tree.structure(blocks):
        raise ValueError("blocks is a pytree of another structure than pools; they must be alike")
    for pool, new in zip(jax.tree.leaves(tree), jax.tree.leaves(blocks), strict=True):
        arrays(**{"an array of blocks": new})
        _shape("an array of blocks", new, (*ids.shape, *pool.shape[1:]), "as many blocks as ids, shaped as in the pool")
        _dtype("an array of blocks", new, (str(pool.dtype),))


def contiguous(q: Array, k: Array, v: Array, kv_lens: Array | None, causal: bool, sliding_window: Any) -> None:
    """The arrays of `flash_attention` and `standard_attention`."""
    arrays(q=q, k=k, v=v, **({} if kv_lens is None else {"kv_lens": kv_lens}))
    flags(causal=causal)
    for name, array in (("q", q), ("k", k), ("v", v)):
        _rank(name, array, "[batch, tokens, heads, head_dim]")
        _dtype(name, array, FLOATS)
        if 0 in array.shape:
            raise ValueError(f"{name} is {array.shape}; no axis may be empty")
    batch, q_len, heads, head_dim = q.shape
    _shape("k", k, (batch, *k.shape[1:3], head_dim), "batch and head_dim as in q")
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"v is {v.dtype} {v.shape}; it must be as k, {k.dtype} {k.shape}")
    _heads("q", heads, k.shape[2], "k")
    if causal and q_len > k.shape[1]:
        raise ValueError(f"q has {q_len} tokens, but k has {k.shape[1]}; with causal, the queries are among them")
    if sliding_window is not None and not causal:
        raise ValueError(f"sliding_window is {sliding_window!r} without causal; a window looks back from the query")
    if kv_lens is not None:
        _shape("kv_lens", kv_lens, (batch,), "one length for each sequence of q")
        _dtype("kv_lens", kv_lens, ("int32",))


def options(q: Array, scale: Any, sliding_window: Any, soft_cap: Any) -> dict[str, Any]:
    """The options as the backends take them."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not _is_number(scale):
        raise ValueError(
            f"scale is {scale!r}; it must be a finite number, in float32 too, or None for head_dim ** -0.5"
        )
    if sliding_window is not None and not (_is_integer(sliding_window) and 1 <= sliding_window <= _LARGEST_WINDOW):
        raise ValueError(
            f"sliding_window is {sliding_window!r}; it must be an integer >= 1 (tokens) and below 2**31, or None"
        )
    if soft_cap is not None and (not _is_number(soft_cap) or soft_cap <= 0):
        raise ValueError(f"soft_cap is {soft_cap!r}; it must be a finite number above 0, in float32 too, or None")
    return {
        "scale": float(scale),
        "sliding_window": None if sliding_window is None else int(sliding_window),
        "soft_cap": None if soft_cap is None else float(soft_cap),
    }


def _stored(name: str, head_dim: int, stored_dim: int) -> None:
    if head_dim == 0 or stored_dim not in (head_dim, -(-head_dim // 128) * 128):
        raise ValueError(
            f"{name} has head_dim {head_dim}, but k_pool has {stored_dim}; they must be equal, or k_pool's the next "
            "multiple of 128"
        )


def _heads(name: str, heads: int, kv_heads: int, of: str) -> None:
    if heads == 0 or heads % kv_heads:
        raise ValueError(f"{name} has {heads} heads; they must be a multiple of the {kv_heads} KV heads of {of}")


def _is_number(x: Any) -> bool:
    # a numpy scalar is one too; NaN is at most nothing
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and abs(float(x)) <= _LARGEST


def _is_integer(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 60 else text[:57] + "..."


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
