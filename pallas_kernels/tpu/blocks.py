"""`copy_blocks` and `write_kv` on TPUs.

XLA's own scatter writes single rows in place there, so `write_kv` is one, over the pool seen as rows of one head; whole
blocks go from HBM to HBM by DMA.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.constants import QUANTIZED
from pallas_kernels.tpu.config import LANES

IN_FLIGHT = 8  # copies that are under way at a time


def copy_blocks(pools: Any, src: Int[Array, " copies"], dst: Int[Array, " copies"], *, interpret: Any = False) -> Any:
    """Whole blocks copied in place, one launch an array; a destination of 0, or outside the pool, is passed over."""

    def copy(pool):
        if rows_fill_tiles(pool):
            return _copy(pool, src, dst, interpret)
        return pool.at[dst].set(pool.at[src].get(mode="clip"), mode="drop")

    return jax.tree.map(copy, pools)


def rows_fill_tiles(pool: Array) -> bool:
    """Whether a block lies in memory as a run of whole tiles by XLA's own choice, or the kernel would have it moved."""
    return (
        pool.ndim >= 3
        and pool.shape[-1] % LANES == 0
        and (pool.shape[-2] in (1, 2, 4) or pool.shape[-2] % 8 == 0)
        and pool.dtype in (jnp.float32, jnp.bfloat16, *map(jnp.dtype, QUANTIZED))
    )


def _copy(pool: Array, src: Array, dst: Array, interpret: Any) -> Array:
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        _copy_kernel,
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
):
    copies = src_ref.shape[0]

    def act(i, what):
        source, target = src_ref[i], dst_ref[i]
        named = (target > 0) & (target < pool_ref.shape[0])
        source = jnp.clip(source, 0, pool_ref.shape[0] - 1)
        pl.when(named)(lambda: what(pltpu.make_async_copy(pool_ref.at[source], pool_ref.at[target], done)))

    def one_copy(i, _):
        pl.when(i < copies)(lambda: act(jnp.minimum(i, copies - 1), lambda copy: copy.start()))
        pl.when(i >= IN_FLIGHT)(lambda: act(jnp.maximum(i - IN_FLIGHT, 0), lambda copy: copy.wait()))
        return 0

    lax.fori_loop(0, copies + IN_FLIGHT, one_copy, 0)


def write_kv(
    new: tuple[Array, ...], pools: tuple[Array, ...], slot_mapping: Int[Array, " tokens"], *, interpret: Any = False
) -> tuple[Array, ...]:
    """New K and V, and their scales if there are any, into their slots; a slot outside the pool is dropped."""
    del interpret  # nothing here is a kernel
    _, kv_heads, block_size, _ = pools[0].shape
    # The rows of a token's heads, in the pool seen as [blocks * kv_heads * block_size, head_dim]; a negative slot must
    # not wrap around.
    block = jnp.where(slot_mapping < 0, len(pools[0]), slot_mapping // block_size)
    row = (block[:, None] * kv_heads + jnp.arange(kv_heads)) * block_size + (slot_mapping % block_size)[:, None]

    def put(pool, tokens):
        tokens = tokens.astype(pool.dtype)
        if pool.ndim == 3:
            slots = pool.at[block, :, slot_mapping % block_size]
            return slots.set(tokens, mode="drop", wrap_negative_indices=False)
        flat = pool.reshape(-1, pool.shape[-1]).at[row.reshape(-1)]
        return flat.set(tokens.reshape(-1, pool.shape[-1]), mode="drop", wrap_negative_indices=False).reshape(
            pool.shape
        )

    return tuple(put(pool, tokens) for pool, tokens in zip(pools, new, strict=True))
