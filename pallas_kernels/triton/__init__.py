"""Kernels on Pallas' Triton backend: Ampere and newer, while JAX ships that backend."""

from __future__ import annotations

from pallas_kernels.triton.copy_blocks import copy_blocks
from pallas_kernels.triton.flash_attention import flash_attention
from pallas_kernels.triton.paged_attention import paged_attention
from pallas_kernels.triton.paged_decode import paged_decode
from pallas_kernels.triton.support import refusal, unsupported
from pallas_kernels.triton.write_kv import write_kv

__all__ = [
    "copy_blocks",
    "flash_attention",
    "paged_attention",
    "paged_decode",
    "refusal",
    "unsupported",
    "write_kv",
]
