"""What of an engine is saved.

Random keys need no state: a token's key is a function of the request's seed, the sample and the position. What the
device keeps by slot (last tokens, token counts) follows from the tokens, and is told to it anew.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pagedjax.baselines import make_allocator
from pagedjax.host.scheduler import Scheduler
from pagedjax.output_data import dump_output
from pagedjax.snapshots.files import Arrays

if TYPE_CHECKING:
    from pagedjax.engine import Engine

VERSION = 1


def engine_state(engine: Engine, keep_kv: bool) -> tuple[dict[str, Any], Arrays]:
    """An engine without a step in flight as plain data, and the blocks of both its pools as bytes."""
    scheduler = _settled(engine, keep_kv)
    state = {
        "version": VERSION,
        "model": {
            "config": asdict(engine.model_config),
            "source": engine.source,
            "fingerprint": fingerprint(engine),
        },
        "config": asdict(engine.config),
        "decided": _decided(engine),
        "keep_kv": keep_kv,
        "clock": time.monotonic(),
        "num_requests": engine._num_requests,
        "scheduler": scheduler.snapshot(),
        "trackers": [[name, tracker.snapshot()] for name, tracker in engine._trackers.by_request.items()],
        "outputs": [dump_output(output) for output in engine._mail.all()],
        "prefixes": [asdict(prefix) for prefix in engine.prefixes],
        "registering": sorted(engine._prefixes.pending),
    }
    return state, _blocks(engine) if keep_kv else {}


def _decided(engine: Engine) -> dict[str, Any]:
    """What the engine's configuration had left open, or said otherwise."""
    return {
        "num_blocks": engine.pool_info.num_blocks,
        "pool_bytes": None,
        "max_model_len": engine.max_model_len,
        "prefix_hash_seed": engine.cache_config.prefix_hash_seed,
    }


def fingerprint(engine: Engine) -> str:
    """Of all weights, in hexadecimal: SHA-256 over shape, dtype and CRC-32 of every array. Once an engine."""
    if engine._fingerprint is None:
        digest = hashlib.sha256()
        for path, leaf in jax.tree_util.tree_leaves_with_path(engine.params):
            crc = zlib.crc32(memoryview(np.asarray(leaf).reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {crc:08x}\n".encode())
        engine._fingerprint = digest.hexdigest()
    return engine._fingerprint


def _settled(engine: Engine, keep_kv: bool) -> Scheduler:
    """A scheduler in the engine's state, for which no device knows of any sequence, or of which nothing is computed."""
    scheduler = Scheduler(engine.scheduler.config, make_allocator(engine.cache_config, engine.max_model_len))
    scheduler.restore(engine.scheduler.snapshot())
    if keep_kv:
        scheduler.roster.introduce_all()
    else:
        scheduler.recover()
    return scheduler


def _blocks(engine: Engine) -> Arrays:
    """Bytes of all blocks that hold something: {array: [blocks, bytes]}; nothing of a pool that holds nothing."""
    arrays: Arrays = {}
    ids, host_ids = engine.allocator.held_blocks()
    if ids:
        arrays |= {f"pool{number}": _bytes(part) for number, part in enumerate(engine.runner.read_blocks(ids))}
    if host_ids:
        engine.runner.host_pool.flush()
        rows = np.array(host_ids) - 1
        arrays |= {f"host{number}": _bytes(part[rows]) for number, part in enumerate(engine.runner.host_pool.arrays)}
    return arrays


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
