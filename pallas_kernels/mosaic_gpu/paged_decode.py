"""`paged_decode` on Mosaic GPU: one query token a sequence, split over the KV axis."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.constants import SPLIT, TILE
from pallas_kernels.mosaic_gpu import sources
from pallas_kernels.mosaic_gpu.attend import Config, Mask, Split, Work, attend, deepest
from pallas_kernels.mosaic_gpu.merge import merge_splits, padded

ROW_ALIGNMENT = 8  # rows of a tile of shared memory


def default_config(head_dim: int, itemsize: int) -> Config:
    """As many stages as fit, to have as many bytes as possible on their way: decoding waits for nothing else."""
    return deepest(head_dim, itemsize, consumers=1, partial=True)


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
    interpret: Any = False,
    config: Config | None = None,
) -> tuple[Float[Array, "seqs heads head_dim"], Float[Array, "seqs heads"]]:
    """One query token per sequence, the last of its `seq_lens` tokens; zeros for a row of length 0."""
    seqs, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_pool.shape
    group = heads // kv_heads
    rows = pl.cdiv(group, ROW_ALIGNMENT) * ROW_ALIGNMENT
    splits = pl.cdiv(block_tables.shape[1] * block_size, SPLIT)
    tiles = jnp.pad(q.reshape(seqs, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    out, lse = attend(
        tiles,
        k_pool,
        v_pool,
        (block_tables,),
        sources.gathered(k_scale, block_tables) + sources.gathered(v_scale, block_tables),
        Work(jnp.arange(seqs, dtype=jnp.int32), seq_lens - 1, seq_lens, tokens=1),
        source=sources.paged(block_size),
        mask=Mask(scale, sliding_window=sliding_window, soft_cap=soft_cap),
        config=config or default_config(head_dim, k_pool.dtype.itemsize),
        split=Split(splits, SPLIT // TILE, padded(head_dim)) if splits > 1 else None,
        interpret=interpret,
    )
    if splits > 1:
        begin = jnp.zeros_like(seq_lens) if sliding_window is None else jnp.maximum(seq_lens - sliding_window, 0)
        first, last = begin // SPLIT, pl.cdiv(seq_lens, SPLIT)
        out, lse = merge_splits(out, lse, first, last, group, q.dtype, interpret)
    else:
        out = jnp.where((seq_lens > 0)[:, None, None, None], out, 0)
    return out[:, :, :group, :head_dim].reshape(q.shape), lse[..., :group].reshape(seqs, heads)
