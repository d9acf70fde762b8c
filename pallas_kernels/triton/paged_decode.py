"""`paged_decode` on Pallas' Triton backend: one query token a sequence, split over the KV axis.

One program takes one KV head of one sequence over one split of 512 tokens, in tiles of 64, with an online softmax in
float32; XLA then merges the splits. Tiles and splits lie at fixed token positions, whatever the block size.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.constants import MASKED, TILE
from pallas_kernels.merge import merge_partials

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError as missing:
    raise ImportError(
        f"JAX {jax.__version__} has no Triton backend in Pallas; the backends 'xla' and 'reference' need none"
    ) from missing

TILES_PER_SPLIT = 8
MIN_ROWS = 16  # of a tensor-core tile: smaller query groups are padded
MAX_HEAD_DIM = 256
LOG2E = math.log2(math.e)


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
    k_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    v_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "seqs heads head_dim"], Float[Array, "seqs heads"]]:
    """One query token per sequence, the last of its `seq_lens` tokens; zeros for a row of length 0.

    Products are taken in the wider of the dtypes of `q` and the pools, float32 ones in full (no TF32).
    """
    seqs, heads, head_dim = q.shape
    kv_heads, block_size = k_pool.shape[1:3]
    max_blocks = block_tables.shape[1]
    dtype = jnp.promote_types(q.dtype, k_pool.dtype)
    splits = pl.cdiv(max_blocks * block_size, TILE * TILES_PER_SPLIT)
    body = functools.partial(
        _kernel,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        max_blocks=max_blocks,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        dtype=dtype,
    )
    row_bytes = pl.next_power_of_2(head_dim) * dtype.itemsize
    partial = jax.ShapeDtypeStruct((splits * seqs * heads,), jnp.float32)
    out, top, total = pl.pallas_call(
        body,
        grid=(seqs, kv_heads, splits),
        out_shape=(jax.ShapeDtypeStruct((*partial.shape, head_dim), jnp.float32), partial, partial),
        compiler_params=plgpu.CompilerParams(num_warps=4 if row_bytes <= 256 else 8, num_stages=2),
        interpret=interpret,
        name="paged_decode",
    )(
        q.reshape(-1, head_dim),
        k_pool.reshape(-1, head_dim),
        v_pool.reshape(-1, head_dim),
        block_tables.reshape(-1),
        seq_lens,
    )
    lse = jnp.where(total > 0, (top + jnp.log2(jnp.where(total > 0, total, 1))) / LOG2E, MASKED)
    out = out / jnp.where(total > 0, total, 1)[:, None]
    out, lse = merge_partials(out.reshape(splits, -1, head_dim), lse.reshape(splits, -1))
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(seqs, heads)


def _kernel(
    q_ref,  # [seqs * heads, head_dim]
    k_ref,  # [blocks * kv_heads * block_size, head_dim]
    v_ref,  # the same
    table_ref,  # [seqs * max_blocks]
    len_ref,  # [seqs]
    out_ref,  # [splits * seqs * heads, head_dim]
    top_ref,  # [splits * seqs * heads]
    total_ref,  # the same
    *,
    group: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    max_blocks: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    dtype,
):
    seq, head, split = (pl.program_id(axis) for axis in range(3))
    rows = max(MIN_ROWS, pl.next_power_of_2(group))
    width = max(MIN_ROWS, pl.next_power_of_2(head_dim))
    columns = jnp.arange(width)

    def pick(row, valid):
        """Index of, and mask for, some rows of a two-dimensional array."""
        shape = (row.size, width)
        index = (jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(columns[None], shape))
        return index, valid[:, None] & (columns < head_dim)[None]

    def load(ref, row, valid):
        # What is not valid is never read: past a sequence's end there may be NaN, and 0 x NaN is NaN.
        index, mask = pick(row, valid)
        return plgpu.load(ref.at[index], mask=mask, other=0).astype(dtype)

    def dot(a, b):
        precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
        return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)

    seq_len = len_ref[seq]
    begin = 0 if sliding_window is None else jnp.maximum(seq_len - sliding_window, 0)
    member = jnp.arange(rows)
    q_row = (seq * kv_heads + head) * group + member
    q = load(q_ref, q_row, member < group)

    def step(tile, carry):
        out, top, total = carry
        position = tile * TILE + jnp.arange(TILE)
        seen = (position >= begin) & (position < seq_len)
        logical = position // block_size
        block = plgpu.load(table_ref.at[seq * max_blocks + logical], mask=logical < max_blocks, other=0)
        kv_row = (block * kv_heads + head) * block_size + position % block_size
        k = load(k_ref, kv_row, seen)
        v = load(v_ref, kv_row, seen)
        scores = dot(q, k.T) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen[None], scores * LOG2E, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(seen[None], jnp.exp2(scores - new_top[:, None]), 0)
        decay = jnp.exp2(top - new_top)
        out = out * decay[:, None] + dot(weights.astype(dtype), v)
        return out, new_top, total * decay + weights.sum(axis=-1)

    first = jnp.maximum(split * TILES_PER_SPLIT, begin // TILE)
    last = jnp.minimum((split + 1) * TILES_PER_SPLIT, pl.cdiv(seq_len, TILE))
    zeros = jnp.zeros(rows, jnp.float32)
    carry = (jnp.zeros((rows, width), jnp.float32), zeros + MASKED, zeros)
    out, top, total = lax.fori_loop(first, last, step, carry)
    out_row = split * pl.num_programs(0) * kv_heads * group + q_row
    index, mask = pick(out_row, member < group)
    plgpu.store(out_ref.at[index], out, mask=mask)
    plgpu.store(top_ref.at[out_row], top, mask=member < group)
    plgpu.store(total_ref.at[out_row], total, mask=member < group)
