"""The physical KV pool as a pytree of arrays, and how large to make it.

Physical block 0 is the null block: never handed out, padding reads and writes land there. `num_blocks` counts usable
blocks; the arrays hold one more.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from flax import struct
from jaxtyping import Array, Float

from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.errors import ConfigError

NULL_BLOCK = 0


class KVPool(struct.PyTreeNode):
    """Keys and values of all layers. A list over layers, since donation and aliasing work leaf by leaf.

    Attributes:
        k, v: per layer [num_blocks + 1, num_kv_heads, block_size, head_dim].
    """

    k: list[Float[Array, "blocks kv_heads block_size head_dim"]]
    v: list[Float[Array, "blocks kv_heads block_size head_dim"]]

    @classmethod
    def create(cls, model: ModelConfig, block_size: int, num_blocks: int, dtype: str) -> KVPool:
        """A pool of zeros with `num_blocks` usable blocks, made in one compiled call."""
        shape = (num_blocks + 1, model.num_kv_heads, block_size, model.head_dim)

        def make() -> KVPool:
            return cls(*([jnp.zeros(shape, dtype) for _ in range(model.num_layers)] for _ in "kv"))

        return jax.jit(make)()


def bytes_per_block(model: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block's K and V over all layers, as stored."""
    tokens = 2 * model.num_layers * model.num_kv_heads * block_size
    return tokens * model.head_dim * jnp.dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The pool's size and where it comes from.

    Attributes:
        num_blocks: usable blocks.
        block_size: tokens per block.
        bytes_per_block: of K and V over all layers.
        chosen_by: one sentence for people.
    """

    num_blocks: int
    block_size: int
    bytes_per_block: int
    chosen_by: str

    @property
    def pool_bytes(self) -> int:
        """Bytes of the arrays, the null block included."""
        return (self.num_blocks + 1) * self.bytes_per_block

    @property
    def num_slots(self) -> int:
        """Tokens that the pool can hold."""
        return self.num_blocks * self.block_size


def _cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's memory limit leaves, or None where there is no limit."""
    try:
        limit = (root / "memory.max").read_text().strip()
        return None if limit == "max" else max(0, int(limit) - int((root / "memory.current").read_text()))
    except (OSError, ValueError):
        return None


def free_device_bytes(device: Any) -> int:
    """Memory that arrays on `device` could still take: XLA's limit less what is in use, or the host's free memory."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    free = psutil.virtual_memory().available
    limit = _cgroup_free_bytes() if os.name == "posix" else None
    return free if limit is None else min(free, limit)


def plan_pool(config: EngineConfig, model: ModelConfig, max_model_len: int, free_bytes: int) -> PoolInfo:
    """Sizes the pool: by block count, by bytes, or half of `free_bytes`.

    The default never takes more than `max_num_seqs` sequences of `max_model_len` tokens could use.

    Raises:
        ConfigError: when the memory named leaves no block.
    """
    block_bytes = bytes_per_block(model, config.block_size, config.pool_dtype)
    if config.num_blocks is not None:
        return PoolInfo(config.num_blocks, config.block_size, block_bytes, f"num_blocks={config.num_blocks}")
    budget = config.pool_bytes if config.pool_bytes is not None else free_bytes // 2
    given = config.pool_bytes is not None
    chosen = f"pool_bytes={budget}" if given else f"half of the {free_bytes} bytes that are free"
    num_blocks = budget // block_bytes - 1
    if num_blocks < 1:
        raise ConfigError(
            f"a pool of {budget} bytes ({chosen}) leaves no block: one block of {config.block_size} tokens takes "
            f"{block_bytes} bytes and the null block as much; allowed is at least {2 * block_bytes} bytes"
        )
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    if not given and num_blocks > useful:
        chosen = f"max_num_seqs={config.max_num_seqs} sequences of max_model_len={max_model_len} tokens"
        num_blocks = useful
    return PoolInfo(num_blocks, config.block_size, block_bytes, chosen)
