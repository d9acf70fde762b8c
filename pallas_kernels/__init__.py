"""Paged attention kernels for JAX, usable on their own."""

from pallas_kernels.dispatch import paged_attention, write_kv

__all__ = ["paged_attention", "write_kv"]
