"""Paged attention in plain XLA: the fast path on the CPU, and the fallback on chips that have no Pallas kernel.

Nothing the size of the pool or of the table's full width is ever read or built. The KV axis is walked in tiles of 128
tokens at fixed positions, with an online softmax in float32, only as far as the sequences at hand reach.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels.constants import MASKED
from pallas_kernels.ragged import decode_singles

TILE = 128  # tokens of the KV axis; half of it means twice as many small operations, 2 to 3 % of a step
QUERY_ROWS = 64  # query tokens of one sequence that are attended together
DECODE_ROWS = 8  # sequences that are decoded together

Scale = Float[Array, "blocks kv_heads block_size"]


def paged_decode(
    q: Float[Array, "seqs heads head_dim"],
    k_pool: Real[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Real[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> tuple[Float[Array, "seqs heads head_dim"], Float[Array, "seqs heads"]]:
    """One query token per sequence, the last of its `seq_lens` tokens; and the log-sum-exp of its scores.

    Sequences of like length are decoded together, so that the work follows the tokens there are and rows of length 0
    cost nothing.
    """
    seqs, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    pools = _Pools(k_pool, v_pool, k_scale, v_scale)
    rows = min(DECODE_ROWS, seqs)
    lens = jnp.pad(seq_lens, (0, -seqs % rows))
    order = jnp.argsort(-lens)
    sorted_lens = lens[order]
    shape = (-1, rows * kv_heads, heads // kv_heads, head_dim)
    queries = (q.at[order].get(mode="clip").astype(jnp.float32) * scale).reshape(shape)

    def attend(i, out):
        seq_ids, ends = (lax.dynamic_slice_in_dim(x, i * rows, rows) for x in (order, sorted_lens))
        begins = jnp.zeros_like(ends) if sliding_window is None else jnp.maximum(ends - sliding_window, 0)

        def step(tile, state):
            k, v, seen = _read_tile(pools, block_tables, seq_ids, tile, begins, ends)
            return _attend_tile(state, queries[i], k, v, jnp.repeat(seen, kv_heads, axis=0)[:, None], soft_cap)

        first = jnp.where(ends > 0, begins, ends[0]).min() // TILE
        state = lax.fori_loop(first, _cdiv(ends[0], TILE), step, _Softmax.start(*shape[1:]))
        return tuple(lax.dynamic_update_index_in_dim(a, b, i, 0) for a, b in zip(out, state.finish(), strict=True))

    nothing = jnp.zeros_like(queries), jnp.full(queries.shape[:-1], MASKED, jnp.float32)
    out, lse = lax.fori_loop(0, _cdiv((lens > 0).sum(), rows), attend, nothing)
    back = jnp.argsort(order)[:seqs]
    return out.reshape(-1, heads, head_dim)[back].astype(q.dtype), lse.reshape(-1, heads)[back]


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Real[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Real[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    query_start_loc: Int[Array, " seqs+1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Ragged: prefill chunks and decodes in one call, causal; a sequence's queries are its last tokens.

    Sequences with a single query token are decoded together.
    """
    tokens = len(q)
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    decode = functools.partial(paged_decode, **options, k_scale=k_scale, v_scale=v_scale)
    out = decode_singles(decode, q, k_pool, v_pool, block_tables, seq_lens, query_start_loc)
    if tokens == 1:
        return out
    chunks = _Chunks.plan(seq_lens, query_start_loc, tokens)
    return _attend_chunks(out, q, _Pools(k_pool, v_pool, k_scale, v_scale), block_tables, chunks, **options)


class _Softmax(NamedTuple):
    """Online softmax in progress: the weighted sum of V so far, the largest score, and the sum of weights."""

    out: Float[Array, "batch rows head_dim"]
    top: Float[Array, "batch rows"]
    total: Float[Array, "batch rows"]

    @classmethod
    def start(cls, batch: int, rows: int, head_dim: int) -> _Softmax:
        zeros = jnp.zeros((batch, rows), jnp.float32)
        return cls(jnp.zeros((batch, rows, head_dim), jnp.float32), zeros + MASKED, zeros)

    def finish(self) -> tuple[Float[Array, "batch rows head_dim"], Float[Array, "batch rows"]]:
        """The attention and its log-sum-exp: zeros and MASKED for a row without keys."""
        total = jnp.where(self.total > 0, self.total, 1)
        return self.out / total[..., None], jnp.where(self.total > 0, self.top + jnp.log(total), MASKED)


class _Pools(NamedTuple):
    """The pools and, where they are quantised, their scales."""

    k: Real[Array, "blocks kv_heads block_size head_dim"]
    v: Real[Array, "blocks kv_heads block_size head_dim"]
    k_scale: Scale | None
    v_scale: Scale | None


class _Chunks(NamedTuple):
    """The sequences with several query tokens, cut into pieces of at most `rows` tokens, one entry a piece.

    A piece is read as a slice of `rows` tokens that never runs over the end of the token axis; so its own tokens may
    be neither the first nor the last of the slice. Positions count from the start of the sequence.
    """

    rows: int
    count: Int[Array, ""]
    seq: Int[Array, " pieces"]
    slice_start: Int[Array, " pieces"]
    slice_position: Int[Array, " pieces"]
    first_position: Int[Array, " pieces"]
    last_position: Int[Array, " pieces"]

    @classmethod
    def plan(cls, seq_lens: Array, query_start_loc: Array, tokens: int) -> _Chunks:
        rows = min(QUERY_ROWS, tokens)
        query_lens = jnp.diff(query_start_loc)
        pieces = jnp.where(query_lens > 1, _cdiv(query_lens, rows), 0)
        ends = jnp.cumsum(pieces)
        piece = jnp.arange(tokens // rows + min(len(seq_lens), tokens // 2))
        seq = jnp.minimum((ends <= piece[:, None]).sum(axis=1), len(seq_lens) - 1)
        offset = (piece - ends[seq] + pieces[seq]) * rows
        start = query_start_loc[seq] + offset
        slice_start = jnp.minimum(start, tokens - rows)
        first = seq_lens[seq] - query_lens[seq] + offset
        last = jnp.minimum(first + rows, seq_lens[seq]) - 1
        return cls(rows, ends[-1], seq, slice_start, first + slice_start - start, first, last)


def _attend_chunks(
    out: tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]],
    q: Float[Array, "tokens heads head_dim"],
    pools: _Pools,
    block_tables: Int[Array, "seqs max_blocks"],
    chunks: _Chunks,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """`out`, attention and log-sum-exp, with the tokens of `chunks` filled in."""
    rows, heads, head_dim = chunks.rows, *q.shape[1:]
    kv_heads = pools.k.shape[1]
    group = heads // kv_heads

    def attend(i, out):
        first, last = chunks.first_position[i], chunks.last_position[i]
        position = chunks.slice_position[i] + jnp.arange(rows)
        begin = jnp.zeros_like(first) if sliding_window is None else jnp.maximum(first - sliding_window + 1, 0)
        queries = lax.dynamic_slice_in_dim(q, chunks.slice_start[i], rows).astype(jnp.float32) * scale
        queries = queries.reshape(rows, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, group * rows, head_dim)

        def step(tile, state):
            k, v, _ = _read_tile(pools, block_tables, chunks.seq[i, None], tile, begin[None], last[None] + 1)
            key = tile * TILE + jnp.arange(TILE)
            keep = key <= position[:, None]
            if sliding_window is not None:
                keep &= key > position[:, None] - sliding_window
            return _attend_tile(state, queries, k, v, jnp.tile(keep, (group, 1))[None], soft_cap)

        state = lax.fori_loop(begin // TILE, last // TILE + 1, step, _Softmax.start(*queries.shape))
        own = (position >= first) & (position <= last)

        def put(all_tokens, new):
            new = jnp.moveaxis(new.reshape(kv_heads, group, rows, -1), 2, 0)
            old = lax.dynamic_slice_in_dim(all_tokens, chunks.slice_start[i], rows)
            mask = own.reshape(-1, *[1] * (old.ndim - 1))
            new = jnp.where(mask, new.reshape(old.shape).astype(old.dtype), old)
            return lax.dynamic_update_slice_in_dim(all_tokens, new, chunks.slice_start[i], 0)

        return tuple(put(a, b) for a, b in zip(out, state.finish(), strict=True))

    return lax.fori_loop(0, chunks.count, attend, out)


def _read_tile(
    pools: _Pools,
    block_tables: Int[Array, "seqs max_blocks"],
    seq_ids: Int[Array, " rows"],
    tile: Int[Array, ""],
    begins: Int[Array, " rows"],
    ends: Int[Array, " rows"],
) -> tuple[
    Float[Array, "pairs tile head_dim"],
    Float[Array, "pairs tile head_dim"],
    Bool[Array, "rows tile"],
]:
    """K and V of one tile of some sequences, in float32, and which of its positions lie in [begins, ends).

    V is zero outside: what lies there may be NaN, and 0 x NaN is NaN. One contiguous run of one head is copied at a
    time, at most a tile long. The copy stands in a branch of its own because XLA:CPU would otherwise fuse it with the
    reshape behind it, and then copy number by number, at half the speed.
    """
    num_blocks, kv_heads, block_size, head_dim = pools.k.shape
    run = min(block_size, TILE)
    parts = block_size // run
    runs = tile * (TILE // run) + jnp.arange(TILE // run)
    blocks = block_tables.at[seq_ids[:, None], runs // parts].get(mode="fill", fill_value=0)
    index = (blocks[:, None] * kv_heads + jnp.arange(kv_heads)[:, None]) * parts + runs % parts
    index = jnp.clip(index.reshape(-1), 0, num_blocks * kv_heads * parts - 1)
    position = tile * TILE + jnp.arange(TILE)
    seen = (position >= begins[:, None]) & (position < ends[:, None])

    def copy(pool):
        return pool.reshape(num_blocks * kv_heads * parts, -1).at[index].get(mode="promise_in_bounds")

    def copy_seen():
        wide = (len(seq_ids), kv_heads, TILE // run, run, head_dim)
        mask = jnp.broadcast_to(seen.reshape(-1, 1, TILE // run, run, 1), wide).reshape(-1, run * head_dim)
        return copy(pools.k), jnp.where(mask, copy(pools.v), 0)

    all_seen = (begins.max() <= position[0]) & (position[-1] < ends.min())
    k, v = lax.cond(all_seen, lambda: (copy(pools.k), copy(pools.v)), copy_seen)
    k, v = (x.reshape(-1, TILE, head_dim).astype(jnp.float32) for x in (k, v))
    if pools.k_scale is not None:
        k_scale, v_scale = (copy(x).reshape(-1, TILE) for x in (pools.k_scale, pools.v_scale))
        v_scale = jnp.where(jnp.repeat(seen, kv_heads, axis=0), v_scale, 0)
        k, v = k * k_scale[..., None], v * v_scale[..., None]
    return k, v, seen


def _attend_tile(
    state: _Softmax,
    q: Float[Array, "batch rows head_dim"],
    k: Float[Array, "batch tile head_dim"],
    v: Float[Array, "batch tile head_dim"],
    keep: Bool[Array, "#batch #rows tile"],
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


def flash_attention(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    kv_lens: Int[Array, " batch"] | None,
    *,
    causal: bool,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "batch q_len heads head_dim"]:
    """Contiguous: tiles of 64 queries of one sequence, or one query each of eight, against tiles of 128 keys."""
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    group, rows, width = heads // kv_heads, min(QUERY_ROWS, q_len), min(TILE, kv_len)
    members = min(batch, max(1, DECODE_ROWS // rows))
    pieces = -(-q_len // rows)
    all_lens = jnp.full(batch, kv_len) if kv_lens is None else kv_lens

    def attend(i, out):
        # A last piece that overlaps the one before computes the shared rows twice, and alike.
        seq = jnp.minimum(i // pieces * members, batch - members)
        start = jnp.minimum(i % pieces * rows, q_len - rows)
        lens = lax.dynamic_slice_in_dim(all_lens, seq, members)
        queries = lax.dynamic_slice(q, (seq, start, 0, 0), (members, rows, heads, head_dim)).astype(jnp.float32) * scale
        queries = queries.reshape(members, rows, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
        queries = queries.reshape(members * kv_heads, group * rows, head_dim)
        ends = start + lens[:, None] - q_len if causal else lens[:, None] - 1
        last = ends + jnp.arange(rows) * causal

        def step(tile, state):
            first = jnp.minimum(tile * width, kv_len - width)
            position = first + jnp.arange(width)
            own = (position >= tile * width) & (position < lens[:, None])

            def read(x):
                part = lax.dynamic_slice(x, (seq, first, 0, 0), (members, width, kv_heads, head_dim))
                return part.astype(jnp.float32).transpose(0, 2, 1, 3).reshape(members * kv_heads, width, head_dim)

            values = jnp.where(jnp.repeat(own, kv_heads, axis=0)[..., None], read(v), 0)
            keep = own[:, None] & (position <= last[..., None])
            if sliding_window is not None:
                keep &= position > last[..., None] - sliding_window
            keep = jnp.repeat(jnp.tile(keep, (1, group, 1)), kv_heads, axis=0)
            return _attend_tile(state, queries, read(k), values, keep, soft_cap)

        begin = 0 if sliding_window is None else jnp.maximum(last.min() - sliding_window + 1, 0) // width
        end = _cdiv(jnp.minimum(lens.max(), last.max() + 1), width)
        state = lax.fori_loop(begin, end, step, _Softmax.start(*queries.shape))
        new = state.finish()[0].reshape(members, kv_heads, group, rows, head_dim).transpose(0, 3, 1, 2, 4)
        new = new.reshape(members, rows, heads, head_dim).astype(q.dtype)
        return lax.dynamic_update_slice(out, new, (seq, start, 0, 0))

    return lax.fori_loop(0, -(-batch // members) * pieces, attend, jnp.zeros_like(q))


def _cdiv(a: Array, b: int) -> Array:
    return (a + b - 1) // b
