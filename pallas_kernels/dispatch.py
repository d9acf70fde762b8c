"""Chooses a backend by platform and chip, and checks arguments before anything is traced."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels import xla


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    query_start_loc: Int[Array, " seqs+1"],
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> Float[Array, "tokens heads head_dim"]:
    """Ragged paged attention."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return xla.paged_attention(
        q, k_pool, v_pool, block_tables, seq_lens, query_start_loc,
        scale=scale, sliding_window=sliding_window, soft_cap=soft_cap,
    )


def write_kv(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    slot_mapping: Int[Array, " tokens"],
) -> tuple[Array, Array]:
    """New K and V into their slots."""
    return xla.write_kv(k, v, k_pool, v_pool, slot_mapping)
