"""Which attention kernels an engine calls."""

from __future__ import annotations

import jax

from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.device.kv_pool import PoolLayout
from pagedjax.errors import ConfigError
from pagedjax.models.llama import AttentionBackend
from pallas_kernels.dispatch import choose, resolve_backend


def choose_backend(config: EngineConfig, model: ModelConfig | None = None) -> tuple[AttentionBackend, str]:
    """The backend that a configuration stands for on this machine, and why, as half a sentence.

    Args:
        config: names a backend, or "auto".
        model: whose heads and pool the kernels must take; None asks about the machine alone.

    Raises:
        ConfigError: the backend asked for cannot run here, or does not take this model's heads or this pool.
    """
    name, interpret = config.attention_backend, config.attention_interpret
    try:
        found, because = resolve_backend(name, interpret=interpret)
        if model is not None:
            layout = PoolLayout.of(model, config, found)
            q = jax.ShapeDtypeStruct((1, model.num_heads, layout.stored_dim), config.dtype)
            pool_shape = (2, model.num_kv_heads, config.block_size, layout.stored_dim)
            fits = choose("paged_attention", name, interpret, q, jax.ShapeDtypeStruct(pool_shape, layout.dtype))
            if fits != found:
                found, because = fits, f"the {found} kernels do not take this model's heads or this pool"
    except ValueError as error:
        raise ConfigError(f"attention_backend={name!r} is not allowed here: {error}") from None
    return AttentionBackend(found, interpret), because
