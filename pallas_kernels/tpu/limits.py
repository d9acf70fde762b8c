"""What the TPU kernels do not take."""

from __future__ import annotations

import jax
from jaxtyping import Array

from pallas_kernels.constants import QUANTIZED
from pallas_kernels.tpu.config import LANES, MAX_BLOCK_SIZE

MIN_BLOCK_SIZE = 8  # rows of a tile in memory


def unsupported(op: str, *arrays: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why an op on these arrays, good ones for other backends, cannot be taken here; None if it can."""
    if op == "copy_blocks":
        return None
    names = ("q", "k") if op == "flash_attention" else ("k" if op == "write_kv" else "q", "k_pool")
    for name, array in zip(names, arrays, strict=True):
        if str(array.dtype) == "float16":
            return f"{name} is float16; the tpu kernels take float32 and bfloat16, which TPUs compute with"
    return None if op == "flash_attention" else _unsupported_pool(arrays[1])


def _unsupported_pool(k_pool: Array | jax.ShapeDtypeStruct) -> str | None:
    _, _, block_size, stored_dim = k_pool.shape
    if stored_dim % LANES:
        return (
            f"k_pool has rows of {stored_dim} numbers; the tpu kernels need a multiple of {LANES} (stored_dim), "
            "or XLA copies the whole pool around each call"
        )
    if not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        return f"k_pool has block_size {block_size}; the tpu kernels take {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
    if str(k_pool.dtype) in QUANTIZED and block_size % LANES:
        return (
            f"k_pool is {k_pool.dtype} with block_size {block_size}; the tpu kernels need a multiple of {LANES} "
            "there, or XLA copies all scales around each call"
        )
    return None
