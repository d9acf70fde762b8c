"""Kernels on Pallas' Triton backend: Ampere and newer, while JAX ships that backend."""

from pallas_kernels.triton.paged_decode import paged_decode, unsupported

__all__ = ["paged_decode", "unsupported"]
