"""The attention kernel of the TPU: decode and prefill are one kernel, with query tiles of one token or of many.

A program takes some KV heads and walks through items, each a stretch of query tokens of one sequence within one tile of
the token axis. K and V come block by block, through the block table, by DMA from the pool where it lies into one of
two buffers; while one is computed with, the other is filled, from the next item too. An item's tokens are walked in
steps at fixed positions, so that neither the block size nor the neighbours change a bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.config import Config
from pallas_kernels.tpu.softmax import Softmax, for_rows, product


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
    if kv_heads % config.kv_heads:
        raise ValueError(f"config has kv_heads {config.kv_heads}; it must divide the {kv_heads} of the pool")
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

    max_blocks = block_tables.shape[1]

    def of_table(ahead: bool) -> pl.BlockSpec:
        def index(head, item, count, tile, seq, first_row, num_rows, first_position, following):
            reader = jnp.minimum(following[item + 1], num_items - 1) if ahead else item
            return seq[reader], 0, 0

        return pl.BlockSpec((1, 1, max_blocks), index, memory_space=pltpu.SMEM)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((2, heads, config.kv_tokens, head_dim), k_pool.dtype)
    body = functools.partial(
        _kernel,
        config=config,
        block_size=block_size,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        num_scales=len(scales),
        # With few rows a head is little work, and the compiler overlaps those of several; an interpreter does not.
        unroll=config.query_tokens == 1 and not interpret,
    )
    out, lse = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items) + 1,
            grid=(kv_heads // heads, num_items),
            in_specs=[of_table(False), of_table(True), of_tile(head_dim, rows), *[in_hbm] * (2 + len(scales))],
            out_specs=(of_tile(head_dim, rows), of_tile(rows, 1)),
            scratch_shapes=[
                buffer,
                buffer,
                *[pltpu.VMEM((2, config.kv_tokens // block_size, kv_heads, block_size), jnp.float32)] * len(scales),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                *Softmax.scratch((heads, rows), head_dim),
            ],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((tiles, kv_heads, 1, rows), jnp.float32),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name=name,
    )(*items, following, *[block_tables[:, None]] * 2, q, k_pool, v_pool, *scales)
    return out, lse[:, :, 0]


def _kernel(
    count_ref,  # i32[1], as all that follows down to the tables in scalar memory
    tile_ref,  # [items]
    seq_ref,  # [items]
    first_row_ref,  # [items]
    num_rows_ref,  # [items]
    first_position_ref,  # [items]
    following_ref,  # [items + 1]
    table_ref,  # [1, 1, max_blocks], this item's
    next_table_ref,  # the same of the next item that reads K and V
    q_ref,  # [1, heads, rows, head_dim], this tile's queries
    k_pool_ref,  # [blocks, kv_heads, block_size, head_dim], in HBM
    v_pool_ref,  # the same
    *refs,
    config: Config,
    block_size: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    num_scales: int,
    unroll: bool,
):
    # Scale pools [blocks, kv_heads, block_size], in HBM; [1, heads, rows, head_dim], [1, heads, 1, rows], the buffers;
    # theirs for the scales, [2, kv_tokens/block_size, kv_heads, block_size]; semaphores[2], i32[1]; the softmax's.
    scale_pools, tiles, scale_refs, others, state = _split(refs, num_scales, 4, num_scales, 2, 3)
    (out_ref, lse_ref, k_ref, v_ref), (arrived, slot_ref) = tiles, others
    softmax = Softmax(*state)  # of [heads, rows]
    heads, rows, step_tokens = config.kv_heads, q_ref.shape[2], config.kv_tokens
    num_items = seq_ref.shape[0]
    head = pl.program_id(0) * heads
    item = pl.program_id(1)
    blocks_per_step = step_tokens // block_size

    def for_each_head(act):
        def one_head(i, _):
            act(i)
            return 0

        lax.fori_loop(0, heads, one_head, 0, unroll=unroll)

    def span(item):
        """The tokens that an item's queries see, from a first one to behind a last one."""
        end = first_position_ref[item] + num_rows_ref[item]
        begin = 0 if sliding_window is None else jnp.maximum(first_position_ref[item] - sliding_window + 1, 0)
        return begin, jnp.where(num_rows_ref[item] > 0, end, 0)

    def move(table, item, step, slot, act):
        """Starts, or waits for, the DMA of each block that a step of an item reads."""
        begin, end = span(item)
        first = jnp.maximum(lax.div(begin, block_size), step * blocks_per_step)
        last = jnp.minimum(pl.cdiv(end, block_size), (step + 1) * blocks_per_step)

        def one_block(i, _):
            block = table[0, 0, i]
            place = i - step * blocks_per_step
            tokens = pl.ds(pl.multiple_of(place * block_size, block_size), block_size)
            for pool, buffer in ((k_pool_ref, k_ref), (v_pool_ref, v_ref)):
                source = pool.at[block, pl.ds(head, heads)]
                act(pltpu.make_async_copy(source, buffer.at[slot, :, tokens], arrived.at[slot]))
            for pool, buffer in zip(scale_pools, scale_refs, strict=True):
                act(pltpu.make_async_copy(pool.at[block], buffer.at[slot, place], arrived.at[slot]))
            return 0

        lax.fori_loop(first, last, one_block, 0)

    def first_step(item):
        return lax.div(span(item)[0], step_tokens)

    def fetch(table, item, step, slot):
        move(table, item, step, slot, lambda copy: copy.start())

    def fetch_next(slot):
        """The first step of the next item that reads K and V, if there is one."""
        reader = following_ref[item + 1]
        pl.when(reader < num_items)(lambda: fetch(next_table_ref, reader, first_step(reader), slot))

    @pl.when(item == 0)
    def _():
        slot_ref[0] = 0
        empty = num_rows_ref[0] == 0
        pl.when(empty)(lambda: fetch_next(0))
        pl.when(jnp.logical_not(empty))(lambda: fetch(table_ref, 0, first_step(0), 0))

    begin, end = span(item)
    first, last = first_step(item), pl.cdiv(end, step_tokens)

    def zero_unseen_values(step, slot):
        """0 x NaN is NaN, so what no query of the item sees must not stay in V."""
        position = step * step_tokens + lax.broadcasted_iota(jnp.int32, (step_tokens, 1), 0)
        keep = (position >= begin) & (position < end)

        def zero(i):
            v_ref[slot, i] = jnp.where(keep, v_ref[slot, i].astype(jnp.float32), 0).astype(v_ref.dtype)

        for_each_head(zero)

    def attend_rows(some, i, step, slot):
        """A part of one head's queries against the step's keys."""
        multiply = functools.partial(product, q_ref.dtype, k_ref.dtype)
        row = some.start + lax.broadcasted_iota(jnp.int32, (some.size, 1), 0)
        row = row % config.query_tokens - first_row_ref[item]
        inside = (row >= 0) & (row < num_rows_ref[item])
        query = jnp.where(inside, first_position_ref[item] + row, -1)
        key = step * step_tokens + lax.broadcasted_iota(jnp.int32, (some.size, step_tokens), 1)
        seen = key <= query
        if sliding_window is not None:
            seen &= key > query - sliding_window
        scores = multiply(q_ref[0, i, some], k_ref[slot, i], (1, 1)) * scale
        if num_scales:
            scores = scores * _scales(scale_refs[0], slot, head + i)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)

        def weigh(weights):
            if num_scales:
                weights = jnp.where(seen, weights * _scales(scale_refs[1], slot, head + i), 0)
            return multiply(weights, v_ref[slot, i], (1, 0))

        softmax.at(i, some).add(scores, seen, weigh)

    def attend_head(i, step, slot):
        for_rows(rows, lambda some: attend_rows(some, i, step, slot))

    def one_step(step, slot):
        more = step + 1 < last
        pl.when(more)(lambda: fetch(table_ref, item, step + 1, 1 - slot))
        pl.when(jnp.logical_not(more))(lambda: fetch_next(1 - slot))
        move(table_ref, item, step, slot, lambda copy: copy.wait())
        pl.when((step * step_tokens < begin) | ((step + 1) * step_tokens > end))(lambda: zero_unseen_values(step, slot))
        for_each_head(lambda i: attend_head(i, step, slot))
        return 1 - slot

    def finish(i):
        out, lse_ref[0, i] = softmax.at(i).finish()
        out_ref[0, i] = out.astype(out_ref.dtype)

    @pl.when(item < count_ref[0])
    def _():
        tile = tile_ref[item]

        @pl.when((item == 0) | (tile_ref[jnp.maximum(item - 1, 0)] != tile))
        def _():
            softmax.start()

        slot_ref[0] = lax.fori_loop(first, last, one_step, slot_ref[0])

        @pl.when((item + 1 == count_ref[0]) | (tile_ref[jnp.minimum(item + 1, num_items - 1)] != tile))
        def _():
            for_each_head(finish)


def _split(refs: Sequence[Any], *counts: int) -> list[Sequence[Any]]:
    """The references in groups of so many."""
    ends = list(itertools.accumulate(counts))
    return [refs[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _scales(ref: Any, slot: Any, head: Any) -> Float[Array, "1 kv_tokens"]:
    """The scales of a step's tokens for one head, out of the blocks they came in."""
    blocks = ref.shape[1]
    return jnp.concatenate([ref[slot, j, pl.ds(head, 1)] for j in range(blocks)], axis=1)
