"""`pagedjax info`: what runs here, on what, and how large the pool is."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

from pagedjax import __version__
from pagedjax.cli.flags import add_json_flag, add_model_flags, engine_config
from pagedjax.cli.loading import llm_class
from pagedjax.config import EngineConfig
from pagedjax.errors import PagedJaxError
from pagedjax.tables import format_table, write_json

if TYPE_CHECKING:
    from pagedjax.engine import Engine


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `info`."""
    parser = commands.add_parser("info", help="show versions, device, backend and pool", allow_abbrev=False)
    add_json_flag(parser)
    add_model_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints one record. What does not depend on the model is printed even when the model cannot be loaded."""
    config = engine_config(args)
    LLM = llm_class()
    row = _software() | _device(config)
    failed: PagedJaxError | None = None
    try:
        row |= _model(args.model, LLM(args.model, config).engine)
    except PagedJaxError as error:
        failed = error
    print(format_table([row]))
    if args.json:
        write_json(args.json, [row])
    if failed:
        raise failed
    return 0


def _software() -> dict[str, object]:
    from pagedjax.models.cache import cache_home

    return {
        "pagedjax": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "flax")},
        "cache_folder": str(cache_home()),
    }


def _device(config: EngineConfig) -> dict[str, object]:
    import jax
    import psutil

    from pagedjax.device.backend import choose_backend
    from pagedjax.device.memory import free_memory

    backend, because = choose_backend(config)
    device = jax.devices()[0]
    total = (device.memory_stats() or {}).get("bytes_limit") or psutil.virtual_memory().total
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "attention_backend": backend.name,
        "attention_backend_because": because,
        "memory_total_mib": _mib(total),
        "memory_free_mib": _mib(free_memory(device).device),
    }


def _model(name: str, engine: Engine) -> dict[str, object]:
    import jax

    from pagedjax.device.backend import choose_backend

    pool, leaves = engine.pool_info, jax.tree.leaves(engine.params)
    backend, because = choose_backend(engine.config, engine.model_config)
    return {
        "attention_backend": backend.name,
        "attention_backend_because": because,
        "model": name,
        "num_parameters": sum(leaf.size for leaf in leaves),
        "weights_dtype": engine.config.dtype,
        "weights_mib": _mib(sum(leaf.nbytes for leaf in leaves)),
        "kv_cache_dtype": engine.config.pool_dtype,
        "block_size": pool.block_size,
        "bytes_per_block": pool.bytes_per_block,
        "num_blocks": pool.num_blocks,
        "pool_mib": _mib(pool.pool_bytes),
        "pool_size_from": pool.chosen_by,
        "preemption": engine.config.preemption,
        "num_host_blocks": pool.num_host_blocks,
        "pool_bytes": pool.pool_bytes,
        "swap_space_bytes": pool.host_bytes,
        "kv_bytes": pool.pool_bytes + pool.host_bytes,
    }


def _mib(num_bytes: int) -> float:
    return num_bytes / 2**20
