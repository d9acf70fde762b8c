"""What the TPU kernels do not take."""

from __future__ import annotations

from jaxtyping import Array

from pallas_kernels.tpu.config import LANES

OPS = ("paged_decode",)


def unsupported(op: str, *arrays: Array) -> str | None:
    """Why an op on these arrays, good ones for other backends, cannot be taken here; None if it can."""
    if op not in OPS:
        return f"the tpu backend has no {op}"
    q, k_pool = arrays
    if "float16" in (str(q.dtype), str(k_pool.dtype)):
        return (
            f"q is {q.dtype} and k_pool {k_pool.dtype}; the tpu kernels take no float16, which TPUs do not compute with"
        )
    if k_pool.shape[3] % LANES:
        return (
            f"k_pool has stored_dim {k_pool.shape[3]}; the tpu kernels need a multiple of {LANES}, "
            "or the whole pool is copied around each call"
        )
    return None
