"""What the kernels on Pallas' Triton backend take, and on which chips."""

from __future__ import annotations

import jax
from jaxtyping import Array

from pallas_kernels.constants import FLOATS, QUANTIZED

MAX_HEAD_DIM = 256
MAX_GROUP = 64
FLOAT8_CAPABILITY = 8.9  # below it, LLVM ends the process when it meets a conversion from float8
COPIED = (*FLOATS, *QUANTIZED, "bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32)))


def unsupported(op: str, *arrays: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why an op on these arrays, good ones for other backends, cannot be taken here; None if it can.

    Args:
        op: name of a public op.
        arrays: q and K of the attention ops, new K and K's pool of `write_kv`, all pools of `copy_blocks`.
    """
    capability = jax.devices()[0].compute_capability if jax.default_backend() == "gpu" else None
    return refusal(op, arrays, capability)


def refusal(op: str, arrays: tuple[Array | jax.ShapeDtypeStruct, ...], compute_capability: str | None) -> str | None:
    """`unsupported`, for a chip that may not be here.

    Args:
        op, arrays: see `unsupported`.
        compute_capability: of the GPU that the op is to run on, "8.0" for instance; None in interpret mode.
    """
    if compute_capability is not None and float(compute_capability) < FLOAT8_CAPABILITY:
        for x in arrays:
            if "float8" in str(x.dtype):
                return (
                    f"a pool is {x.dtype} and the GPU's compute capability {compute_capability}; the triton kernels "
                    f"take float8 from {FLOAT8_CAPABILITY} on"
                )
    if op == "copy_blocks":
        return next((reason for x in arrays if (reason := _not_copied(x))), None)
    x, kv = arrays
    if x.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim is {x.shape[-1]}; the triton kernels take at most {MAX_HEAD_DIM}"
    if op != "write_kv" and (group := x.shape[-2] // kv.shape[1 if op != "flash_attention" else 2]) > MAX_GROUP:
        return f"q has {group} heads for each KV head; the triton kernels take at most {MAX_GROUP}"
    return next((reason for array in arrays if (reason := _not_addressed(array))), None)


def _not_copied(pool: Array | jax.ShapeDtypeStruct) -> str | None:
    if str(pool.dtype) not in COPIED:
        return f"a pool is {pool.dtype}; the triton kernel copies {', '.join(COPIED)}"
    return _not_addressed(pool)


def _not_addressed(array: Array | jax.ShapeDtypeStruct) -> str | None:
    """Triton has offsets of 64 bits for arrays above 2**32 bytes, and of 32 bits with a sign below."""
    if array.dtype.itemsize == 1 and 2**31 < array.size <= 2**32:
        return (
            f"an array of {array.dtype} holds {array.size} numbers; the triton kernels take up to 2**31, or over 2**32"
        )
    return None
