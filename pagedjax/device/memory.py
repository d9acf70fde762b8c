"""How much memory is free, and how much an engine needs beside its pool: refused before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import psutil

from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.errors import ConfigError

HOST_BYTES_PER_BLOCK = 48
"""Of the host's lists: an int object and its place among the free blocks, and a reference count."""
_HOST_BYTES_PER_SLOT = 192
"""Of the host's lists and parameter columns for one of `max_num_seqs`."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that can still be taken, of the device and of the host; the same bytes if `shared`."""

    device: int
    host: int
    shared: bool
    device_name: str


def free_memory(device: Any) -> FreeMemory:
    """Memory that arrays on `device` could still take (XLA's limit less what is in use), and what the host has."""
    host = _free_host_bytes()
    stats = {} if device.platform == "cpu" else device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return FreeMemory(host, host, True, "host memory")
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return FreeMemory(free, host, False, f"memory of {device.device_kind}")


def _free_host_bytes() -> int:
    free = psutil.virtual_memory().available
    limit = _cgroup_free_bytes() if os.name == "posix" else None
    return free if limit is None else min(free, limit)


def _cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's memory limit leaves, or None where there is no limit."""
    try:
        limit = (root / "memory.max").read_text().strip()
        return None if limit == "max" else max(0, int(limit) - int((root / "memory.current").read_text()))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that an engine takes beside weights and pool, at least.

    Attributes:
        device_per_seq: for each of `max_num_seqs`: sampler state, a row of block tables and of hidden states.
        host_per_seq: the same on the host: a row of block tables, sampling parameters.
        device_per_token: for each of `max_num_batched_tokens`: what a layer makes of one token.
    """

    device_per_seq: int
    host_per_seq: int
    device_per_token: int
    num_seqs: int
    num_tokens: int
    max_model_len: int

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return (self.num_seqs + 1) * self.device_per_seq + self.num_tokens * self.device_per_token

    @property
    def host(self) -> int:
        """Bytes on the host."""
        return (self.num_seqs + 1) * self.host_per_seq


def plan_needs(config: EngineConfig, model: ModelConfig, max_model_len: int) -> Needs:
    """What `config` takes beside weights and pool. Temporaries of the compiled programs are estimated from below."""
    table = 4 * -(-max_model_len // config.block_size)
    item = jnp.dtype(config.dtype).itemsize
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return Needs(
        device_per_seq=4 + 8 * model.vocab_size + table + item * model.hidden_size,
        host_per_seq=table + _HOST_BYTES_PER_SLOT,
        device_per_token=item * (2 * model.hidden_size + qkv + 2 * model.intermediate_size),
        num_seqs=config.max_num_seqs,
        num_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def check_needs(needs: Needs, free: FreeMemory) -> int:
    """Bytes of the device's memory that are needed beside weights and pool.

    Raises:
        ConfigError: that is more than is free; it names the setting that takes most.
    """
    if free.shared:
        _check(needs, needs.device_per_seq + needs.host_per_seq, needs.device_per_token, free.host, free.device_name)
        return needs.device + needs.host
    _check(needs, needs.device_per_seq, needs.device_per_token, free.device, free.device_name)
    _check(needs, needs.host_per_seq, 0, free.host, "host memory")
    return needs.device


def _check(needs: Needs, per_seq: int, per_token: int, available: int, where: str) -> None:
    seqs, tokens = (needs.num_seqs + 1) * per_seq, needs.num_tokens * per_token
    if seqs + tokens <= available:
        return
    if seqs >= tokens:
        name, value, largest = "max_num_seqs", needs.num_seqs, (available - tokens) // per_seq - 1
    else:
        name, value, largest = "max_num_batched_tokens", needs.num_tokens, (available - seqs) // per_token
    fits = f"the largest {name} that fits is {largest}" if largest > 0 else "give smaller ones"
    raise ConfigError(
        f"{name}={value} is not allowed here: beside weights and pool, max_num_seqs={needs.num_seqs} and "
        f"max_num_batched_tokens={needs.num_tokens} with max_model_len={needs.max_model_len} take at least "
        f"{in_bytes(seqs + tokens)}, but {in_bytes(available)} of {where} are free; {fits}"
    )


def in_bytes(count: int) -> str:
    """A number of bytes for people: exact, and in GiB where that says more."""
    tenths = 10 * count >> 30  # in whole numbers: what is asked for may be too large for a float
    return f"{count} bytes ({tenths // 10:,}.{tenths % 10} GiB)" if tenths else f"{count} bytes"
