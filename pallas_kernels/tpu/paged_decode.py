"""`paged_decode` on TPUs: each sequence is a query tile of one token, and one core walks the whole of it: no splits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.attend import Items, attend
from pallas_kernels.tpu.config import Config, default_config
from pallas_kernels.tuning import tuned


def paged_decode(
    q: Float[Array, "seqs heads head_dim"],
    k_pool: Array,
    v_pool: Array,
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    v_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "seqs heads head_dim"], Float[Array, "seqs heads"]]:
    """One query token per sequence, the last of its `seq_lens` tokens; zeros for a row of length 0.

    Products are taken in the wider of the dtypes of `q` and the pools, float32 ones in full.
    """
    seqs, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    config = config or tuned(Config, "tpu", "paged_decode", q, k_pool)
    config = config or default_config(kv_heads, group, head_dim, q.dtype, k_pool.dtype, decode=True)
    if config.query_tokens != 1:
        raise ValueError(f"config has query_tokens {config.query_tokens}; paged_decode takes 1")
    rows = config.rows(group, q.dtype)
    packed = q.reshape(seqs, kv_heads, group, head_dim)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    each = jnp.arange(seqs, dtype=jnp.int32)
    items = Items(
        count=jnp.full(1, seqs, jnp.int32),
        tile=each,
        seq=each,
        first_row=jnp.zeros_like(each),
        num_rows=(seq_lens > 0).astype(jnp.int32),
        first_position=jnp.maximum(seq_lens - 1, 0),
    )
    out, lse = attend(
        packed,
        k_pool,
        v_pool,
        block_tables,
        items,
        config=config,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        interpret=interpret,
        name="paged_decode",
    )
    return out[:, :, :group].reshape(q.shape), lse[:, :, :group].reshape(seqs, heads)
