"""`write_kv` on TPUs: XLA's own scatter, which there writes rows in place.

A kernel of ours could write no less than a tile of 8 to 32 rows, as DMAs move whole tiles, and would read each first.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int


def write_kv(
    new: tuple[Array, ...], pools: tuple[Array, ...], slot_mapping: Int[Array, " tokens"], *, interpret: Any = False
) -> tuple[Array, ...]:
    """New K and V, and their scales if there are any, into their slots; a slot outside the pool is dropped."""
    del interpret  # nothing here is a kernel
    _, kv_heads, block_size, _ = pools[0].shape
    # The rows of a token's heads, in the pool seen as [blocks * kv_heads * block_size, head_dim]; a negative slot must
    # not wrap around.
    block = jnp.where(slot_mapping < 0, len(pools[0]), slot_mapping // block_size)
    row = (block[:, None] * kv_heads + jnp.arange(kv_heads)) * block_size + (slot_mapping % block_size)[:, None]

    def put(pool, tokens):
        tokens = tokens.astype(pool.dtype)
        if pool.ndim == 3:
            slots = pool.at[block, :, slot_mapping % block_size]
            return slots.set(tokens, mode="drop", wrap_negative_indices=False)
        flat = pool.reshape(-1, pool.shape[-1]).at[row.reshape(-1)]
        return flat.set(tokens.reshape(-1, pool.shape[-1]), mode="drop", wrap_negative_indices=False).reshape(
            pool.shape
        )

    return tuple(put(pool, tokens) for pool, tokens in zip(pools, new, strict=True))
