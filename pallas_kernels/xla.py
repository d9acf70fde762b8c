"""Paged attention in plain XLA: the fast path on the CPU, and the fallback on chips that have no Pallas kernel.

Nothing the size of the pool or of the table's full width is ever read or built. The KV axis is walked in tiles of 64
tokens at fixed positions, with an online softmax in float32, only as far as the sequences at hand reach.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

TILE = 64  # tokens
QUERY_ROWS = 64  # query tokens of one sequence that are attended together
DECODE_ROWS = 8  # sequences that are decoded together
MASKED = -1e30  # finite: a row with no keys must not turn into NaN


class _Softmax(NamedTuple):
    """Online softmax in progress: the weighted sum of V so far, the largest score, and the sum of weights."""

    out: Float[Array, "batch rows head_dim"]
    top: Float[Array, "batch rows"]
    total: Float[Array, "batch rows"]

    @classmethod
    def start(cls, batch: int, rows: int, head_dim: int) -> _Softmax:
        zeros = jnp.zeros((batch, rows), jnp.float32)
        return cls(jnp.zeros((batch, rows, head_dim), jnp.float32), zeros + MASKED, zeros)

    def finish(self) -> Float[Array, "batch rows head_dim"]:
        return self.out / jnp.where(self.total > 0, self.total, 1)[..., None]


def _cdiv(a: Array, b: int) -> Array:
    return (a + b - 1) // b


def _gather_tile(
    pools: tuple[Array, Array], tables: Int[Array, "seqs max_blocks"], tile: Array, seen: Bool[Array, "seqs tile"]
) -> tuple[Array, Array]:
    """K and V of tile number `tile` of each sequence, [seqs * kv_heads, TILE, head_dim] in float32; V is zero where not `seen`.

    What is copied at once is one contiguous run of one head, at most a tile long. The copy stands in a branch of its own
    because XLA:CPU would fuse it with the reshape behind it, and then copies number by number, at a quarter of the speed.
    """
    num_blocks, kv_heads, block_size, head_dim = pools[0].shape
    run = min(block_size, TILE)
    parts = block_size // run
    runs = tile * (TILE // run) + jnp.arange(TILE // run)
    blocks = tables.at[:, runs // parts].get(mode="fill", fill_value=0)
    index = (blocks[:, None] * kv_heads + jnp.arange(kv_heads)[:, None]) * parts + runs % parts
    index = jnp.clip(index.reshape(-1), 0, num_blocks * kv_heads * parts - 1)

    def copy(pool):
        return pool.reshape(-1, run * head_dim).at[index].get(mode="promise_in_bounds")

    def copy_seen():
        mask = jnp.broadcast_to(seen.reshape(-1, 1, TILE // run, run, 1), (len(tables), kv_heads, TILE // run, run, head_dim))
        return copy(pools[0]), jnp.where(mask.reshape(-1, run * head_dim), copy(pools[1]), 0)

    k, v = lax.cond(seen.all(), lambda: (copy(pools[0]), copy(pools[1])), copy_seen)
    return tuple(x.reshape(-1, TILE, head_dim).astype(jnp.float32) for x in (k, v))


def _attend_tile(
    state: _Softmax,
    q: Float[Array, "batch rows head_dim"],
    k: Float[Array, "batch tile head_dim"],
    v: Float[Array, "batch tile head_dim"],
    keep: Bool[Array, "batch_or_1 rows_or_1 tile"],
    soft_cap: float | None,
) -> _Softmax:
    scores = jnp.einsum("bqd,btd->bqt", q, k, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(keep, scores, MASKED)
    top = jnp.maximum(state.top, scores.max(axis=-1))
    weights = jnp.where(keep, jnp.exp(scores - top[..., None]), 0)
    decay = jnp.exp(state.top - top)
    out = state.out * decay[..., None] + jnp.einsum("bqt,btd->bqd", weights, v, precision="highest")
    return _Softmax(out, top, state.total * decay + weights.sum(axis=-1))


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
    """One query token per sequence, the last of its `seq_lens` tokens.

    Sequences of like length are decoded together, so that the work follows the tokens there are and rows of length 0
    cost nothing.
    """
    seqs, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    rows = min(DECODE_ROWS, seqs)
    lens = jnp.pad(seq_lens, (0, -seqs % rows))
    order = jnp.argsort(-lens)
    shape = (-1, rows * kv_heads, heads // kv_heads, head_dim)
    queries = (q.at[order].get(mode="clip").astype(jnp.float32) * scale).reshape(shape)

    def attend(i, out):
        chosen = lax.dynamic_slice_in_dim(order, i * rows, rows)
        ends = lens[chosen]
        begins = jnp.zeros_like(ends) if sliding_window is None else jnp.maximum(ends - sliding_window, 0)
        tables = block_tables.at[chosen].get(mode="clip")

        def step(tile, state):
            position = tile * TILE + jnp.arange(TILE)
            seen = (position < ends[:, None]) & (position >= begins[:, None])
            k, v = _gather_tile((k_pool, v_pool), tables, tile, seen)
            return _attend_tile(state, queries[i], k, v, jnp.repeat(seen, kv_heads, axis=0)[:, None], soft_cap)

        first = jnp.where(ends > 0, begins, ends[0]).min() // TILE
        state = lax.fori_loop(first, _cdiv(ends[0], TILE), step, _Softmax.start(*shape[1:]))
        return lax.dynamic_update_index_in_dim(out, state.finish(), i, 0)

    out = lax.fori_loop(0, _cdiv((lens > 0).sum(), rows), attend, jnp.zeros_like(queries))
    return out.reshape(-1, heads, head_dim)[jnp.argsort(order)[:seqs]].astype(q.dtype)


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
    query_lens = jnp.diff(query_start_loc)
    rows = q.at[query_start_loc[:-1]].get(mode="clip")
    decoded = paged_decode(rows, k_pool, v_pool, block_tables, jnp.where(query_lens == 1, seq_lens, 0), **options)
    out = _to_tokens(decoded, query_start_loc, len(q))
    if len(q) == 1:
        return out
    return _attend_chunks(out, q, k_pool, v_pool, block_tables, seq_lens, query_start_loc, **options)


def _to_tokens(decoded: Array, query_start_loc: Array, num_tokens: int) -> Array:
    """Rows of sequences with one query token, at their place on the token axis; zeros elsewhere."""
    token = jnp.arange(num_tokens)
    seq = (query_start_loc[1:] <= token[:, None]).sum(axis=1)
    alone = jnp.diff(query_start_loc).at[seq].get(mode="fill", fill_value=0) == 1
    return jnp.where(alone[:, None, None], decoded.at[seq].get(mode="clip"), 0)


def _attend_chunks(
    out, q, k_pool, v_pool, block_tables, seq_lens, query_start_loc, *, scale, sliding_window, soft_cap
) -> Array:
    """Fills in the tokens of sequences with more than one query token, QUERY_ROWS of one sequence at a time."""
    tokens, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    rows = min(QUERY_ROWS, tokens)
    query_lens = jnp.diff(query_start_loc)
    chunk_ends = jnp.cumsum(jnp.where(query_lens > 1, _cdiv(query_lens, rows), 0))

    def attend(i, out):
        seq = (chunk_ends <= i).sum()
        offset = (i - chunk_ends[seq] + _cdiv(query_lens[seq], rows)) * rows
        # A slice must not run over the end of the token axis: there it begins earlier, and its first rows are not ours.
        begin = jnp.minimum(query_start_loc[seq] + offset, tokens - rows)
        local = begin - query_start_loc[seq] + jnp.arange(rows)
        ours = (local >= offset) & (local < query_lens[seq])
        position = seq_lens[seq] - query_lens[seq] + local
        first, last = position[0] + offset - local[0], jnp.where(ours, position, -1).max()
        table = lax.dynamic_slice_in_dim(block_tables, seq, 1)
        queries = lax.dynamic_slice_in_dim(q, begin, rows).astype(jnp.float32) * scale
        queries = queries.reshape(rows, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, group * rows, head_dim)

        def step(tile, state):
            key = tile * TILE + jnp.arange(TILE)
            keep = (key <= position[:, None]) & ours[:, None]
            seen = key <= last
            if sliding_window is not None:
                keep &= key > position[:, None] - sliding_window
                seen &= key > first - sliding_window
            k, v = _gather_tile((k_pool, v_pool), table, tile, seen[None])
            return _attend_tile(state, queries, k, v, jnp.tile(keep, (group, 1))[None], soft_cap)

        start = 0 if sliding_window is None else jnp.maximum(first - sliding_window + 1, 0) // TILE
        state = lax.fori_loop(start, last // TILE + 1, step, _Softmax.start(*queries.shape))
        new = state.finish().reshape(kv_heads, group, rows, head_dim).transpose(2, 0, 1, 3)
        new = new.reshape(rows, heads, head_dim).astype(out.dtype)
        old = lax.dynamic_slice_in_dim(out, begin, rows)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(ours[:, None, None], new, old), begin, 0)

    return lax.fori_loop(0, chunk_ends[-1], attend, out)


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

        def into(pool, new):
            token = lax.dynamic_slice_in_dim(new, i, 1).reshape(1, kv_heads, 1, head_dim)
            return lax.dynamic_update_slice(pool, token.astype(pool.dtype), (block, 0, offset, 0))

        return into(pools[0], k), into(pools[1], v)

    return lax.fori_loop(0, tokens, put, (k_pool, v_pool))
