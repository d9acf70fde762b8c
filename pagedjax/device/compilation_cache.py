"""JAX's persistent compilation cache, so that a second start takes the programs from disk."""

from __future__ import annotations

from typing import Any

import jax

from pagedjax.models.cache import cache_home


def use_compilation_cache() -> None:
    """Keeps compiled programs under pagedjax's cache folder, unless the user chose a place (or none) already."""
    settings: Any = jax.config  # its options are made at import time, where no type checker sees them
    if settings.jax_compilation_cache_dir is None and settings.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(cache_home() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
