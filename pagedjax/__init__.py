"""pagedjax: PagedAttention and everything around it, in JAX.

Names are loaded on first use, so that `import pagedjax.host` stays free of jax and numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedjax.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
    from pagedjax.engine import Engine
    from pagedjax.llm import LLM
    from pagedjax.params import BeamSearchParams, SamplingParams
    from pagedjax.request import CompletionOutput, Logprob, Request, RequestMetrics, RequestOutput

__version__ = "0.1.0"

_MODULE_OF = {
    "BeamSearchParams": "params",
    "CacheConfig": "config",
    "CompletionOutput": "request",
    "Engine": "engine",
    "EngineConfig": "config",
    "LLM": "llm",
    "Logprob": "request",
    "ModelConfig": "config",
    "Request": "request",
    "RequestMetrics": "request",
    "RequestOutput": "request",
    "SamplingParams": "params",
    "SchedulerConfig": "config",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CacheConfig",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Logprob",
    "ModelConfig",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pagedjax' has no attribute {name!r}")
    value = getattr(import_module(f"pagedjax.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
