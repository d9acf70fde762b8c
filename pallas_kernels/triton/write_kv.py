"""`write_kv` on Pallas' Triton backend: one launch puts new K, V and their scales into their slots, in place."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.triton.launch import check_launch, check_power_of_two
from pallas_kernels.triton.tiles import load, load_rows, padded_width, plgpu, store_rows
from pallas_kernels.tuning import tuned


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is launched.

    Attributes:
        rows: that one program writes to each pool; a row is one head of one token.
        num_warps: of one program.
    """

    rows: int
    num_warps: int

    def __post_init__(self) -> None:
        check_power_of_two("rows", self.rows, 1, 256)
        check_launch(self.num_warps, 1)


def default_config(pool: Array) -> Config:
    """About 4 KiB of each pool in one program: 32 bytes for each of its threads, and many programs for few tokens."""
    row_bytes = padded_width(pool.shape[-1]) * pool.dtype.itemsize
    return Config(rows=max(1, 4096 // row_bytes), num_warps=4)


def write_kv(
    new: tuple[Array, ...],
    pools: tuple[Array, ...],
    slot_mapping: Int[Array, " tokens"],
    *,
    interpret: bool = False,
    config: Config | None = None,
) -> tuple[Array, ...]:
    """New K and V, and their scales if there are any, into their slots; a slot outside the pool is dropped.

    Args:
        new: [tokens, kv_heads, head_dim] twice, then [tokens, kv_heads] twice.
        pools: [blocks, kv_heads, block_size, head_dim] twice, then [blocks, kv_heads, block_size] twice.
        slot_mapping: one slot for each token.
    """
    tokens, kv_heads, head_dim = new[0].shape
    if tokens == 0:
        return pools
    config = config or tuned(Config, "triton", "write_kv", new[0], pools[0]) or default_config(pools[0])
    flat = tuple(x.reshape(-1, head_dim) if x.ndim == 3 else x.reshape(-1) for x in new)
    inputs = 1 + len(flat)
    return tuple(
        pl.pallas_call(
            functools.partial(_write, rows=config.rows),
            grid=(pl.cdiv(tokens * kv_heads, config.rows),),
            out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
            input_output_aliases={inputs + i: i for i in range(len(pools))},
            compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
            interpret=interpret,
            name="write_kv",
        )(slot_mapping, *flat, *pools)
    )


def _write(slot_ref, *refs, rows: int):
    """`refs`: new rows [tokens * kv_heads, head_dim] or numbers [tokens * kv_heads]; the pools as they were; and the
    pools, which lie where those did."""
    count = len(refs) // 3
    new_refs, pool_refs = refs[:count], refs[2 * count :]
    num_blocks, kv_heads, block_size, head_dim = pool_refs[0].shape
    width = padded_width(head_dim)
    row = pl.program_id(0) * rows + jnp.arange(rows)
    token, head = row // kv_heads, row % kv_heads
    there = token < slot_ref.shape[0]
    slot = plgpu.load(slot_ref.at[token], mask=there, other=-1)
    valid = (slot >= 0) & (slot < num_blocks * block_size)
    slot = jnp.where(valid, slot, 0)
    block, offset = slot // block_size, slot % block_size
    for new_ref, pool_ref in zip(new_refs, pool_refs, strict=True):
        if len(pool_ref.shape) == 4:
            store_rows(pool_ref, load_rows(new_ref, width, valid, row), valid, block, head, offset)
        else:
            plgpu.store(pool_ref.at[block, head, offset], load(new_ref, (row,), valid), mask=valid)
