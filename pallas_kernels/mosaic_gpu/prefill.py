"""`paged_attention` and `flash_attention` on Mosaic GPU: tiles of query tokens, each walking the KV axis."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.mosaic_gpu import sources
from pallas_kernels.mosaic_gpu.attend import MAX_CONSUMERS, ROWS, Config, Mask, Work, attend, deepest
from pallas_kernels.mosaic_gpu.paged_decode import paged_decode
from pallas_kernels.ragged import QueryTiles, decode_singles


def default_config(query_rows: int, head_dim: int, itemsize: int) -> Config:
    """One consumer if that holds all query rows of a KV head, and as many stages as fit."""
    consumers = max(1, min(MAX_CONSUMERS, pl.cdiv(query_rows, ROWS)))
    return deepest(head_dim, itemsize, consumers, partial=False)


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Num[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Num[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    query_start_loc: Int[Array, " seqs+1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    v_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    interpret: Any = False,
    config: Config | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Sequences with one query token as in `paged_decode`, the others in tiles; `config` is that of the tiles."""
    num_tokens, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_pool.shape
    group = heads // kv_heads
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    decode = functools.partial(paged_decode, **options, k_scale=k_scale, v_scale=v_scale, interpret=interpret)
    out, lse = decode_singles(decode, q, k_pool, v_pool, block_tables, seq_lens, query_start_loc)
    config = config or default_config(num_tokens * group, head_dim, k_pool.dtype.itemsize)
    rows = config.consumers * ROWS
    tiles = QueryTiles.plan(seq_lens, query_start_loc, num_tokens, rows // group)
    if not len(tiles.seq):
        return out, lse
    packed = tiles.pack(q, kv_heads)
    used = packed.shape[2]
    tiled, tiled_lse = attend(
        _pad(packed, 2, rows),
        k_pool,
        v_pool,
        (block_tables,),
        sources.gathered(k_scale, block_tables) + sources.gathered(v_scale, block_tables),
        Work(tiles.seq, tiles.first_position, tiles.first_position + tiles.num_tokens, tiles.rows),
        source=sources.paged(block_size),
        mask=Mask(**options),
        config=config,
        split=None,
        interpret=interpret,
    )
    return tiles.unpack(tiled[:, :, :used], out), tiles.unpack(tiled_lse[:, :, :used], lse)


def flash_attention(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    kv_lens: Int[Array, " batch"] | None,
    *,
    causal: bool,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: Any = False,
    config: Config | None = None,
) -> Float[Array, "batch q_len heads head_dim"]:
    """Contiguous: `paged_attention`'s tiles over K and V in one run."""
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    config = config or default_config(q_len * group, head_dim, k.dtype.itemsize)
    rows = config.consumers * ROWS
    tokens = rows // group
    tiles = pl.cdiv(q_len, tokens)
    packed = jnp.pad(q, ((0, 0), (0, tiles * tokens - q_len), (0, 0), (0, 0)))
    packed = packed.reshape(batch * tiles, tokens, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    packed = packed.reshape(batch * tiles, kv_heads, group * tokens, head_dim)
    lens = jnp.full(batch, kv_len, jnp.int32) if kv_lens is None else kv_lens
    ends = jnp.repeat(lens, tiles, total_repeat_length=batch * tiles)
    first = ends - q_len + jnp.tile(jnp.arange(tiles, dtype=jnp.int32) * tokens, batch)
    end = jnp.clip(first + tokens, 0, ends) if causal else ends
    out, _ = attend(
        _pad(packed, 2, rows),
        _pad(k, 1, pl.cdiv(kv_len, 8) * 8),  # TMA wants whole rows of a tile
        _pad(v, 1, pl.cdiv(kv_len, 8) * 8),
        (),
        (),
        Work(
            jnp.repeat(jnp.arange(batch, dtype=jnp.int32), tiles, total_repeat_length=batch * tiles),
            first,
            end,
            tokens,
        ),
        source=sources.contiguous(),
        mask=Mask(scale, causal=causal, sliding_window=sliding_window, soft_cap=soft_cap),
        config=config,
        split=None,
        interpret=interpret,
    )
    out = jnp.where((end > 0)[:, None, None, None], out, 0)[:, :, : group * tokens]
    out = out.reshape(batch, tiles, kv_heads, group, tokens, head_dim).transpose(0, 1, 4, 2, 3, 5)
    return out.reshape(batch, tiles * tokens, heads, head_dim)[:, :q_len]


def _pad(array: Array, axis: int, length: int) -> Array:
    """Zeros up to `length` on one axis; a copy only where there is something to add."""
    return jnp.pad(array, [(0, length - size if at == axis else 0) for at, size in enumerate(array.shape)])
