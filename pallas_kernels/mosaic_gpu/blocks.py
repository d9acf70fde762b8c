"""`copy_blocks` on Mosaic GPU, and `write_kv` for the same chips."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels import reference
from pallas_kernels.mosaic_gpu.attend import interpreter

MAX_BOX = 256  # numbers that one copy by TMA spans on an axis
ALIGNMENT = 16  # bytes of a run that TMA copies
CHUNK = 64 << 10  # bytes that pass through shared memory at a time: three programs fit on an SM


def copy_blocks(pools: Any, src: Int[Array, " copies"], dst: Int[Array, " copies"], *, interpret: Any = False) -> Any:
    """Whole blocks through shared memory, by TMA; every array of `pools` by one kernel, in place."""
    if not len(src):
        return pools
    return jax.tree.map(lambda pool: _copy(pool, src, dst, interpret), pools)


def write_kv(
    new: tuple[Array, ...], pools: tuple[Array, ...], slot_mapping: Int[Array, " tokens"], *, interpret: Any = False
) -> tuple[Array, ...]:
    """XLA's own scatter, which writes in place: a token's row of one head is too short for TMA to be of use."""
    return reference.write_kv(new, pools, slot_mapping)


def box(pool: Array | jax.ShapeDtypeStruct) -> tuple[int, int] | None:
    """A block as rows that TMA copies, (rows, columns); None if its bytes do not divide so."""
    count = math.prod(pool.shape[1:])
    run = ALIGNMENT // math.gcd(ALIGNMENT, pool.dtype.itemsize)
    if count == 0 or count % run:
        return None
    columns = max(columns for columns in range(run, MAX_BOX + 1, run) if count % columns == 0)
    return count // columns, columns


def _copy(pool: Array, src: Array, dst: Array, interpret: Any) -> Array:
    shape = box(pool)
    assert shape is not None, "unsupported() refuses such a pool"
    rows, columns = shape
    limit = min(MAX_BOX, max(CHUNK // (columns * pool.dtype.itemsize), 1))
    chunk = max(size for size in range(1, limit + 1) if rows % size == 0)
    num_blocks = len(pool)

    def body(src_ref, dst_ref, pool_ref):
        source, target = src_ref[lax.axis_index("copy")], dst_ref[lax.axis_index("copy")]
        part = pl.ds(lax.axis_index("part") * chunk, chunk)

        def through(smem, ready):
            read = jnp.clip(source, 0, num_blocks - 1)
            plgpu.copy_gmem_to_smem(pool_ref.at[read, part], smem, ready)
            plgpu.barrier_wait(ready)
            plgpu.copy_smem_to_gmem(smem, pool_ref.at[target, part])
            plgpu.wait_smem_to_gmem(0)

        @pl.when((source != target) & (target >= 0) & (target < num_blocks))
        def _():
            pl.run_scoped(through, plgpu.SMEM((chunk, columns), pool.dtype), plgpu.Barrier())

    # Not plgpu.kernel: its batching rule, in JAX 0.10, does not know arrays that a kernel writes to.
    run: Any = pl.kernel(
        body,
        mesh=plgpu.Mesh(grid=(rows // chunk, len(src)), grid_names=("part", "copy")),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter(interpret) if interpret else False,
    )
    ref = jax.new_ref(pool.reshape(num_blocks, rows, columns))
    run(src, dst, ref)
    return jax.freeze(ref).reshape(pool.shape)
