"""How large the pieces are that the attention kernels take at a time, bounded by the chip's vector memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MAX_BLOCK_SIZE = 256  # tokens
VMEM_BYTES = 12 * 2**20  # of the 16 MiB that a kernel gets on the smallest chips (v4, v5e, v5p by default)


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of one attention kernel.

    Attributes:
        kv_heads: KV heads that one program takes; it divides the pool's. Two programs or more fill both cores of a v4
            or v5p.
        query_tokens: query tokens of a tile; 1 for decode, else a power of two from 16 on.
        kv_tokens: tokens of the KV axis that one step takes, at fixed positions; a power of two, and a whole block at
            least. Results depend on it in the last bits.
    """

    kv_heads: int
    query_tokens: int
    kv_tokens: int = MAX_BLOCK_SIZE

    def __post_init__(self):
        if self.kv_heads < 1:
            raise ValueError(f"kv_heads is {self.kv_heads}; it must be >= 1")
        if self.query_tokens != 1 and (self.query_tokens < 16 or self.query_tokens & (self.query_tokens - 1)):
            raise ValueError(f"query_tokens is {self.query_tokens}; it must be 1 or a power of two >= 16")
        if self.kv_tokens < MAX_BLOCK_SIZE or self.kv_tokens & (self.kv_tokens - 1):
            raise ValueError(f"kv_tokens is {self.kv_tokens}; it must be a power of two >= {MAX_BLOCK_SIZE}")

    def rows(self, group: int, dtype: Any) -> int:
        """Rows of a query tile: `group` heads times `query_tokens`, padded to what a register of `dtype` holds."""
        sublanes = 32 // jnp.dtype(dtype).itemsize
        return pl.cdiv(group * self.query_tokens, sublanes) * sublanes

    def vmem_bytes(self, group: int, head_dim: int, q_dtype: Any, pool_dtype: Any) -> int:
        """Vector memory that a kernel of these sizes asks for, in bytes, the scores among it."""
        rows = self.rows(group, q_dtype)
        kv = 2 * 2 * self.kv_heads * self.kv_tokens * head_dim * jnp.dtype(pool_dtype).itemsize
        queries = 2 * 2 * self.kv_heads * rows * head_dim * jnp.dtype(q_dtype).itemsize
        state = self.kv_heads * rows * (head_dim + 2 * LANES) * 4
        at_once = self.kv_heads if self.query_tokens == 1 else 1
        scores = at_once * 4 * (3 * rows * self.kv_tokens + 2 * self.kv_tokens * head_dim)
        return kv + queries + state + scores


def default_config(kv_heads: int, group: int, head_dim: int, q_dtype: Any, pool_dtype: Any, *, decode: bool) -> Config:
    """As many KV heads a program as fit, but two programs for two cores; about 256 rows of queries if not `decode`.

    Args:
        kv_heads: of the pool.
        group: query heads per KV head.
        head_dim: as stored.
        q_dtype: of the queries.
        pool_dtype: of the pools.
        decode: one query token per sequence.
    """
    query_tokens = 1 if decode else max(16, min(128, 1 << (256 // group).bit_length() - 1))
    configs = [Config(kv_heads // share, query_tokens) for share in range(1, kv_heads + 1) if kv_heads % share == 0]
    for config in configs:
        cores_used = kv_heads // config.kv_heads >= _cores() or config is configs[-1]
        if cores_used and config.vmem_bytes(group, head_dim, q_dtype, pool_dtype) <= VMEM_BYTES:
            return config
    return configs[-1]


def _cores() -> int:
    """Cores that share the work of one device: two on v4 and v5p."""
    try:
        return pltpu.get_tpu_info().num_cores
    except ValueError:  # no TPU: the kernel is interpreted
        return 1
