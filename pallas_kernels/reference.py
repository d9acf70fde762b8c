"""PagedAttention as it stands on the page (section 4.1 of the paper), for readers and for tests; not for speed.

The three steps: raw scores block by block; one softmax over all of them; the blocks' values, weighted and summed.
`paged_decode_online` beside it is what the kernels do instead: one pass, with a softmax that is corrected as it goes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.constants import MASKED, QUANTIZED

_einsum = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


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
    k_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    v_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
) -> tuple[Float[Array, "seqs heads head_dim"], Float[Array, "seqs heads"]]:
    """One query token per sequence, the last of its `seq_lens` tokens; zeros for a sequence of length 0."""
    _, kv_heads, block_size, _ = k_pool.shape

    def attend(row):
        query, table, seq_len = row
        query = query.reshape(kv_heads, -1, query.shape[-1]).astype(jnp.float32)
        keys, values = _dequantize(k_pool, k_scale, table), _dequantize(v_pool, v_scale, table)
        seen = _seen(jnp.arange(len(table) * block_size), seq_len, sliding_window).reshape(-1, block_size)
        # What nobody sees may be anything, NaN too, and 0 x NaN is NaN.
        values = jnp.where(seen[:, None, :, None], values, 0)

        scores = _cap(_einsum("kgd,bktd->kgbt", query, keys) * scale, soft_cap)  # step 1

        scores = jnp.where(seen, scores, MASKED)  # step 2
        top = scores.max(axis=(-2, -1), keepdims=True)
        weights = jnp.where(seen, jnp.exp(scores - top), 0)
        total = weights.sum(axis=(-2, -1), keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1)

        out = _einsum("kgbt,bktd->kgd", weights, values)  # step 3
        lse = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), MASKED)
        return out.reshape(q.shape[1:]), lse.reshape(-1)

    out, lse = lax.map(attend, (q, block_tables, seq_lens))
    return out.astype(q.dtype), lse


def paged_decode_online(
    q: Float[Array, "seqs heads head_dim"],
    k_pool: Real[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Real[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    v_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
) -> tuple[Float[Array, "seqs heads head_dim"], Float[Array, "seqs heads"]]:
    """`paged_decode` in one pass over the blocks: what came before is rescaled whenever a larger score turns up."""
    _, kv_heads, block_size, _ = k_pool.shape

    def attend(row):
        query, table, seq_len = row
        query = query.reshape(kv_heads, -1, query.shape[-1]).astype(jnp.float32)

        def one_block(i, state):
            out, top, total = state
            keys, values = _dequantize(k_pool, k_scale, table[i]), _dequantize(v_pool, v_scale, table[i])
            seen = _seen(i * block_size + jnp.arange(block_size), seq_len, sliding_window)
            values = jnp.where(seen[:, None], values, 0)
            scores = jnp.where(seen, _cap(_einsum("kgd,ktd->kgt", query, keys) * scale, soft_cap), MASKED)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
            decay = jnp.exp(top - new_top)
            out = out * decay[..., None] + _einsum("kgt,ktd->kgd", weights, values)
            return out, new_top, total * decay + weights.sum(axis=-1)

        zeros = jnp.zeros(query.shape[:2], jnp.float32)
        start = (jnp.zeros_like(query), zeros + MASKED, zeros)
        out, top, total = lax.fori_loop(0, (seq_len + block_size - 1) // block_size, one_block, start)
        safe = jnp.where(total > 0, total, 1)
        lse = jnp.where(total > 0, top + jnp.log(safe), MASKED)
        return (out / safe[..., None]).reshape(q.shape[1:]), lse.reshape(-1)

    out, lse = lax.map(attend, (q, block_tables, seq_lens))
    return out.astype(q.dtype), lse


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
    k_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    v_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
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
        k_scale=k_scale,
        v_scale=v_scale,
    )


def standard_attention(
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
    """Contiguous, with all scores in memory: the three operations as they are usually written."""
    batch, q_len, _, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    lens = jnp.full(batch, kv_len) if kv_lens is None else kv_lens
    position = jnp.arange(kv_len)
    last = lens[:, None] - q_len + jnp.arange(q_len) if causal else jnp.broadcast_to(lens[:, None] - 1, (batch, q_len))
    seen = position <= last[..., None]
    if sliding_window is not None:
        seen &= position > last[..., None] - sliding_window
    seen = seen[:, None, None]
    v = jnp.where((position < lens[:, None])[..., None, None], v, 0)
    scores = _cap(_einsum("bqkgd,btkd->bkgqt", q.reshape(batch, q_len, kv_heads, -1, head_dim), k) * scale, soft_cap)
    scores = jnp.where(seen, scores, MASKED)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    out = _einsum("bkgqt,btkd->bqkgd", weights / jnp.where(total > 0, total, 1), v.astype(jnp.float32))
    return out.reshape(q.shape).astype(q.dtype)


def quantize_kv(
    k: Float[Array, "tokens kv_heads head_dim"], v: Float[Array, "tokens kv_heads head_dim"], dtype: jnp.dtype
) -> tuple[Array, Array, Array, Array]:
    """K and V as int8 or float8 numbers, and behind them their scales: one per token and head, by its largest number.

    A token of zeros has the scale 0; a token with a NaN has a scale of NaN, so that it is not lost.
    """
    largest = QUANTIZED[str(dtype)]

    def quantize(x):
        x = x.astype(jnp.float32)
        scale = jnp.abs(x).max(axis=-1) / largest
        x = jnp.clip(x / jnp.where(scale == 0, 1, scale)[..., None], -largest, largest)
        return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype), scale

    (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
    return k, v, k_scale, v_scale


def write_kv(
    new: tuple[Array, ...], pools: tuple[Array, ...], slot_mapping: Int[Array, " tokens"]
) -> tuple[Array, ...]:
    """New K and V, and their scales if there are any, into their slots; a slot outside the pool is dropped.

    Args:
        new: [tokens, kv_heads, head_dim] twice, then [tokens, kv_heads] twice.
        pools: [blocks, kv_heads, block_size, head_dim] twice, then [blocks, kv_heads, block_size] twice.
        slot_mapping: one slot for each token.
    """
    block_size = pools[0].shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size

    def put(pool, tokens):
        slots = pool.at[block, :, offset]
        return slots.set(tokens.astype(pool.dtype), mode="drop", wrap_negative_indices=False)

    return tuple(put(pool, tokens) for pool, tokens in zip(pools, new, strict=True))


def _dequantize(pool: Array, scale: Array | None, blocks: Array) -> Array:
    """Some blocks of a pool in float32."""
    wide = pool[blocks].astype(jnp.float32)
    return wide if scale is None else wide * scale[blocks][..., None]


def _seen(position: Array, seq_len: Array, sliding_window: int | None) -> Array:
    """Which positions the last token of a sequence attends to."""
    seen = position < seq_len
    return seen if sliding_window is None else seen & (position >= seq_len - sliding_window)


def _cap(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
