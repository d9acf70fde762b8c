"""`paged_attention` on TPUs: sequences with one query token as in `paged_decode`, the others in query tiles.

The tiles lie at fixed places of the token axis, so that the queries need no more memory than they have; a tile may
hold the end of one sequence and the beginning of others, each of which is an item of the kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.ragged import decode_singles
from pallas_kernels.tpu.attend import Items, attend
from pallas_kernels.tpu.config import Config, default_config
from pallas_kernels.tpu.paged_decode import paged_decode
from pallas_kernels.tuning import tuned

MIN_QUERIES = 2  # fewer query tokens are a decode


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Array,
    v_pool: Array,
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    query_start_loc: Int[Array, " seqs+1"],
    *,
    config: Config | None = None,
    interpret: Any = False,
    **options: Any,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Ragged and causal; `config` is of the query tiles, and `options` are those of `paged_decode`."""
    num_tokens, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    config = config or tuned(Config, "tpu", "paged_attention", q, k_pool)
    config = config or default_config(kv_heads, group, head_dim, q.dtype, k_pool.dtype, decode=False)
    if config.query_tokens == 1:
        raise ValueError("config has query_tokens 1; paged_attention takes 16 or more")
    decode = functools.partial(paged_decode, interpret=interpret, **options)
    out, lse = decode_singles(decode, q, k_pool, v_pool, block_tables, seq_lens, query_start_loc)
    if num_tokens < MIN_QUERIES:
        return out, lse
    tiled, lse_tiled = attend(
        _pack(q, kv_heads, config.query_tokens),
        k_pool,
        v_pool,
        block_tables,
        _plan(seq_lens, query_start_loc, num_tokens, config.query_tokens),
        config=config,
        interpret=interpret,
        name="paged_attention",
        **{"sliding_window": None, "soft_cap": None, "k_scale": None, "v_scale": None, **options},
    )
    seq = (query_start_loc[1:] <= jnp.arange(num_tokens)[:, None]).sum(axis=1)
    several = (jnp.diff(query_start_loc).at[seq].get(mode="fill", fill_value=0) >= MIN_QUERIES)[:, None]
    return (
        jnp.where(several[..., None], _unpack(tiled, config.query_tokens, num_tokens), out),
        jnp.where(several, _unpack(lse_tiled[..., None], config.query_tokens, num_tokens)[..., 0], lse),
    )


def _plan(
    seq_lens: Int[Array, " seqs"], query_start_loc: Int[Array, " seqs+1"], num_tokens: int, tile_tokens: int
) -> Items:
    """One item for each pair of a sequence with several query tokens and a tile that it has tokens in."""
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    query_lens = ends - starts
    first_tile = starts // tile_tokens
    tiles = jnp.where(query_lens >= MIN_QUERIES, (ends - 1) // tile_tokens - first_tile + 1, 0)
    behind = jnp.cumsum(tiles)
    most = pl.cdiv(num_tokens, tile_tokens) + min(len(seq_lens), num_tokens // MIN_QUERIES)
    item = jnp.arange(most, dtype=jnp.int32)
    used = item < behind[-1]
    seq = jnp.where(used, jnp.minimum((behind <= item[:, None]).sum(axis=1), len(seq_lens) - 1), 0)
    tile = first_tile[seq] + item - (behind - tiles)[seq]
    first_token = jnp.maximum(starts[seq], tile * tile_tokens)
    num_rows = jnp.minimum(ends[seq], (tile + 1) * tile_tokens) - first_token
    items = (
        tile,
        seq,
        first_token - tile * tile_tokens,
        num_rows,
        seq_lens[seq] - query_lens[seq] + first_token - starts[seq],
    )
    return Items(behind[-1:].astype(jnp.int32), *(jnp.where(used, x, 0).astype(jnp.int32) for x in items))


def _pack(
    q: Float[Array, "tokens heads head_dim"], kv_heads: int, tile_tokens: int
) -> Float[Array, "tiles kv_heads rows head_dim"]:
    """The queries in tiles, of which row `g * tile_tokens + t` is query token `t` of the group's head `g`."""
    num_tokens, heads, head_dim = q.shape
    tiles = pl.cdiv(num_tokens, tile_tokens)
    q = jnp.pad(q, ((0, tiles * tile_tokens - num_tokens), (0, 0), (0, 0)))
    q = q.reshape(tiles, tile_tokens, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    return q.reshape(tiles, kv_heads, -1, head_dim)


def _unpack(
    tiled: Float[Array, "tiles kv_heads rows width"], tile_tokens: int, num_tokens: int
) -> Float[Array, "tokens heads width"]:
    """Tiles as `_pack` makes them, taken apart."""
    tiles, kv_heads, _, width = tiled.shape
    tokens = tiled.reshape(tiles, kv_heads, -1, tile_tokens, width).transpose(0, 3, 1, 2, 4)
    return tokens.reshape(tiles * tile_tokens, -1, width)[:num_tokens]
