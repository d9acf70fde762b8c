"""The swap space's memory: blocks as the device's pool stores them, in the host's memory (paper section 4.5).

One array holds whole blocks, all layers' K and V behind one another, so that a step's blocks travel as one piece. Where
the platform has pinned host memory they travel through it, which is what a device can write to by itself; on a CPU
both pools are plain host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import pallas_kernels
from pagedjax.device.kv_pool import KVPool, PoolLayout

PINNED = "pinned_host"

Blocks = tuple[Array, ...]
"""K and V [blocks, layers, 2, kv_heads, block_size, stored_dim]; then their scales, if there are any, without the last
axis."""


def gather_packed(pool: KVPool, ids: Int[Array, " count"]) -> Blocks:
    """Whole blocks out of all layers, one array for their K and V and one for their scales."""
    columns = zip(*pallas_kernels.gather_blocks(pool.layers, ids), strict=True)
    k, v, *scales = (jnp.stack(column, axis=1) for column in columns)
    pairs = [(k, v), tuple(scales)] if scales else [(k, v)]
    return tuple(jnp.stack(pair, axis=2) for pair in pairs)


def scatter_packed(pool: KVPool, ids: Int[Array, " count"], blocks: Blocks) -> KVPool:
    """Inverse of `gather_packed`: in place where the pool is donated."""
    layers = [
        tuple(packed[:, layer, half] for packed in blocks for half in range(2)) for layer in range(blocks[0].shape[1])
    ]
    return KVPool.of_layers(pallas_kernels.scatter_blocks(pool.layers, ids, layers))


def packed_shapes(layout: PoolLayout, count: int) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each array of `count` packed blocks."""
    rows = (count, layout.num_layers, 2, layout.num_kv_heads, layout.block_size)
    values = ((*rows, layout.stored_dim), jnp.dtype(layout.dtype))
    return [values, (rows, np.dtype(np.float32))] if layout.scales else [values]


def padded(blocks: np.ndarray, size: int) -> np.ndarray:
    """Blocks, and zeros behind them, `size` in all: always a copy, which nobody else writes to."""
    return np.concatenate([blocks, np.zeros((size - len(blocks), *blocks.shape[1:]), blocks.dtype)])


class HostPool:
    """Blocks 1 to `num_blocks` in the host's memory.

    What comes from the device is written when it has arrived: `flush` waits for it.
    """

    def __init__(self, layout: PoolLayout, num_blocks: int, sharding: Any) -> None:
        # Written to once: memory that is not there must be missed now, not in an hour.
        self.arrays = [np.full(shape, 0, dtype) for shape, dtype in packed_shapes(layout, num_blocks)]
        self._sharding = sharding
        self._staging = _pinned(sharding)
        self._arriving: list[tuple[np.ndarray, Blocks]] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays)

    def store(self, ids: Sequence[int], blocks: Blocks) -> None:
        """Takes blocks from the device, maybe still being computed; those after `ids` are padding."""
        if self._staging is not None:
            blocks = tuple(jax.device_put(array, self._staging) for array in blocks)
        self._arriving.append((np.array(ids) - 1, blocks))

    def flush(self) -> None:
        """Waits for all that is on its way, and writes it to its place."""
        arriving, self._arriving = self._arriving, []
        for rows, blocks in arriving:
            for array, part in zip(self.arrays, blocks, strict=True):
                array[rows] = np.asarray(part)[: len(rows)]

    def forget(self) -> None:
        """Lets what is on its way never arrive."""
        self._arriving.clear()

    def load(self, ids: Sequence[int], size: int) -> Any:
        """Blocks as the device takes them, padded to `size`."""
        self.flush()
        rows = np.array(ids) - 1
        parts = tuple(padded(array[rows], size) for array in self.arrays)
        if self._staging is None:
            return parts
        return jax.device_put(jax.device_put(parts, self._staging), self._sharding)


def _pinned(sharding: Any) -> Any:
    """The same devices' pinned host memory; None where there is none, or no need of it."""
    device = next(iter(sharding.device_set))
    if device.platform == "cpu" or PINNED not in {memory.kind for memory in device.addressable_memories()}:
        return None
    return sharding.with_memory_kind(PINNED)
