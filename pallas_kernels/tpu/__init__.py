"""Kernels on Pallas' TPU backend (Mosaic): v4, v5e, v5p, v6e and v7."""

from __future__ import annotations

from pallas_kernels.tpu.limits import unsupported
from pallas_kernels.tpu.paged_decode import paged_decode

__all__ = ["paged_decode", "unsupported"]
