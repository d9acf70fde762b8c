"""Paged attention kernels for JAX, usable on their own: imports nothing of `pagedjax`."""

from pallas_kernels.attention import paged_attention, paged_decode
from pallas_kernels.blocks import copy_blocks, gather_blocks, scatter_blocks, write_kv
from pallas_kernels.contiguous import flash_attention, standard_attention
from pallas_kernels.dispatch import BACKENDS, resolve_backend
from pallas_kernels.merge import merge_partials

__all__ = [
    "BACKENDS",
    "copy_blocks",
    "flash_attention",
    "gather_blocks",
    "merge_partials",
    "paged_attention",
    "paged_decode",
    "resolve_backend",
    "scatter_blocks",
    "standard_attention",
    "write_kv",
]
