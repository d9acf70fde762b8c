"""Which attention kernels an engine calls."""

from __future__ import annotations

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.models.llama import AttentionBackend
from pallas_kernels.dispatch import resolve_backend


def choose_backend(config: EngineConfig) -> tuple[AttentionBackend, str]:
    """The backend that a configuration stands for on this machine, and why, as half a sentence.

    Raises:
        ConfigError: the backend asked for cannot run here.
    """
    try:
        name, because = resolve_backend(config.attention_backend, interpret=config.attention_interpret)
    except ValueError as error:
        raise ConfigError(f"attention_backend={config.attention_backend!r} is not allowed here: {error}") from None
    return AttentionBackend(name, config.attention_interpret), because
