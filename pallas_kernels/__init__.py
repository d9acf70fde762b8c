"""Paged attention kernels for JAX, usable on their own: imports nothing of `pagedjax`.

Names are imported when they are first asked for, so that what needs no JAX (`pallas_kernels.chips`) does not load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_kernels.attention import paged_attention, paged_decode
    from pallas_kernels.blocks import copy_blocks, gather_blocks, scatter_blocks, write_kv
    from pallas_kernels.contiguous import flash_attention, standard_attention
    from pallas_kernels.dispatch import BACKENDS, resolve_backend
    from pallas_kernels.merge import merge_partials

_MODULE_OF = {
    "BACKENDS": "dispatch",
    "copy_blocks": "blocks",
    "flash_attention": "contiguous",
    "gather_blocks": "blocks",
    "merge_partials": "merge",
    "paged_attention": "attention",
    "paged_decode": "attention",
    "resolve_backend": "dispatch",
    "scatter_blocks": "blocks",
    "standard_attention": "contiguous",
    "write_kv": "blocks",
}

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


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")
    value = getattr(import_module(f"pallas_kernels.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
