"""The physical KV pool as a pytree of arrays, and how large to make it.

Physical block 0 is the null block: never handed out, padding reads and writes land there. `num_blocks` counts usable
blocks; the arrays hold one more.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.device.memory import HOST_BYTES_PER_BLOCK, FreeMemory, check_needs, in_bytes, plan_needs
from pagedjax.errors import ConfigError

NULL_BLOCK = 0
_MAX_INDEX = 2**31 - 1  # of a row (block, head, slot) of the pool, as kernels count them


class KVPool(struct.PyTreeNode):
    """Keys and values of all layers. A list over layers, since donation and aliasing work leaf by leaf.

    Attributes:
        k, v: per layer [num_blocks + 1, num_kv_heads, block_size, head_dim].
    """

    k: list[Float[Array, "blocks kv_heads block_size head_dim"]]
    v: list[Float[Array, "blocks kv_heads block_size head_dim"]]

    @classmethod
    def create(cls, model: ModelConfig, block_size: int, num_blocks: int, dtype: str) -> KVPool:
        """A pool of zeros with `num_blocks` usable blocks, made in one compiled call.

        Raises:
            ConfigError: the memory that was free when the pool was planned is not there.
        """
        shape = (num_blocks + 1, model.num_kv_heads, block_size, model.head_dim)

        def make() -> KVPool:
            return cls(*([jnp.zeros(shape, dtype) for _ in range(model.num_layers)] for _ in "kv"))

        try:
            return jax.block_until_ready(jax.jit(make)())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            asked = in_bytes((num_blocks + 1) * bytes_per_block(model, block_size, dtype))
            raise ConfigError(
                f"num_blocks={num_blocks}: the pool's {asked} cannot be allocated, though they seemed to be free: give "
                "a smaller num_blocks or pool_bytes"
            ) from error


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


def plan_pool(config: EngineConfig, model: ModelConfig, max_model_len: int, free: FreeMemory) -> PoolInfo:
    """Sizes the pool: by block count, by bytes, or half of what is free.

    The default never takes more than `max_num_seqs` sequences of `max_model_len` tokens could use.

    Raises:
        ConfigError: the memory named leaves no block; or the pool, or what else the engine needs, does not fit into
            the memory that is free.
    """
    beside = check_needs(plan_needs(config, model, max_model_len), free)
    block_bytes = bytes_per_block(model, config.block_size, config.pool_dtype)
    if config.num_blocks is not None:
        pool = PoolInfo(config.num_blocks, config.block_size, block_bytes, f"num_blocks={config.num_blocks}")
    else:
        pool = _pool_of_bytes(config, block_bytes, max_model_len, free.device - beside)
    _check_fits(pool, model, free, beside)
    return pool


def _pool_of_bytes(config: EngineConfig, block_bytes: int, max_model_len: int, free_bytes: int) -> PoolInfo:
    given = config.pool_bytes is not None
    budget = config.pool_bytes if config.pool_bytes is not None else free_bytes // 2
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


def _check_fits(pool: PoolInfo, model: ModelConfig, free: FreeMemory, beside: int) -> None:
    """Raises ConfigError saying what was asked for, what is free and what fits, if the pool is too large."""
    each = pool.bytes_per_block + (HOST_BYTES_PER_BLOCK if free.shared else 0)
    by_index = _MAX_INDEX // (pool.block_size * model.num_kv_heads)
    largest = min((free.device - beside) // each, by_index) - 1
    if pool.num_blocks <= largest:
        return
    if largest < 1:
        fits = f"not even one block of {pool.block_size} tokens fits (a block takes {in_bytes(pool.bytes_per_block)})"
    else:
        fits = f"the largest num_blocks that fits is {largest} (pool_bytes={(largest + 1) * pool.bytes_per_block})"
    if largest == by_index - 1:
        fits += ", since a pool's rows are counted in 32 bits"
    raise ConfigError(
        f"{pool.chosen_by} with block_size={pool.block_size} is not allowed here: the pool would take "
        f"{in_bytes(pool.pool_bytes)}, but {in_bytes(free.device)} of {free.device_name} are free, of which the engine "
        f"needs {in_bytes(beside)} for other things; {fits}"
    )
