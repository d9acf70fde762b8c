"""PagedAttention as it stands on the page (section 4.1 of the paper), for readers and for tests; not for speed.

The three steps: raw scores block by block; one softmax over all of them; the blocks' values, weighted and summed.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.constants import MASKED

_einsum = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


def paged_decode(
    q: Float[Array, "seqs heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "seqs heads head_dim"]:
    """One query token per sequence, the last of its `seq_lens` tokens; zeros for a sequence of length 0."""
    _, kv_heads, block_size, _ = k_pool.shape

    def attend(row):
        query, table, seq_len = row
        query = query.reshape(kv_heads, -1, query.shape[-1]).astype(jnp.float32)
        keys, values = k_pool[table].astype(jnp.float32), v_pool[table].astype(jnp.float32)
        position = jnp.arange(len(table) * block_size)
        seen = position < seq_len
        if sliding_window is not None:
            seen &= position >= seq_len - sliding_window
        # What nobody sees may be anything, NaN too, and 0 x NaN is NaN.
        values = jnp.where(seen.reshape(-1, 1, block_size, 1), values, 0)

        scores = _einsum("kgd,bktd->kgbt", query, keys) * scale  # step 1
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)

        scores = jnp.where(seen.reshape(-1, block_size), scores, MASKED)  # step 2
        weights = jnp.exp(scores - scores.max(axis=(-2, -1), keepdims=True))
        weights = jnp.where(seen.any(), weights / weights.sum(axis=(-2, -1), keepdims=True), 0)

        return _einsum("kgbt,bktd->kgd", weights, values).reshape(q.shape[1:])  # step 3

    return lax.map(attend, (q, block_tables, seq_lens)).astype(q.dtype)


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    query_start_loc: Int[Array, " seqs+1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Ragged and causal: each query token sees what a decode of its sequence, cut off behind that token, would."""
    token = jnp.arange(len(q))
    owner = jnp.searchsorted(query_start_loc, token, side="right") - 1
    padding = token >= query_start_loc[-1]
    owner = jnp.where(padding, 0, owner)
    lens = seq_lens[owner] - (query_start_loc[owner + 1] - 1 - token)
    return paged_decode(
        q,
        k_pool,
        v_pool,
        block_tables[owner],
        jnp.where(padding, 0, lens),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def write_kv(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    slot_mapping: Int[Array, " tokens"],
) -> tuple[Array, Array]:
    """New K and V into their slots, in place when the pools are donated; a slot outside the pool is dropped."""
    block_size = k_pool.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size

    def put(pool, new):
        slots = pool.at[block, :, offset]
        return slots.set(new.astype(pool.dtype), mode="drop", wrap_negative_indices=False)

    return put(k_pool, k), put(v_pool, v)
