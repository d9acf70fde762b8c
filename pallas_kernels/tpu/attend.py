"""The attention kernel of the TPU: decode and prefill are one kernel, with query tiles of one token or of many.

A program takes some KV heads and walks through items, each a stretch of query tokens of one sequence within one tile of
the token axis. K and V come block by block, through the block table, by DMA from the pool where it lies into one of
two buffers; while one is computed with, the other is filled, from the next item too. An item's tokens are walked in
steps at fixed positions, so that neither the block size nor the neighbours change a bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.constants import MASKED, QUANTIZED
from pallas_kernels.tpu.config import LANES, Config


class Items(NamedTuple):
    """What the kernel walks through, in order; tiles do not decrease. Items from `count` on are not visited.

    Attributes:
        count: how many there are, i32[1].
        tile: the query tile, i32[items].
        seq: row of the block table, i32[items].
        first_row: where in its tile the item begins, in query tokens, i32[items].
        num_rows: query tokens, i32[items]; 0 for a sequence that has none, which gives zeros.
        first_position: of its first query token in the sequence, i32[items].
    """

    count: Int[Array, " 1"]
    tile: Int[Array, " items"]
    seq: Int[Array, " items"]
    first_row: Int[Array, " items"]
    num_rows: Int[Array, " items"]
    first_position: Int[Array, " items"]


def attend(
    q: Float[Array, "tiles kv_heads rows head_dim"],
    k_pool: Array,
    v_pool: Array,
    block_tables: Int[Array, "seqs max_blocks"],
    items: Items,
    *,
    config: Config,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: Array | None,
    v_scale: Array | None,
    interpret: Any,
    name: str,
) -> tuple[Float[Array, "tiles kv_heads rows head_dim"], Float[Array, "tiles kv_heads rows"]]:
    """Attention of the query tiles, and its log-sum-exp; a tile that no item visits is left as it was, undefined.

    Row `g * query_tokens + t` of a tile is its query token `t` of the group's head `g`.
    """
    tiles, kv_heads, rows, head_dim = q.shape
    block_size = k_pool.shape[2]
    heads = config.kv_heads
    scales = () if k_scale is None else (k_scale, v_scale)
    num_items = len(items.tile)
    used = (jnp.arange(num_items) < items.count) & (items.num_rows > 0)
    # The next item that reads K and V, for whoever is to fetch for it: entry i + 1 is that behind item i.
    following = lax.cummin(jnp.where(used, jnp.arange(num_items, dtype=jnp.int32), num_items), reverse=True)
    following = jnp.concatenate([following, jnp.full(1, num_items, jnp.int32)])

    def of_tile(width: int, lines: int) -> pl.BlockSpec:
        def index(head, item, count, tile, *_):
            return tile[jnp.maximum(jnp.minimum(item, count[0] - 1), 0)], head, 0, 0

        return pl.BlockSpec((1, heads, lines, width), index)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((2, heads, config.kv_tokens, head_dim), k_pool.dtype)
    softmax = pltpu.VMEM((heads, rows, LANES), jnp.float32)
    body = functools.partial(
        _kernel,
        config=config,
        block_size=block_size,
        max_blocks=block_tables.shape[1],
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        quantized=bool(scales),
    )
    out, lse = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items) + 2,
            grid=(kv_heads // heads, num_items),
            in_specs=[of_tile(head_dim, rows), *[in_hbm] * (2 + len(scales))],
            out_specs=(of_tile(head_dim, rows), of_tile(rows, 1)),
            scratch_shapes=[
                buffer,
                buffer,
                *[pltpu.VMEM((2, config.kv_tokens // block_size, heads, block_size), jnp.float32)] * len(scales),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                softmax,
                softmax,
                pltpu.VMEM((heads, rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((tiles, kv_heads, 1, rows), jnp.float32),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name=name,
    )(*items, following, block_tables.reshape(-1), q, k_pool, v_pool, *scales)
    return out, lse[:, :, 0]


def _kernel(
    count_ref,  # i32[1], as all that follows down to the table in scalar memory
    tile_ref,  # [items]
    seq_ref,  # [items]
    first_row_ref,  # [items]
    num_rows_ref,  # [items]
    first_position_ref,  # [items]
    following_ref,  # [items + 1]
    table_ref,  # [seqs * max_blocks]
    q_ref,  # [1, heads, rows, head_dim], this tile's queries
    k_pool_ref,  # [blocks, kv_heads, block_size, head_dim], in HBM
    v_pool_ref,  # the same
    *refs,
    config: Config,
    block_size: int,
    max_blocks: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    quantized: bool,
):
    scale_pools, refs = (refs[:2], refs[2:]) if quantized else ((), refs)  # [blocks, kv_heads, block_size], in HBM
    out_ref, lse_ref, k_ref, v_ref, *refs = refs  # [1, heads, rows, head_dim], [1, heads, 1, rows]; the buffers
    scale_refs, refs = (refs[:2], refs[2:]) if quantized else ((), refs)  # [2, kv_tokens/block_size, heads, block_size]
    arrived, slot_ref, top_ref, total_ref, acc_ref = refs  # semaphores[2], i32[1], [heads, rows, 128] x 2, and of d
    heads, rows, step_tokens = config.kv_heads, q_ref.shape[2], config.kv_tokens
    num_items = seq_ref.shape[0]
    head = pl.program_id(0) * heads
    item = pl.program_id(1)
    blocks_per_step = step_tokens // block_size

    def span(item):
        """The tokens that an item's queries see, from a first one to behind a last one."""
        end = first_position_ref[item] + num_rows_ref[item]
        begin = 0 if sliding_window is None else jnp.maximum(first_position_ref[item] - sliding_window + 1, 0)
        return begin, jnp.where(num_rows_ref[item] > 0, end, 0)

    def move(item, step, slot, act):
        """Starts, or waits for, the DMA of each block that a step of an item reads."""
        begin, end = span(item)
        first = jnp.maximum(lax.div(begin, block_size), step * blocks_per_step)
        last = jnp.minimum(pl.cdiv(end, block_size), (step + 1) * blocks_per_step)

        def one_block(i, _):
            block = table_ref[seq_ref[item] * max_blocks + i]
            place = i - step * blocks_per_step
            tokens = pl.ds(pl.multiple_of(place * block_size, block_size), block_size)
            for pool, buffer in ((k_pool_ref, k_ref), (v_pool_ref, v_ref)):
                source = pool.at[block, pl.ds(head, heads)]
                act(pltpu.make_async_copy(source, buffer.at[slot, :, tokens], arrived.at[slot]))
            for pool, buffer in zip(scale_pools, scale_refs, strict=True):
                source = pool.at[block, pl.ds(head, heads)]
                act(pltpu.make_async_copy(source, buffer.at[slot, place], arrived.at[slot]))
            return 0

        lax.fori_loop(first, last, one_block, 0)

    def first_step(item):
        return lax.div(span(item)[0], step_tokens)

    def fetch(item, step, slot):
        pl.when(item < num_items)(lambda: move(item, step, slot, lambda copy: copy.start()))

    def first_fetch(item, slot):
        safe = jnp.minimum(item, num_items - 1)
        pl.when(item < num_items)(lambda: move(safe, first_step(safe), slot, lambda copy: copy.start()))

    @pl.when(item == 0)
    def _():
        slot_ref[0] = 0
        first_fetch(following_ref[0], 0)

    begin, end = span(item)
    first, last = first_step(item), pl.cdiv(end, step_tokens)

    def zero_unseen_values(step, slot):
        """0 x NaN is NaN, so what no query of the item sees must not stay in V."""
        position = step * step_tokens + lax.broadcasted_iota(jnp.int32, (step_tokens, 1), 0)
        keep = (position >= begin) & (position < end)
        for i in range(heads):
            v_ref[slot, i] = jnp.where(keep, v_ref[slot, i].astype(jnp.float32), 0).astype(v_ref.dtype)

    def attend_head(i, step, slot):
        product = functools.partial(_product, q_ref.dtype, k_ref.dtype)
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0) % config.query_tokens - first_row_ref[item]
        inside = (row >= 0) & (row < num_rows_ref[item])
        query = jnp.where(inside, first_position_ref[item] + row, -1)
        key = step * step_tokens + lax.broadcasted_iota(jnp.int32, (rows, step_tokens), 1)
        seen = key <= query
        if sliding_window is not None:
            seen &= key > query - sliding_window
        scores = product(q_ref[0, i], k_ref[slot, i], (1, 1)) * scale
        if quantized:
            scores *= _scales(scale_refs[0], slot, i)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen, scores, MASKED)
        old_top = top_ref[i, :, :1]
        new_top = jnp.maximum(old_top, scores.max(axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0)
        decay = jnp.exp(old_top - new_top)
        total = total_ref[i, :, :1] * decay + weights.sum(axis=1, keepdims=True)
        if quantized:
            weights = jnp.where(seen, weights * _scales(scale_refs[1], slot, i), 0)
        acc_ref[i] = acc_ref[i] * decay + product(weights, v_ref[slot, i], (1, 0))
        top_ref[i] = jnp.broadcast_to(new_top, (rows, LANES))
        total_ref[i] = jnp.broadcast_to(total, (rows, LANES))

    def one_step(step, slot):
        more = step + 1 < last
        pl.when(more)(lambda: fetch(item, step + 1, 1 - slot))
        pl.when(jnp.logical_not(more))(lambda: first_fetch(following_ref[item + 1], 1 - slot))
        move(item, step, slot, lambda copy: copy.wait())
        pl.when((step * step_tokens < begin) | ((step + 1) * step_tokens > end))(lambda: zero_unseen_values(step, slot))
        _for_each(heads, lambda i: attend_head(i, step, slot), unroll=config.query_tokens == 1)
        return 1 - slot

    def finish(i):
        total = total_ref[i, :, :1]
        safe = jnp.where(total > 0, total, 1)
        out_ref[0, i] = (acc_ref[i] / safe).astype(out_ref.dtype)
        lse = jnp.where(total > 0, top_ref[i, :, :1] + jnp.log(safe), MASKED)
        # A column becomes a row: its numbers on a diagonal, summed downwards.
        shape = (rows, rows)
        diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
        lse_ref[0, i] = jnp.where(diagonal, lse, 0).sum(axis=0, keepdims=True)

    @pl.when(item < count_ref[0])
    def _():
        tile = tile_ref[item]

        @pl.when((item == 0) | (tile_ref[jnp.maximum(item - 1, 0)] != tile))
        def _():
            top_ref[...] = jnp.full_like(top_ref, MASKED)
            total_ref[...] = jnp.zeros_like(total_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        slot_ref[0] = lax.fori_loop(first, last, one_step, slot_ref[0])

        @pl.when((item + 1 == count_ref[0]) | (tile_ref[jnp.minimum(item + 1, num_items - 1)] != tile))
        def _():
            _for_each(heads, finish, unroll=config.query_tokens == 1)


def _for_each(count: int, act: Any, *, unroll: bool) -> None:
    """Unrolled where there is little to do for each, so that the compiler overlaps them."""
    lax.fori_loop(0, count, lambda i, _: (act(i), 0)[1], 0, unroll=unroll)


def _product(q_dtype: Any, pool_dtype: Any, a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """`a` and `b` multiplied in the wider of the dtypes of queries and pools, float32 ones in full."""
    dtype = q_dtype if str(pool_dtype) in QUANTIZED else jnp.promote_types(q_dtype, pool_dtype)
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _scales(ref: Any, slot: Any, head: Any) -> Float[Array, "1 kv_tokens"]:
    """The scales of a step's tokens for one head, out of the blocks they came in."""
    blocks = ref.shape[1]
    return jnp.concatenate([ref[slot, j, pl.ds(head, 1)] for j in range(blocks)], axis=1)
