"""Kernels on Pallas' Triton backend: Ampere and newer, while JAX ships that backend."""

from __future__ import annotations

from jaxtyping import Array

from pallas_kernels.constants import FLOATS
from pallas_kernels.triton.paged_attention import paged_attention
from pallas_kernels.triton.paged_decode import MAX_HEAD_DIM, paged_decode

__all__ = ["paged_attention", "paged_decode", "unsupported"]

OPS = ("paged_decode", "paged_attention")


def unsupported(op: str, *arrays: Array) -> str | None:
    """Why an op on these arrays, good ones for other backends, cannot be taken here; None if it can."""
    if op not in OPS:
        return f"the triton backend has no {op}"
    q, k_pool = arrays
    head_dim = q.shape[-1]
    if str(k_pool.dtype) not in FLOATS:
        return f"k_pool is {k_pool.dtype}; the triton kernels take {', '.join(FLOATS)}"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim is {head_dim}; the triton kernels take at most {MAX_HEAD_DIM}"
    if k_pool.size >= 2**31:
        return f"the pool holds {k_pool.size} numbers; the triton kernels address fewer than 2**31"
    return None
