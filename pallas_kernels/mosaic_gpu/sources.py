"""Where the attention kernel finds a tile of K and V: in blocks that a table names, or in one run."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.constants import TILE
from pallas_kernels.mosaic_gpu.attend import Source


def paged(block_size: int) -> Source:
    """Pools [blocks, kv_heads, block_size, head_dim], and as the one further array the block tables."""
    blocks = max(TILE // block_size, 1)  # in a tile
    tiles = max(block_size // TILE, 1)  # in a block

    def fetch(pools: Any, arrays: Any, seq: Any, head: Any, begin: Any, end: Any) -> Any:
        (tables,) = arrays

        def copy(tile):
            # What is not seen is not read, the table neither. All ids first: the loads then wait for one another's
            # latency only, and not for a free stage.
            starts = [tile * TILE + j * block_size for j in range(blocks)]
            wanted = [(start < end) & (start + max(block_size, TILE) > begin) for start in starts]
            last = lax.div(end - 1, jnp.int32(block_size))
            ids = [tables[seq, jnp.minimum(lax.div(start, jnp.int32(block_size)), last)] for start in starts]

            def put(which, destination, barrier):
                if tiles > 1:
                    rows = pl.ds(lax.rem(tile, jnp.int32(tiles)) * TILE, TILE)
                    plgpu.copy_gmem_to_smem(pools[which].at[ids[0], head, rows], destination, barrier)
                    return
                for j in range(blocks):
                    rows = destination.at[pl.ds(j * block_size, block_size)]

                    @pl.when(wanted[j])
                    def _(j=j, rows=rows):
                        plgpu.copy_gmem_to_smem(pools[which].at[ids[j], head], rows, barrier)

                    @pl.when(jnp.logical_not(wanted[j]))
                    def _():
                        plgpu.barrier_arrive(barrier)

            return put

        return copy

    return Source(blocks, fetch)


def contiguous() -> Source:
    """K and V [batch, kv_len, kv_heads, head_dim]; what lies behind `kv_len` reads as zeros."""

    def fetch(arrays: Any, _: Any, seq: Any, head: Any, begin: Any, end: Any) -> Any:
        def copy(tile):
            rows = pl.ds(tile * TILE, TILE)
            return lambda which, destination, barrier: plgpu.copy_gmem_to_smem(
                arrays[which].at[seq, rows, head], destination, barrier
            )

        return copy

    return Source(1, fetch)


def gathered(scales: Any, block_tables: Any) -> Any:
    """Scales [blocks, kv_heads, block_size] by sequence and position, [seqs, kv_heads, positions].

    In small blocks they are too short to be copied by TMA, and next to K and V they are little.
    """
    if scales is None:
        return ()
    per_seq = scales[block_tables].transpose(0, 2, 1, 3)
    per_seq = per_seq.reshape(*per_seq.shape[:2], -1)
    return (jnp.pad(per_seq, ((0, 0), (0, 0), (0, -per_seq.shape[2] % TILE))),)
