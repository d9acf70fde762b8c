"""The attention kernel for Hopper that decoding, prefill and contiguous attention share.

One program takes one tile of queries, of one KV head of one sequence, over some tiles of 64 tokens of the KV axis. A
producer warpgroup brings K and V by TMA, block by block through the block table, into a ring of stages in shared
memory; consumer warpgroups, of 64 query rows each, multiply by wgmma, with an online softmax in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.constants import MASKED, TILE

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError as missing:
    raise ImportError(
        f"JAX {jax.__version__} has no Mosaic GPU backend in Pallas; the backends 'xla' and 'reference' need none"
    ) from missing

ROWS = 64  # of queries in one wgmma
MAX_STAGES = 8
MAX_CONSUMERS = 2
SHARED_MEMORY = 227 << 10  # bytes that one program may have on sm_90
RESERVED = 4 << 10  # of those: barriers, and what reductions over warps need
LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Config:
    """How one program is built.

    Attributes:
        stages: tiles of K and of V that shared memory holds at a time.
        consumers: warpgroups that multiply, of 64 query rows each.

    Raises:
        ValueError: a number outside its limits.
    """

    stages: int = 2
    consumers: int = 1

    def __post_init__(self):
        for name, limit in (("stages", MAX_STAGES), ("consumers", MAX_CONSUMERS)):
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ValueError(f"{name} is {value}; it must be from 1 to {limit}")

    def shared_memory(self, head_dim: int, itemsize: int, partial: bool) -> int:
        """Bytes of shared memory that a program takes for K and V of `itemsize` bytes a number."""
        ring = 2 * self.stages * TILE * head_dim * itemsize
        if partial:
            ring = max(ring, ROWS * head_dim * 4)
        if itemsize == 1:
            ring += 2 * TILE * head_dim * 2 + 2 * self.stages * TILE * 4
        return ring + self.consumers * ROWS * (head_dim + TILE) * 2 + RESERVED


def deepest(head_dim: int, itemsize: int, consumers: int, partial: bool) -> Config:
    """The configuration with the most stages that shared memory has room for."""
    consumers = consumers if itemsize > 1 else 1  # tiles of K and V are widened by the warpgroup that needs them
    configs = [Config(stages, consumers) for stages in range(1, MAX_STAGES + 1)]
    return [config for config in configs if config.shared_memory(head_dim, itemsize, partial) <= SHARED_MEMORY][-1]


class Work(NamedTuple):
    """What the tiles of queries are to see.

    Attributes:
        seq: row of the block table, or of the batch, i32[items].
        first_position: where in its sequence a tile's first query token stands, i32[items].
        end: behind the last KV token that any query of the tile sees, i32[items]; 0 for a tile that is empty.
        tokens: query tokens of a full tile; row `g * tokens + t` is token `t` of the group's head `g`.
    """

    seq: Int[Array, " items"]
    first_position: Int[Array, " items"]
    end: Int[Array, " items"]
    tokens: int


class Mask(NamedTuple):
    """Which keys a query sees, and what its scores become."""

    scale: float
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None


class Split(NamedTuple):
    """The KV axis in parts at fixed positions, attended to by programs of their own.

    Attributes:
        parts: how many.
        tiles: in each.
        width: how wide a row of a partial result is stored, head_dim or more; what lies behind is not written.
    """

    parts: int
    tiles: int
    width: int


class Source(NamedTuple):
    """Where K and V come from.

    Attributes:
        arrivals: how often a barrier is arrived at for one tile.
        fetch: `fetch(refs, seq, head, begin, end)` gives `copy(tile)`, which gives `put(which, destination, barrier)`.
    """

    arrivals: int
    fetch: Callable[..., Any]


def attend(
    q: Float[Array, "items kv_heads rows head_dim"],
    k: Array,
    v: Array,
    arrays: tuple[Array, ...],
    scales: tuple[Array, ...],
    work: Work,
    *,
    source: Source,
    mask: Mask,
    config: Config,
    split: Split | None,
    interpret: Any,
) -> tuple[Array, Array]:
    """Attention of all tiles of queries.

    Args:
        q: `rows` is a multiple of 8, and fills the consumers' rows if there are several.
        k: as `source` wants it.
        v: as `k`.
        arrays: what else `source` reads.
        scales: of K and of V, float32 [seqs, kv_heads, positions], if their numbers are of 8 bits; else none.
        split: how the KV axis is split; None for one part over all of it.

    Returns:
        With `split`, float32 partials [parts, items, kv_heads, rows, width], and without, [items, kv_heads,
        rows, head_dim] in the dtype of `q`; and the natural log-sum-exp, float32, [..., rows]. Programs with
        nothing to see write `MASKED` there, and no output.
    """
    items, kv_heads, rows, head_dim = q.shape
    dtype = q.dtype
    consumers, stages = config.consumers, config.stages
    if scales and consumers > 1:
        raise ValueError(f"consumers is {consumers}; it must be 1 for a pool of {k.dtype}")
    rows_each = min(rows, ROWS)
    lead, width = ((split.parts,), split.width) if split else ((), head_dim)
    out_type = (
        jax.ShapeDtypeStruct((*lead, items, kv_heads, rows, width), jnp.float32 if split else dtype),
        jax.ShapeDtypeStruct((*lead, items, kv_heads, rows), jnp.float32),
    )

    def body(*refs: Any):
        q_ref, k_ref, v_ref, seq_ref, first_ref, end_ref, *others = refs
        source_refs, scale_refs = others[: len(arrays)], others[len(arrays) : len(arrays) + len(scales)]
        out_ref, lse_ref, ring, q_smem, p_smem, lse_smem, barriers, *others = others[len(arrays) + len(scales) :]
        (k_smem, v_smem), o_smem = ring if split else (ring, q_smem)
        q_ready, k_ready, v_ready, k_free, v_free, v_clean = barriers
        scale_smems, wide_smems = others or ([], [])
        head, part, item = lax.axis_index("head"), lax.axis_index("split"), lax.axis_index("item")
        warpgroup = lax.axis_index("warpgroup")
        first_position, end = first_ref[item], end_ref[item]
        begin = jnp.int32(0)
        if mask.sliding_window is not None:
            begin = jnp.maximum(first_position + 1 - mask.sliding_window, 0)
        first, last = lax.div(begin, jnp.int32(TILE)), pl.cdiv(end, jnp.int32(TILE))
        if split:
            first = jnp.maximum(first, part * split.tiles)
            last = jnp.minimum(last, (part + 1) * split.tiles)
        steps = last - first
        place = (part, item, head) if split else (item, head)

        def stage_of(step):
            return lax.rem(step, jnp.int32(stages))

        @pl.when(warpgroup == consumers)
        def _produce():
            plgpu.set_max_registers(40 if consumers == 1 else 24, action="decrease")
            copy = source.fetch((k_ref, v_ref), source_refs, seq_ref[item], head, begin, end)
            rings = ((k_smem, k_ready, k_free), (v_smem, v_ready, v_free))

            @pl.loop(0, steps)
            def _(step):
                put = copy(first + step)
                stage = stage_of(step)
                for which, (smem, ready, free) in enumerate(rings):
                    pl.when(step >= stages)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
                    put(which, smem.at[stage], ready.at[stage])
                    if scales:
                        some = scale_refs[which].at[seq_ref[item], head, pl.ds((first + step) * TILE, TILE)]
                        plgpu.copy_gmem_to_smem(some, scale_smems[which].at[stage], ready.at[stage])

            @pl.loop(jnp.maximum(steps - stages, 0), steps)
            def _(step):
                for _, _, free in rings:
                    plgpu.barrier_wait(free.at[stage_of(step)])

        @pl.when(warpgroup < consumers)
        def _consume():
            plgpu.set_max_registers(240, action="increase")
            rows_here = pl.ds(warpgroup * ROWS if consumers > 1 else 0, rows_each)
            my_q, my_p, my_lse = q_smem.at[warpgroup], p_smem.at[warpgroup], lse_smem.at[warpgroup]

            @pl.when(steps <= 0)
            def _():
                my_lse[...] = full((ROWS,), MASKED, WGMMA.reduce(1))

            @pl.when(steps > 0)
            def _():
                plgpu.copy_gmem_to_smem(
                    q_ref.at[item, head, rows_here], my_q.at[pl.ds(0, rows_each)], q_ready.at[warpgroup]
                )
                plgpu.barrier_wait(q_ready.at[warpgroup])
                row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1)) + warpgroup * ROWS
                stop = jnp.minimum(first_position + 1 + lax.rem(row, jnp.int32(work.tokens)), end)
                if not mask.causal:
                    stop = full((ROWS,), end, WGMMA.reduce(1))

                def tile(step, carry):
                    out, top, total = carry
                    stage, position = stage_of(step), (first + step) * TILE
                    plgpu.barrier_wait(k_ready.at[stage])
                    keys = k_smem.at[stage]
                    if scales:
                        widen(keys, wide_smems[0])
                        keys = wide_smems[0]
                    scores = multiply(my_q, keys.transpose((1, 0)), (ROWS, TILE))
                    if scales:
                        scale = load(scale_smems[0].at[stage], WGMMA.reduce(0))
                        scores *= lax.broadcast_in_dim(scale, scores.shape, [1])
                    plgpu.barrier_arrive(k_free.at[stage])
                    seen = visible(position, stop, mask)
                    scores = jnp.where(seen, capped(scores, mask), MASKED)
                    new_top = jnp.maximum(top, scores.max(axis=1))
                    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
                    weights = jnp.where(seen, weights, 0.0)
                    decay = jnp.exp2(top - new_top)
                    total = total * decay + weights.sum(axis=1)
                    my_p[...] = weights.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.barrier_wait(v_ready.at[stage])
                    values = v_smem.at[stage]
                    if scales:
                        scale = load(scale_smems[1].at[stage], WGMMA.reduce(1))
                        widen(values, wide_smems[1], scale, begin - position, end - position)
                        values = wide_smems[1]
                    else:
                        partly = (position < begin) | (position + TILE > end)
                        clean(values, partly, begin - position, end - position, v_clean)
                    out *= lax.broadcast_in_dim(decay, out.shape, [0])
                    out = add_product(out, my_p, values, bool(interpret))
                    plgpu.barrier_arrive(v_free.at[stage])
                    return out, new_top, total

                nothing = full((ROWS,), MASKED, WGMMA.reduce(1)), full((ROWS,), 0, WGMMA.reduce(1))
                out, top, total = lax.fori_loop(0, steps, tile, (full((ROWS, head_dim), 0, WGMMA), *nothing))
                my_out = o_smem if split else my_q
                any_seen = total > 0
                safe = jnp.where(any_seen, total, 1.0)
                my_out[...] = (out / lax.broadcast_in_dim(safe, out.shape, [0])).astype(out_type[0].dtype)
                my_lse[...] = jnp.where(any_seen, (top + jnp.log2(safe)) / LOG2E, MASKED)
                plgpu.commit_smem()
                columns = () if width == head_dim else (pl.ds(0, head_dim),)
                plgpu.copy_smem_to_gmem(my_out.at[pl.ds(0, rows_each)], out_ref.at[(*place, rows_here, *columns)])

            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_lse.at[pl.ds(0, rows_each)], lse_ref.at[(*place, rows_here)])
            plgpu.wait_smem_to_gmem(0)

    tiled = transforms(head_dim, 2)
    narrow = transforms(head_dim, k.dtype.itemsize)
    ring = tuple(plgpu.SMEM((stages, TILE, head_dim), k.dtype, transforms=narrow) for _ in "kv")
    if split:
        ring = plgpu.RefUnion(ring, plgpu.SMEM((ROWS, head_dim), jnp.float32, transforms=transforms(head_dim, 4)))
    ready = plgpu.Barrier(num_barriers=stages, num_arrivals=source.arrivals + bool(scales))
    free = plgpu.Barrier(num_barriers=stages, num_arrivals=consumers)
    scratch: list[Any] = [
        ring,
        plgpu.SMEM((consumers, ROWS, head_dim), dtype, transforms=tiled),
        plgpu.SMEM((consumers, ROWS, TILE), dtype, transforms=tiled),
        plgpu.SMEM((consumers, ROWS), jnp.float32),
        (plgpu.Barrier(num_barriers=consumers), ready, ready, free, free, plgpu.Barrier(num_arrivals=consumers)),
    ]
    if scales:
        scratch.append([plgpu.SMEM((stages, TILE), jnp.float32) for _ in "kv"])
        scratch.append([plgpu.SMEM((TILE, head_dim), dtype, transforms=tiled) for _ in "kv"])
    run = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(kv_heads, split.parts if split else 1, items),
        grid_names=("head", "split", "item"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({"interpret": interpreter(interpret)} if interpret else {}),
    )
    return run(q, k, v, work.seq, work.first_position, work.end, *arrays, *scales)


def swizzle(columns: int, itemsize: int) -> int:
    """Bytes of the widest runs of a row that wgmma takes, and that fill it."""
    return next(run for run in (128, 64, 32) if columns * itemsize % run == 0)


def transforms(columns: int, itemsize: int) -> tuple[Any, ...]:
    """How a tile lies in shared memory; one of 8-bit numbers in runs of as many columns as one of 16-bit numbers."""
    run = swizzle(columns, max(itemsize, 2)) // max(itemsize, 2)
    return plgpu.TilingTransform((8, run)), plgpu.SwizzleTransform(run * itemsize)


def interpreter(interpret: Any) -> Any:
    """The parameters of the interpreter.

    Raises:
        ValueError: this JAX's interpreter does not know these kernels.
    """
    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        raise ValueError(f"interpret is {interpret!r}; JAX {jax.__version__} cannot interpret Mosaic GPU, 0.11 can")
    return params() if interpret is True else interpret


def full(shape: tuple[int, ...], value: Any, layout: Any) -> Array:
    """A constant in registers."""
    dtype = jnp.float32 if isinstance(value, int | float) else value.dtype
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def multiply(a: Any, b: Any, shape: tuple[int, ...]) -> Array:
    """A product of two tiles in shared memory."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((shape[0], shape[1]), jnp.float32))


def add_product(c: Array, a: Any, b: Any, interpreted: bool) -> Array:
    """`c` plus a product, without registers for both where that can be said: the interpreter does not know how."""
    if interpreted:
        return c + multiply(a, b, c.shape)
    accumulator: Any = plgpu.WGMMAAccumulatorRef.init(c)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(accumulator)


def capped(scores: Array, mask: Mask) -> Array:
    """Scores in units of log2(e), so that exp2 serves."""
    if mask.soft_cap is None:
        return scores * (mask.scale * LOG2E)
    return jnp.tanh(scores * (mask.scale / mask.soft_cap)) * (mask.soft_cap * LOG2E)


def visible(start: Array, stop: Array, mask: Mask) -> Array:
    """Which of the tile's keys, the first at position `start`, each row sees."""
    shape = (ROWS, TILE)
    position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + start
    stop = lax.broadcast_in_dim(stop, shape, [0])
    seen = position < stop
    return seen if mask.sliding_window is None else seen & (position >= stop - mask.sliding_window)


def clean(values: Any, partly: Array, begin: Array, end: Array, barrier: Any) -> None:
    """Zeroes the rows of V that nobody sees: they may hold anything, and 0 x NaN is NaN.

    The first warpgroup does it, and the others wait.
    """

    @pl.when(partly)
    def _():
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            width = swizzle(values.shape[1], 2) // 2  # few registers are free here
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, width), 0, layout=WGMMA)
            keep = (row >= begin) & (row < end)
            for at in range(0, values.shape[1], width):
                some = values.at[:, pl.ds(at, width)]
                kept = plgpu.layout_cast(some[...], WGMMA)
                some[...] = jnp.where(keep, kept, jnp.zeros_like(kept))
            plgpu.commit_smem()

        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)


def widen(narrow: Any, wide: Any, scale: Any = None, begin: Any = None, end: Any = None) -> None:
    """A tile of 8-bit numbers as 16-bit ones; for V, times a scale for each row, and rows nobody sees as zeros."""
    dtype = wide.dtype
    width = swizzle(wide.shape[1], 2) // 2
    shape = (TILE, width)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
    for at in range(0, wide.shape[1], width):
        some = load(narrow.at[:, pl.ds(at, width)], plgpu.Layout.WGMMA_UPCAST_2X)
        some = some.astype(dtype if some.dtype == jnp.int8 else jnp.float16)  # both hold all its numbers
        some = plgpu.layout_cast(some, WGMMA)
        if scale is not None:
            some = some.astype(jnp.float32) * lax.broadcast_in_dim(scale, shape, [0])
            some = jnp.where((row >= begin) & (row < end), some, 0.0)
        if some.dtype != dtype:
            some = some.astype(jnp.float32).astype(dtype)
        wide[:, pl.ds(at, width)] = some
    plgpu.commit_smem()


def load(ref: Any, layout: Any) -> Array:
    """What `ref` holds, in registers, however its layout there fits that in shared memory."""
    whole: Any = () if jax.__version_info__ >= (0, 11) else ((),)
    return plgpu.load(ref, *whole, layout=layout, optimized=False)
