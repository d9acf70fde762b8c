"""What tables and lengths hold, checked on demand: values, which shapes and dtypes do not show."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify
from jaxtyping import Array


def validate_batch(
    k_pool: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array | None = None,
    num_tokens: int = 0,
) -> None:
    """Every entry of a batch's arrays is within its limits.

    Raises:
        ValueError: arrays with known values hold a wrong one: which, where, and what is allowed. Values that are traced
            are put to `checkify.check` instead.
    """
    num_blocks, _, block_size, _ = k_pool.shape
    width = block_tables.shape[1] * block_size
    _within("block_tables", block_tables, 0, num_blocks - 1, f"block ids of a pool of {num_blocks} blocks")
    _within("seq_lens", seq_lens, 0, width, f"tokens in {block_tables.shape[1]} blocks of {block_size}")
    needed = -(-seq_lens // block_size)
    used = jnp.arange(block_tables.shape[1]) < needed[:, None]
    _all("block_tables names the null block 0 within a sequence's length, in {} places", ~used | (block_tables != 0))
    if query_start_loc is None:
        return
    _within("query_start_loc", query_start_loc, 0, num_tokens, f"positions on an axis of {num_tokens} tokens")
    query_lens = jnp.diff(query_start_loc)
    _all("query_start_loc begins with another number than 0 ({} such)", query_start_loc[:1] == 0)
    _all("query_start_loc decreases in {} places", query_lens >= 0)
    _all("query_start_loc gives {} sequences more query tokens than seq_lens says they have", query_lens <= seq_lens)


def validate_slots(k_pool: Array, slot_mapping: Array) -> None:
    """Every slot lies in the pool, and no two tokens outside the null block share one.

    Raises:
        ValueError: as `validate_batch`.
    """
    num_blocks, _, block_size, _ = k_pool.shape
    slots = num_blocks * block_size
    _within("slot_mapping", slot_mapping, 0, slots - 1, f"slots of {num_blocks} blocks of {block_size}")
    ordered = jnp.sort(slot_mapping)
    unique = (ordered[1:] != ordered[:-1]) | (ordered[1:] < block_size)
    _all("slot_mapping names {} slots twice, and which token wins is not said", unique)


def validate_copies(num_blocks: int, src: Array, dst: Array) -> None:
    """Every block lies in the pool; no block is copied to twice, or is both a source and a destination.

    Raises:
        ValueError: as `validate_batch`.
    """
    for name, ids in (("src", src), ("dst", dst)):
        _within(name, ids, 0, num_blocks - 1, f"block ids of a pool of {num_blocks} blocks")
    ordered = jnp.sort(dst)
    _all("dst names {} blocks twice", (ordered[1:] != ordered[:-1]) | (ordered[1:] == 0))
    _all("{} blocks are both in src and in dst", (dst == 0) | ~(dst[:, None] == src[None, :]).any(axis=1))


def _within(name: str, array: Array, low: int, high: int, what: str) -> None:
    good = (array >= low) & (array <= high)
    if not isinstance(good, Tracer):
        if not np.all(good):
            worst = np.asarray(array)[~np.asarray(good)][0]
            raise ValueError(f"{name} holds {worst}; it must hold numbers from {low} to {high}: {what}")
        return
    checkify.check(
        good.all(),
        f"{name} holds {{worst}}; it must hold numbers from {low} to {high}: {what}",
        worst=array.reshape(-1)[jnp.argmin(good.reshape(-1))],
    )


def _all(message: str, good: Array) -> None:
    """`message` with the count of what is not `good`."""
    count = (~good).sum()
    if not isinstance(count, Tracer):
        if count:
            raise ValueError(message.format(int(count)))
        return
    checkify.check(count == 0, message, count)
