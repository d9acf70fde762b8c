"""Paged attention in plain XLA: the fast path on the CPU, and the fallback on chips that have no Pallas kernel.

Nothing the size of the pool or of the table's full width is ever read or built. The KV axis is walked in tiles of 64
tokens at fixed positions, with an online softmax in float32, only as far as the sequences at hand reach.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

TILE = 64  # tokens
QUERY_TILE = 64  # query tokens of one sequence
MASKED = -1e30  # finite: a row with no keys must not turn into NaN


def _gather_tile(pool: Array, table: Array, tile: Array) -> Array:
    """Tile number `tile` of each row: [rows, kv_heads, TILE, head_dim].

    Every unit copied is one contiguous run of one head, at most a tile long, so that XLA:CPU copies it whole.
    """
    num_blocks, kv_heads, block_size, head_dim = pool.shape
    unit = min(block_size, TILE)
    parts = block_size // unit
    units = tile * (TILE // unit) + jnp.arange(TILE // unit)
    blocks = jnp.take(table, units // parts, axis=1, mode="fill", fill_value=0)
    heads = jnp.arange(kv_heads)[None, :, None]
    index = (blocks[:, None] * kv_heads + heads) * parts + units % parts
    runs = pool.reshape(num_blocks * kv_heads * parts, unit * head_dim)
    out = runs.at[index].get(mode="clip")
    return out.reshape(table.shape[0], kv_heads, TILE, head_dim)


def _attend_tile(carry, q, k, v, keep, soft_cap):
    """One step of the online softmax. q [b, rows, d], k and v [b, TILE, d], keep [b, rows or 1, TILE]."""
    out, top, total = carry
    scores = jnp.einsum("bqd,btd->bqt", q, k, preferred_element_type=jnp.float32, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(keep, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    weights = jnp.where(keep, jnp.exp(scores - new_top[..., None]), 0)
    decay = jnp.exp(top - new_top)
    v = jnp.where(keep.any(axis=1)[..., None], v, 0)
    new = jnp.einsum("bqt,btd->bqd", weights, v, preferred_element_type=jnp.float32, precision="highest")
    return out * decay[..., None] + new, new_top, total * decay + weights.sum(axis=-1)


def _start(batch: int, rows: int, head_dim: int):
    zeros = jnp.zeros((batch, rows), jnp.float32)
    return jnp.zeros((batch, rows, head_dim), jnp.float32), zeros + MASKED, zeros


def _finish(carry) -> Array:
    out, _, total = carry
    return out / jnp.where(total > 0, total, 1)[..., None]


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
    """One query token per sequence, the last of its `seq_lens` tokens."""
    seqs, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    queries = (q.astype(jnp.float32) * scale).reshape(seqs * kv_heads, heads // kv_heads, head_dim)
    first = jnp.zeros_like(seq_lens) if sliding_window is None else jnp.maximum(seq_lens - sliding_window, 0)
    start = jnp.min(jnp.where(seq_lens > 0, first, jnp.iinfo(jnp.int32).max)) // TILE

    def step(tile, carry):
        position = tile * TILE + jnp.arange(TILE)
        keep = (position < seq_lens[:, None]) & (position >= first[:, None])
        keep = jnp.repeat(keep, kv_heads, axis=0)[:, None]
        k, v = (
            _gather_tile(p, block_tables, tile).reshape(-1, TILE, head_dim).astype(jnp.float32) for p in (k_pool, v_pool)
        )
        return _attend_tile(carry, queries, k, v, keep, soft_cap)

    carry = _start(seqs * kv_heads, heads // kv_heads, head_dim)
    carry = lax.fori_loop(start, _cdiv(jnp.max(seq_lens), TILE), step, carry)
    return _finish(carry).reshape(seqs, heads, head_dim).astype(q.dtype)


def _cdiv(a, b):
    return (a + b - 1) // b


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
    """Ragged: prefill chunks and decodes in one call, causal; a sequence's queries are its last tokens."""
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    tokens = q.shape[0]
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    decode_lens = jnp.where(query_lens == 1, seq_lens, 0)
    rows = q.at[query_start_loc[:-1]].get(mode="clip")
    decoded = paged_decode(rows, k_pool, v_pool, block_tables, decode_lens, **options)
    token = jnp.arange(tokens)
    owner = (query_start_loc[1:] <= token[:, None]).sum(axis=1)
    owner_lens = query_lens.at[owner].get(mode="fill", fill_value=0)
    out = jnp.where((owner_lens == 1)[:, None, None], decoded.at[owner].get(mode="clip"), 0)
    if tokens == 1:
        return out
    tile = min(QUERY_TILE, tokens)
    return _attend_chunks(out, q, k_pool, v_pool, block_tables, seq_lens, query_start_loc, tile, **options)


def _attend_chunks(
    out, q, k_pool, v_pool, block_tables, seq_lens, query_start_loc, rows, *, scale, sliding_window, soft_cap
):
    """Fills in the tokens of sequences with more than one query token, `rows` of them at a time."""
    tokens, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    tile_ends = jnp.cumsum(jnp.where(query_lens > 1, _cdiv(query_lens, rows), 0))

    def attend(i, out):
        seq = (tile_ends <= i).sum()
        first_tile = tile_ends[seq] - _cdiv(query_lens[seq], rows)
        offset = (i - first_tile) * rows
        # Near the end of the flat axis the slice would be clamped; shift the rows it holds instead.
        begin = jnp.minimum(query_start_loc[seq] + offset, tokens - rows)
        local = begin - query_start_loc[seq] + jnp.arange(rows)
        valid = (local >= offset) & (local < query_lens[seq])
        position = seq_lens[seq] - query_lens[seq] + local
        tile_q = lax.dynamic_slice_in_dim(q, begin, rows).astype(jnp.float32) * scale
        tile_q = tile_q.reshape(rows, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        tile_q = tile_q.reshape(kv_heads, group * rows, head_dim)
        table = lax.dynamic_slice_in_dim(block_tables, seq, 1)
        last = jnp.max(jnp.where(valid, position, -1))
        low = jnp.min(jnp.where(valid, position, jnp.iinfo(jnp.int32).max))
        start = 0 if sliding_window is None else jnp.maximum(low - sliding_window + 1, 0) // TILE

        def step(tile, carry):
            key = tile * TILE + jnp.arange(TILE)
            keep = (key[None] <= position[:, None]) & valid[:, None]
            if sliding_window is not None:
                keep &= key[None] > position[:, None] - sliding_window
            keep = jnp.tile(keep, (group, 1))[None]
            k, v = (_gather_tile(p, table, tile)[0].astype(jnp.float32) for p in (k_pool, v_pool))
            return _attend_tile(carry, tile_q, k, v, keep, soft_cap)

        carry = _start(kv_heads, group * rows, head_dim)
        carry = lax.fori_loop(start, last // TILE + 1, step, carry)
        new = _finish(carry).reshape(kv_heads, group, rows, head_dim).transpose(2, 0, 1, 3)
        new = new.reshape(rows, heads, head_dim).astype(out.dtype)
        old = lax.dynamic_slice_in_dim(out, begin, rows)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(valid[:, None, None], new, old), begin, 0)

    return lax.fori_loop(0, tile_ends[-1], attend, out)


def write_kv(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    slot_mapping: Int[Array, " tokens"],
) -> tuple[Array, Array]:
    """New K and V into their slots, in place when the pools are donated."""
    tokens, kv_heads, head_dim = k.shape
    block_size = k_pool.shape[2]

    def put(i, pools):
        block, offset = slot_mapping[i] // block_size, slot_mapping[i] % block_size
        return tuple(
            lax.dynamic_update_slice(
                pool,
                lax.dynamic_slice_in_dim(new, i, 1).reshape(1, kv_heads, 1, head_dim).astype(pool.dtype),
                (block, 0, offset, 0),
            )
            for pool, new in zip(pools, (k, v), strict=True)
        )

    return lax.fori_loop(0, tokens, put, (k_pool, v_pool))
