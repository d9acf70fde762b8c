"""Kernels on Pallas' Mosaic GPU backend: Hopper, whose wgmma they need."""

from __future__ import annotations

from jaxtyping import Array

from pallas_kernels.mosaic_gpu.paged_decode import paged_decode
from pallas_kernels.mosaic_gpu.prefill import flash_attention, paged_attention

__all__ = ["flash_attention", "paged_attention", "paged_decode", "unsupported"]

OPS = ("paged_decode", "paged_attention", "flash_attention")
DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
MIN_BLOCK_SIZE = 8
MAX_GROUP = 64


def unsupported(op: str, *arrays: Array) -> str | None:
    """Why an op on these arrays, good ones for other backends, cannot be taken here; None if it can."""
    if op not in OPS:
        return f"the mosaic_gpu backend has no {op}"
    q, k_pool = arrays
    _, kv_heads, block_size, stored_dim = k_pool.shape
    if block_size < MIN_BLOCK_SIZE:
        return f"k_pool has block_size {block_size}; the mosaic_gpu kernels take {MIN_BLOCK_SIZE} or more"
    if q.dtype != k_pool.dtype or str(q.dtype) not in DTYPES:
        return f"q is {q.dtype} and k_pool {k_pool.dtype}; the mosaic_gpu kernels take both in {' or both in '.join(DTYPES)}"
    if stored_dim % 16 or stored_dim > MAX_HEAD_DIM:
        return f"head_dim is {stored_dim}; the mosaic_gpu kernels take multiples of 16 up to {MAX_HEAD_DIM}"
    if (group := q.shape[1] // kv_heads) > MAX_GROUP:
        return f"q has {group} heads for each KV head; the mosaic_gpu kernels take at most {MAX_GROUP}"
    return None
