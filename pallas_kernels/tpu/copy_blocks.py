"""`copy_blocks` on TPUs: whole blocks go from HBM to HBM by DMA, several at a time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.constants import QUANTIZED
from pallas_kernels.tpu.config import LANES


@dataclasses.dataclass(frozen=True)
class Config:
    """How `copy_blocks` works.

    Attributes:
        in_flight: copies that are under way at a time.
    """

    in_flight: int = 8

    def __post_init__(self):
        if not 1 <= self.in_flight <= 64:
            raise ValueError(f"in_flight is {self.in_flight}; it must be from 1 to 64 copies")


def copy_blocks(
    pools: Any,
    src: Int[Array, " copies"],
    dst: Int[Array, " copies"],
    *,
    config: Config | None = None,
    interpret: Any = False,
) -> Any:
    """Whole blocks copied in place, one launch an array; a destination of 0, or outside the pool, is passed over.

    Arrays whose blocks are no runs of whole tiles (scales of small blocks, lists of numbers) are left to XLA.
    """
    config = config or Config()
    if src.size == 0:
        return pools

    def copy(pool):
        if _fills_tiles(pool):
            return _copy(pool, src, dst, config, interpret)
        return pool.at[dst].set(pool.at[src].get(mode="clip"), mode="drop")

    return jax.tree.map(copy, pools)


def _fills_tiles(pool: Array) -> bool:
    """Whether a block lies in memory as a run of whole tiles by XLA's own choice, or the kernel would have it moved."""
    return (
        pool.ndim >= 3
        and pool.shape[-1] % LANES == 0
        and (pool.shape[-2] in (1, 2, 4) or pool.shape[-2] % 8 == 0)
        and pool.dtype in (jnp.float32, jnp.bfloat16, *map(jnp.dtype, QUANTIZED))
    )


def _copy(pool: Array, src: Array, dst: Array, config: Config, interpret: Any) -> Array:
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_copy_kernel, in_flight=config.in_flight),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={2: 0},
        interpret=interpret,
        name="copy_blocks",
    )(src, dst, pool)


def _copy_kernel(
    src_ref,  # i32[copies], in scalar memory
    dst_ref,  # the same
    _,  # the pool as the argument that it is; it is read and written as the result
    pool_ref,  # [blocks, ...], in HBM
    done,  # a semaphore
    *,
    in_flight: int,
):
    copies = src_ref.shape[0]

    def act(i, what):
        source, target = src_ref[i], dst_ref[i]
        named = (target > 0) & (target < pool_ref.shape[0])
        source = jnp.clip(source, 0, pool_ref.shape[0] - 1)
        pl.when(named)(lambda: what(pltpu.make_async_copy(pool_ref.at[source], pool_ref.at[target], done)))

    def one_copy(i, _):
        pl.when(i < copies)(lambda: act(jnp.minimum(i, copies - 1), lambda copy: copy.start()))
        pl.when(i >= in_flight)(lambda: act(jnp.maximum(i - in_flight, 0), lambda copy: copy.wait()))
        return 0

    lax.fori_loop(0, copies + in_flight, one_copy, 0)
