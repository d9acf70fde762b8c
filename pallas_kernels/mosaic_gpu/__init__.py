"""Kernels on Pallas' Mosaic GPU backend: Hopper, whose wgmma they need."""

from __future__ import annotations

import jax
from jaxtyping import Array

from pallas_kernels.constants import QUANTIZED
from pallas_kernels.mosaic_gpu.blocks import ALIGNMENT, box, copy_blocks, write_kv
from pallas_kernels.mosaic_gpu.paged_decode import paged_decode
from pallas_kernels.mosaic_gpu.prefill import flash_attention, paged_attention

__all__ = ["copy_blocks", "flash_attention", "paged_attention", "paged_decode", "unsupported", "write_kv"]

DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
MIN_BLOCK_SIZE = 8  # rows of a tile of shared memory
MAX_GROUP = 64  # rows of a wgmma


def unsupported(op: str, *arrays: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why an op on these arrays, good ones for other backends, cannot be taken here; None if it can."""
    if op == "write_kv":
        return None
    if op == "copy_blocks":
        return next(filter(None, map(_unsupported_pool, arrays)), None)
    q, keys = arrays
    name = "k" if op == "flash_attention" else "k_pool"
    kv_heads = keys.shape[2] if op == "flash_attention" else keys.shape[1]
    if op != "flash_attention" and keys.shape[2] < MIN_BLOCK_SIZE:
        return f"k_pool has block_size {keys.shape[2]}; the mosaic_gpu kernels take {MIN_BLOCK_SIZE} or more"
    if str(q.dtype) not in DTYPES or str(keys.dtype) not in (str(q.dtype), *QUANTIZED):
        both, or_else = " or both as ".join(DTYPES), " or ".join(QUANTIZED)
        return (
            f"q is {q.dtype} and {name} {keys.dtype}; the mosaic_gpu kernels take both as {both}, or such a q and a "
            f"k_pool of {or_else}"
        )
    multiple = 32 if str(keys.dtype) in QUANTIZED else 16
    if keys.shape[-1] % multiple or keys.shape[-1] > MAX_HEAD_DIM:
        return (
            f"head_dim is {keys.shape[-1]}; the mosaic_gpu kernels take multiples of {multiple} up to {MAX_HEAD_DIM} "
            f"for {keys.dtype}"
        )
    if (group := q.shape[-2] // kv_heads) > MAX_GROUP:
        return f"q has {group} heads for each KV head; the mosaic_gpu kernels take at most {MAX_GROUP}"
    return None


def _unsupported_pool(pool: Array | jax.ShapeDtypeStruct) -> str | None:
    if box(pool) is not None:
        return None
    size = pool.dtype.itemsize * (pool.size // len(pool))
    return (
        f"pools holds an array {pool.dtype} {pool.shape}, of {size} bytes a block; the mosaic_gpu kernel copies "
        f"multiples of {ALIGNMENT}"
    )
