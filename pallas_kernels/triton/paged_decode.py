"""`paged_decode` on Pallas' Triton backend: one query token a sequence, split over the KV axis.

One program takes one KV head of one sequence over one split of 512 tokens; a second kernel merges the splits that a
sequence has. Tiles and splits lie at fixed token positions, whatever the block size and the width of the table.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.constants import MASKED, SPLIT, TILE
from pallas_kernels.triton.launch import check_launch, pipeline_stages
from pallas_kernels.triton.tiles import (
    MIN_ROWS,
    Math,
    PagedReader,
    Softmax,
    attend,
    for_tiles,
    load_rows,
    padded_width,
    plgpu,
    product_dtype,
    store_rows,
)
from pallas_kernels.tuning import tuned

MERGED = 16  # splits that the merging kernel takes at a time


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is launched.

    Attributes:
        num_warps: of one program.
        num_stages: of the pipeline that brings K and V.
    """

    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_launch(self.num_warps, self.num_stages)


def default_config(q: Array, k_pool: Array) -> Config:
    """For these arrays: registers to spare, and no more shared memory than there is."""
    width, dtype = padded_width(q.shape[-1]), product_dtype(q, k_pool)
    few = 256 if dtype == k_pool.dtype else 128  # bytes of a row; to convert one takes registers
    num_warps = 4 if width * dtype.itemsize <= few else 8
    return Config(num_warps, num_stages=pipeline_stages(width * k_pool.dtype.itemsize))


def paged_decode(
    q: Float[Array, "seqs heads head_dim"],
    k_pool: Num[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Num[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    v_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    interpret: bool = False,
    config: Config | None = None,
) -> tuple[Float[Array, "seqs heads head_dim"], Float[Array, "seqs heads"]]:
    """One query token per sequence, the last of its `seq_lens` tokens; zeros and MASKED for a row of length 0."""
    seqs, heads, head_dim = q.shape
    kv_heads, block_size = k_pool.shape[1:3]
    splits = pl.cdiv(block_tables.shape[1] * block_size, SPLIT)
    config = config or tuned(Config, "triton", "paged_decode", q, k_pool) or default_config(q, k_pool)
    out_dtype = q.dtype if splits == 1 else jnp.float32
    body = functools.partial(
        _decode_split, kv_heads=kv_heads, sliding_window=sliding_window, how=Math.of(q, k_pool, scale, soft_cap)
    )
    scales = () if k_scale is None or v_scale is None else (k_scale, v_scale)
    out, lse = pl.pallas_call(
        body,
        grid=(seqs, kv_heads, splits),
        out_shape=(
            jax.ShapeDtypeStruct((splits, seqs * heads, head_dim), out_dtype),
            jax.ShapeDtypeStruct((splits, seqs * heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_decode",
    )(q.reshape(-1, head_dim), block_tables, seq_lens, k_pool, v_pool, *scales)
    if splits > 1:
        out, lse = pl.pallas_call(
            functools.partial(_merge_splits, heads=heads, sliding_window=sliding_window),
            grid=(seqs * heads,),
            out_shape=(jax.ShapeDtypeStruct(out.shape[1:], q.dtype), jax.ShapeDtypeStruct(lse.shape[1:], jnp.float32)),
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
            name="paged_decode_merge",
        )(out, lse, seq_lens)
    return out.reshape(q.shape), lse.reshape(seqs, heads)


def _decode_split(
    q_ref,  # [seqs * heads, head_dim]
    table_ref,  # [seqs, max_blocks]
    len_ref,  # [seqs]
    k_ref,  # [blocks, kv_heads, block_size, head_dim]
    v_ref,  # the same
    *refs,  # if the pool is quantised, scales of K and V, [blocks, kv_heads, block_size]; then the results:
    # [splits, seqs * heads, head_dim] and [splits, seqs * heads]
    kv_heads: int,
    sliding_window: int | None,
    how: Math,
):
    *scale_refs, out_ref, lse_ref = refs
    seq, head, split = (pl.program_id(axis) for axis in range(3))
    group = q_ref.shape[0] // table_ref.shape[0] // kv_heads
    rows, width = max(MIN_ROWS, pl.next_power_of_2(group)), padded_width(q_ref.shape[1])
    reader = PagedReader(k_ref, v_ref, tuple(scale_refs), table_ref, seq, head)
    begin, end = _seen(len_ref[seq], sliding_window)
    member = jnp.arange(rows)
    q_row = (seq * kv_heads + head) * group + member
    q = load_rows(q_ref, width, member < group, q_row)

    def step(state, position):
        seen = (position >= begin) & (position < end)
        return attend(state, q, reader.read(position, seen), seen[None], how)

    per_split = SPLIT // TILE
    first = jnp.maximum(split * per_split, begin // TILE)
    last = jnp.minimum((split + 1) * per_split, pl.cdiv(end, TILE))
    out, lse = for_tiles(first, last, Softmax.start(rows, width), step).finish()
    # A split without keys is not read again, unless it is the only one.
    wanted = (member < group) & ((first < last) | (pl.num_programs(2) == 1))
    store_rows(out_ref, out, wanted, split, q_row)
    plgpu.store(lse_ref.at[jnp.full_like(q_row, split), q_row], lse, mask=wanted)


def _merge_splits(
    part_ref,  # [splits, seqs * heads, head_dim]
    part_lse_ref,  # [splits, seqs * heads]
    len_ref,  # [seqs]
    out_ref,  # [seqs * heads, head_dim]
    lse_ref,  # [seqs * heads]
    *,
    heads: int,
    sliding_window: int | None,
):
    row = pl.program_id(0)
    width = padded_width(part_ref.shape[2])
    begin, end = _seen(len_ref[row // heads], sliding_window)
    first, last = begin // SPLIT, pl.cdiv(end, SPLIT)

    def step(i, state):
        out, top, total = state
        split = i * MERGED + jnp.arange(MERGED)
        there = (split >= first) & (split < last)
        part = load_rows(part_ref, width, there, split, row)
        lse = plgpu.load(part_lse_ref.at[split, jnp.full_like(split, row)], mask=there, other=MASKED)
        new_top = jnp.maximum(top, lse.max())
        weights = jnp.where(there, jnp.exp(lse - new_top), 0)
        decay = jnp.exp(top - new_top)
        return out * decay + (part * weights[:, None]).sum(axis=0), new_top, total * decay + weights.sum()

    zero = jnp.zeros((), jnp.float32)
    start = (jnp.zeros(width, jnp.float32), zero + MASKED, zero)
    out, top, total = lax.fori_loop(first // MERGED, pl.cdiv(last, MERGED), step, start)
    safe = jnp.where(total > 0, total, 1)
    store_rows(out_ref, (out / safe)[None], jnp.ones(1, bool), row)
    lse_ref[row] = jnp.where(total > 0, top + jnp.log(safe), MASKED)


def _seen(seq_len: Int[Array, ""], sliding_window: int | None) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The first position that the last token of a sequence attends to, and the one behind the last."""
    begin = jnp.zeros_like(seq_len) if sliding_window is None else jnp.maximum(seq_len - sliding_window, 0)
    return begin, seq_len
