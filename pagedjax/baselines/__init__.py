"""The systems that paging is compared with: contiguous memory that is reserved ahead, and static batching.

An allocator's name is "paged", or that of a module of this package whose `estimate` says what is reserved for an
output: "orca-max" is `orca_max`.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from pagedjax.config import CacheConfig
from pagedjax.host.allocator import PagedAllocator
from pagedjax.host.protocol import KVAllocator

PAGED = "paged"


@cache
def allocator_names() -> tuple[str, ...]:
    """The allocators there are."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return (PAGED, *sorted(name.replace("_", "-") for name in modules if name.startswith("orca_")))


def make_allocator(config: CacheConfig, max_model_len: int) -> KVAllocator:
    """The allocator that a configuration names.

    Args:
        max_model_len: tokens that a sequence may reach.
    """
    if config.allocator == PAGED:
        return PagedAllocator(config)
    from pagedjax.baselines.contiguous import ContiguousAllocator

    module = importlib.import_module(f"{__name__}.{config.allocator.replace('-', '_')}")
    return ContiguousAllocator(config, max_model_len, module.estimate)
