"""Kernels on Pallas' TPU backend (Mosaic): v4, v5e, v5p, v6e and v7."""

from __future__ import annotations

import jax

try:
    from jax.experimental.pallas import tpu as _  # noqa: F401
except ImportError as missing:
    raise ImportError(
        f"JAX {jax.__version__} has no TPU backend in Pallas; the backends 'xla' and 'reference' need none"
    ) from missing

from pallas_kernels.tpu.copy_blocks import copy_blocks
from pallas_kernels.tpu.flash_attention import flash_attention
from pallas_kernels.tpu.limits import unsupported
from pallas_kernels.tpu.paged_attention import paged_attention
from pallas_kernels.tpu.paged_decode import paged_decode
from pallas_kernels.tpu.write_kv import write_kv

__all__ = ["copy_blocks", "flash_attention", "paged_attention", "paged_decode", "unsupported", "write_kv"]
