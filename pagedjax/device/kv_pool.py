"""The physical KV pool as a pytree of arrays, and how large to make it.

Physical block 0 is the null block: never handed out, padding reads and writes land there. `num_blocks` counts usable
blocks; the arrays hold one more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Real

from pagedjax.config import QUANTIZED_KV_CACHE_DTYPES, EngineConfig, ModelConfig
from pagedjax.device.batch import STAGING_BYTES
from pagedjax.device.memory import HOST_BYTES_PER_BLOCK, FreeMemory, check_needs, in_bytes, plan_needs
from pagedjax.errors import ConfigError

NULL_BLOCK = 0
LANES = 128  # numbers in a row that a TPU stores
_MAX_INDEX = 2**31 - 1  # of a row (block, head, slot) of the pool, as kernels count them


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """How K and V are stored.

    Attributes:
        num_layers, num_kv_heads, block_size: of the model and the configuration.
        stored_dim: numbers in the row of one token and head; more than head_dim where a chip wants it so.
        dtype: of the numbers.
        scales: whether each row has a float32 scale, as int8 and float8 need.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    stored_dim: int
    dtype: str
    scales: bool = False

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig, backend: str = "xla") -> PoolLayout:
        """What a configuration asks for, with rows as a backend of `pallas_kernels` wants them."""
        width = -(-model.head_dim // LANES) * LANES if backend == "tpu" else model.head_dim
        dtype = config.pool_dtype
        return cls(
            model.num_layers, model.num_kv_heads, config.block_size, width, dtype, dtype in QUANTIZED_KV_CACHE_DTYPES
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block's K and V over all layers, as stored, their scales included."""
        rows = 2 * self.num_layers * self.num_kv_heads * self.block_size
        return rows * (self.stored_dim * jnp.dtype(self.dtype).itemsize + 4 * self.scales)


class KVPool(struct.PyTreeNode):
    """Keys and values of all layers. A list over layers, since donation and aliasing work leaf by leaf.

    Attributes:
        k, v: per layer [num_blocks + 1, num_kv_heads, block_size, stored_dim].
        k_scale, v_scale: per layer [num_blocks + 1, num_kv_heads, block_size]; no layers at all for a pool of floats.
    """

    k: list[Real[Array, "blocks kv_heads block_size stored_dim"]]
    v: list[Real[Array, "blocks kv_heads block_size stored_dim"]]
    k_scale: list[Float[Array, "blocks kv_heads block_size"]]
    v_scale: list[Float[Array, "blocks kv_heads block_size"]]

    @property
    def layers(self) -> list[tuple[Array, ...]]:
        """Per layer K and V, and their scales if there are any: what `write_kv` takes and gives."""
        columns = (self.k, self.v, self.k_scale, self.v_scale) if self.k_scale else (self.k, self.v)
        return list(zip(*columns, strict=True))

    @classmethod
    def of_layers(cls, layers: list[tuple[Array, ...]]) -> KVPool:
        """Inverse of `layers`."""
        columns = [list(column) for column in zip(*layers, strict=True)]
        return cls(*columns, *([] for _ in range(4 - len(columns))))

    @classmethod
    def create(cls, layout: PoolLayout, num_blocks: int) -> KVPool:
        """A pool of zeros with `num_blocks` usable blocks, made in one compiled call.

        Raises:
            ConfigError: the memory that was free when the pool was planned is not there.
        """
        rows = (num_blocks + 1, layout.num_kv_heads, layout.block_size)

        def make() -> KVPool:
            def arrays(count: int, shape: tuple[int, ...], dtype: str) -> list[Array]:
                return [jnp.zeros(shape, dtype) for _ in range(count)]

            num_scales = layout.num_layers if layout.scales else 0
            return cls(
                *(arrays(layout.num_layers, (*rows, layout.stored_dim), layout.dtype) for _ in "kv"),
                *(arrays(num_scales, rows, "float32") for _ in "kv"),
            )

        try:
            return jax.block_until_ready(jax.jit(make)())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            asked = in_bytes((num_blocks + 1) * layout.bytes_per_block)
            raise ConfigError(
                f"num_blocks={num_blocks}: the pool's {asked} cannot be allocated, though they seemed to be free: give "
                "a smaller num_blocks or pool_bytes"
            ) from error


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The pool's size and where it comes from.

    Attributes:
        num_blocks: usable blocks.
        layout: how they are stored.
        chosen_by: one sentence for people.
        num_host_blocks: blocks of the swap space.
    """

    num_blocks: int
    layout: PoolLayout
    chosen_by: str
    num_host_blocks: int = 0

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.layout.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V over all layers."""
        return self.layout.bytes_per_block

    @property
    def pool_bytes(self) -> int:
        """Bytes of the arrays, the null block included."""
        return (self.num_blocks + 1) * self.bytes_per_block

    @property
    def host_bytes(self) -> int:
        """Bytes of the swap space."""
        return self.num_host_blocks * self.bytes_per_block

    @property
    def num_slots(self) -> int:
        """Tokens that the pool can hold."""
        return self.num_blocks * self.block_size


def plan_pool(
    config: EngineConfig, model: ModelConfig, max_model_len: int, free: FreeMemory, backend: str = "xla"
) -> PoolInfo:
    """Sizes the pool: by block count, by bytes, or half of what is free.

    The default never takes more than `max_num_seqs` sequences of `max_model_len` tokens could use.

    Raises:
        ConfigError: the memory named leaves no block; or the pool, or what else the engine needs, does not fit into
            the memory that is free.
    """
    beside = check_needs(plan_needs(config, model, max_model_len), free)
    layout = PoolLayout.of(model, config, backend)
    num_host_blocks = _host_blocks(config, layout.bytes_per_block, free.host - (beside if free.shared else 0))
    if num_host_blocks:
        staged = min(STAGING_BYTES, num_host_blocks * layout.bytes_per_block)
        beside += staged + (num_host_blocks * layout.bytes_per_block + staged if free.shared else 0)
    if config.num_blocks is not None:
        pool = PoolInfo(config.num_blocks, layout, f"num_blocks={config.num_blocks}", num_host_blocks)
    else:
        pool = replace(
            _pool_of_bytes(config, layout, max_model_len, free.device - beside), num_host_blocks=num_host_blocks
        )
    _check_fits(pool, free, beside)
    return pool


def _host_blocks(config: EngineConfig, bytes_per_block: int, free_bytes: int) -> int:
    """Blocks of the swap space. Raises ConfigError if it has none, or does not fit into the host's memory."""
    space = config.swap_space
    if 0 < space < bytes_per_block:
        raise ConfigError(
            f"swap_space={space} leaves no block: one block of {config.block_size} tokens takes {bytes_per_block} "
            f"bytes; allowed is 0 (no swapping) or at least {bytes_per_block} bytes"
        )
    if space > free_bytes:
        raise ConfigError(
            f"swap_space={space} is not allowed here: {in_bytes(space)} were asked for, but "
            f"{in_bytes(max(0, free_bytes))} of host memory are free"
        )
    return space // bytes_per_block


def _pool_of_bytes(config: EngineConfig, layout: PoolLayout, max_model_len: int, free_bytes: int) -> PoolInfo:
    block_bytes = layout.bytes_per_block
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
    return PoolInfo(num_blocks, layout, chosen)


def _check_fits(pool: PoolInfo, free: FreeMemory, beside: int) -> None:
    """Raises ConfigError saying what was asked for, what is free and what fits, if the pool is too large."""
    each = pool.bytes_per_block + (HOST_BYTES_PER_BLOCK if free.shared else 0)
    by_index = _MAX_INDEX // (pool.block_size * pool.layout.num_kv_heads)
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
