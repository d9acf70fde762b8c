"""`copy_blocks` on Pallas' Triton backend: a batch of copies in one launch for each array, in place."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.triton.launch import check_launch, check_power_of_two
from pallas_kernels.triton.tiles import plgpu
from pallas_kernels.tuning import tuned


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is launched.

    Attributes:
        chunk: bytes of a block that one program copies.
        num_warps: of one program.
    """

    chunk: int
    num_warps: int

    def __post_init__(self) -> None:
        check_power_of_two("chunk", self.chunk, 128, 1 << 16)
        check_launch(self.num_warps, 1)


def default_config(pool: Array) -> Config:
    """64 bytes for each thread, 16 where a block has no more than that for four warps."""
    block_bytes = math.prod(pool.shape[1:]) * pool.dtype.itemsize
    return Config(chunk=8192, num_warps=4 if block_bytes >= 2048 else 2 if block_bytes >= 1024 else 1)


def copy_blocks(
    pools: Any,
    src: Int[Array, " copies"],
    dst: Int[Array, " copies"],
    *,
    interpret: bool = False,
    config: Config | None = None,
) -> Any:
    """Every array of the pytree `pools`, block first, with block `src[i]` copied to `dst[i]`; nothing where they are
    the same, as in padding."""
    if len(src) == 0:
        return pools
    return jax.tree.map(functools.partial(_copy, src=src, dst=dst, interpret=interpret, config=config), pools)


def _copy(pool: Array, src: Array, dst: Array, interpret: bool, config: Config | None) -> Array:
    numbers = math.prod(pool.shape[1:])
    if numbers == 0:
        return pool
    config = config or tuned(Config, "triton", "copy_blocks", pool) or default_config(pool)
    chunk = min(config.chunk // pool.dtype.itemsize, pl.next_power_of_2(numbers))
    flat = pool.reshape(len(pool), numbers)
    out = pl.pallas_call(
        functools.partial(_copy_chunk, chunk=chunk),
        grid=(len(src), pl.cdiv(numbers, chunk)),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        input_output_aliases={2: 0},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="copy_blocks",
    )(src, dst, flat)
    return out.reshape(pool.shape)


def _copy_chunk(
    src_ref,  # [copies]
    dst_ref,  # [copies]
    _,  # the pool as it was
    pool_ref,  # [blocks, numbers], which lies where that did
    *,
    chunk: int,
):
    copy, part = pl.program_id(0), pl.program_id(1)
    num_blocks, numbers = pool_ref.shape
    src = jnp.clip(src_ref[copy], 0, num_blocks - 1)
    dst = dst_ref[copy]
    column = part * chunk + jnp.arange(chunk)
    wanted = (column < numbers) & (dst != src) & (dst >= 0) & (dst < num_blocks)
    source, target = (pool_ref.at[jnp.full_like(column, block), column] for block in (src, jnp.clip(dst, 0)))
    plgpu.store(target, plgpu.load(source, mask=wanted), mask=wanted)
