"""Paged attention kernels for JAX, usable on their own: imports nothing of `pagedjax`."""

from pallas_kernels.dispatch import BACKENDS, paged_attention, paged_decode, resolve_backend, write_kv

__all__ = ["BACKENDS", "paged_attention", "paged_decode", "resolve_backend", "write_kv"]
