"""`paged_attention` on Pallas' Triton backend: decodes as `paged_decode`, the others in tiles of query tokens.

One program takes some query tokens of one sequence with all heads of one KV head, packed into the rows of a
tensor-core tile, straight from the ragged token axis. It walks K and V as far as its last token sees them, and
compares positions only in the tiles where some of its tokens see more than others.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.ragged import QueryTiles, decode_singles
from pallas_kernels.triton.launch import check_launch, check_power_of_two, pipeline_stages
from pallas_kernels.triton.paged_decode import paged_decode
from pallas_kernels.triton.tiles import (
    MIN_ROWS,
    Math,
    PagedReader,
    Sight,
    load_rows,
    padded_width,
    plgpu,
    product_dtype,
    store_rows,
)
from pallas_kernels.tuning import tuned


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel for query tiles is launched.

    Attributes:
        rows: of one tile: query tokens times the heads of one KV head; more of these than rows get a larger tile.
        num_warps: of one program.
        num_stages: of the pipeline that brings K and V.
    """

    rows: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_power_of_two("rows", self.rows, MIN_ROWS, 256)
        check_launch(self.num_warps, self.num_stages)


def default_config(q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct) -> Config:
    """For these arrays: as many rows as leave registers to spare, and no more shared memory than there is."""
    width, dtype = padded_width(q.shape[-1]), product_dtype(q, k)
    row_bytes = width * k.dtype.itemsize
    if dtype == jnp.float32:
        rows = 32 if row_bytes <= 256 else 16
    elif dtype == k.dtype:
        rows = 128 if row_bytes <= 256 else 64
    else:  # each warp converts all of K and V that it multiplies with
        rows = 64 if width == 128 else 32
    return Config(rows, num_warps=8, num_stages=pipeline_stages(row_bytes))


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
    interpret: bool = False,
    config: Config | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Ragged and causal; sequences with one query token give what `paged_decode` gives, padding zeros and MASKED."""
    tokens, heads, head_dim = q.shape
    decode = functools.partial(
        paged_decode,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        interpret=interpret,
    )
    out, lse = decode_singles(decode, q, k_pool, v_pool, block_tables, seq_lens, query_start_loc)
    if tokens == 1:
        return out, lse
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    config = config or tuned(Config, "triton", "paged_attention", q, k_pool) or default_config(q, k_pool)
    rows = max(config.rows, pl.next_power_of_2(group))
    tiles = QueryTiles.plan(seq_lens, query_start_loc, tokens, rows // group)
    scales = () if k_scale is None or v_scale is None else (k_scale, v_scale)
    plan = (tiles.seq, tiles.first_token, tiles.num_tokens, tiles.first_position)
    arrays = (*plan, q.reshape(-1, head_dim), block_tables, k_pool, v_pool, *scales)
    flat = out.reshape(-1, head_dim), lse.reshape(-1)
    out, lse = pl.pallas_call(
        functools.partial(
            _attend_queries,
            rows=rows,
            heads=heads,
            sliding_window=sliding_window,
            how=Math.of(q, k_pool, scale, soft_cap),
        ),
        grid=(len(tiles.seq), kv_heads),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat),
        input_output_aliases={len(arrays): 0, len(arrays) + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_attention",
    )(*arrays, *flat)
    return out.reshape(q.shape), lse.reshape(tokens, heads)


def _attend_queries(
    seq_ref,  # of the tiles, all of them [tiles]: the row of the block table,
    first_token_ref,  # where they begin on the token axis,
    num_tokens_ref,  # how many tokens they have, 0 in an empty tile,
    first_position_ref,  # and where the first of these stands in its sequence
    q_ref,  # [tokens * heads, head_dim]
    table_ref,  # [seqs, max_blocks]
    k_ref,  # [blocks, kv_heads, block_size, head_dim]
    v_ref,  # the same
    *refs,  # if the pool is quantised, scales of K and V, [blocks, kv_heads, block_size]; the results as they were;
    # and the results, which lie where those did: [tokens * heads, head_dim] and [tokens * heads]
    rows: int,
    heads: int,
    sliding_window: int | None,
    how: Math,
):
    *scale_refs, _, _, out_ref, lse_ref = refs
    tile, head = pl.program_id(0), pl.program_id(1)
    kv_heads, width = k_ref.shape[1], padded_width(q_ref.shape[1])
    group = heads // kv_heads
    reader = PagedReader(k_ref, v_ref, tuple(scale_refs), table_ref, seq_ref[tile], head)
    num_tokens, first = num_tokens_ref[tile], first_position_ref[tile]
    row = jnp.arange(rows)
    token, valid = row // group, row // group < num_tokens
    q_row = (first_token_ref[tile] + token) * heads + head * group + row % group
    q = load_rows(q_ref, width, valid, q_row)
    out, lse = Sight.causal(first + token, first, num_tokens, sliding_window).walk(q, reader, how).finish()
    store_rows(out_ref, out, valid, q_row)
    plgpu.store(lse_ref.at[q_row], lse, mask=valid)
