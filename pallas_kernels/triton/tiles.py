"""What the attention kernels on Pallas' Triton backend share: reading tiles, products, and the online softmax.

The KV axis is walked in tiles of 64 tokens at fixed positions. Products are taken in the wider of the dtypes of query
and pool, float32 ones to their last bits (no TF32), and the softmax is float32.
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
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.constants import MASKED, QUANTIZED, TILE

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError as missing:
    raise ImportError(
        f"JAX {jax.__version__} has no Triton backend in Pallas; the backends 'xla' and 'reference' need none"
    ) from missing

MIN_ROWS = 16  # of a tensor-core tile: smaller query groups are padded
LOG2E = math.log2(math.e)
Ref = Any  # a whole array in the memory of the GPU


def product_dtype(q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct) -> Any:
    """What products of these two, and of weights and V, are taken in; quantised numbers fit any."""
    return q.dtype if str(k.dtype) in QUANTIZED else jnp.promote_types(q.dtype, k.dtype)


@dataclasses.dataclass(frozen=True)
class Math:
    """What becomes of the scores, and the dtype that products are taken in."""

    scale: float
    soft_cap: float | None
    dtype: Any

    @classmethod
    def of(cls, q: Array, k: Array, scale: float, soft_cap: float | None) -> Math:
        """For these arrays."""
        return cls(scale, soft_cap, product_dtype(q, k))

    def dot(self, a: Num[Array, "m k"], b: Num[Array, "k n"]) -> Float[Array, "m n"]:
        """Their product, accumulated in float32.

        Tensor cores have no float32 product. Numbers of 24 bits are the sum of three bfloat16 ones, so six products of
        parts give one of theirs but for 2**-24 of it: what JAX's precision HIGHEST means on a TPU.
        """
        if self.dtype != jnp.float32:
            return _dot(a.astype(self.dtype), b.astype(self.dtype))
        out = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
        pairs = [(i, j, x, y) for i, x in enumerate(_parts(a)) for j, y in enumerate(_parts(b)) if i + j <= 2]
        for _, _, x, y in sorted(pairs, key=lambda pair: -pair[0] - pair[1]):  # the smallest first
            out = out + _dot(x, y)
        return out


def _dot(a: Num[Array, "m k"], b: Num[Array, "k n"]) -> Float[Array, "m n"]:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _parts(x: Num[Array, "m n"]) -> list[Num[Array, "m n"]]:
    """bfloat16 arrays whose sum is `x`, the largest first: three of float32, two of float16, else one."""
    parts = []
    for _ in range({"float32": 2, "float16": 1}.get(str(x.dtype), 0)):
        # Rounded by its bits, as XLA in interpret mode would take a conversion there and back for nothing at all.
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
        part = lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x.astype(jnp.float32) - part
    return [*parts, x.astype(jnp.bfloat16)]


class Softmax(NamedTuple):
    """Online softmax in progress: the weighted sum of V so far, the largest score times log2(e), the sum of weights."""

    out: Float[Array, "rows width"]
    top: Float[Array, " rows"]
    total: Float[Array, " rows"]

    @classmethod
    def start(cls, rows: int, width: int) -> Softmax:
        zeros = jnp.zeros(rows, jnp.float32)
        return cls(jnp.zeros((rows, width), jnp.float32), zeros + MASKED, zeros)

    def finish(self) -> tuple[Float[Array, "rows width"], Float[Array, " rows"]]:
        """The attention and its log-sum-exp: zeros and MASKED for a row without keys."""
        total = jnp.where(self.total > 0, self.total, 1)
        lse = jnp.where(self.total > 0, self.top * (1 / LOG2E) + jnp.log(total), MASKED)
        return self.out / total[:, None], lse


class KVTile(NamedTuple):
    """K and V of some tokens of one head, zero where nobody may look, and their scales if the pool is quantised."""

    k: Num[Array, "tile width"]
    v: Num[Array, "tile width"]
    k_scale: Float[Array, " tile"] | None = None
    v_scale: Float[Array, " tile"] | None = None


def attend(
    state: Softmax, q: Float[Array, "rows width"], kv: KVTile, keep: Bool[Array, "#rows tile"] | None, how: Math
) -> Softmax:
    """`state` with one more tile; where `keep` is given and false, a key counts for nothing."""
    scores = how.dot(q, kv.k.T)
    if kv.k_scale is not None:
        scores = scores * kv.k_scale[None]
    if how.soft_cap is None:
        scores = scores * (how.scale * LOG2E)
    else:
        scores = jnp.tanh(scores * (how.scale / how.soft_cap)) * (how.soft_cap * LOG2E)
    if keep is not None:
        scores = jnp.where(keep, scores, MASKED)
    top = jnp.maximum(state.top, scores.max(axis=-1))
    weights = jnp.exp2(scores - top[:, None])
    if keep is not None:
        weights = jnp.where(keep, weights, 0)
    decay = jnp.exp2(state.top - top)
    total = state.total * decay + weights.sum(axis=-1)
    if kv.v_scale is None:
        return Softmax(state.out * decay[:, None] + how.dot(weights, kv.v), top, total)
    # Scales may be smaller than float16 can hold; the largest one is taken out.
    largest = kv.v_scale.max()
    weights = weights * (kv.v_scale / jnp.where(largest == 0, 1, largest))[None]
    return Softmax(state.out * decay[:, None] + how.dot(weights, kv.v) * largest, top, total)


def row_index(width: int, *rows: Any) -> tuple[Array, ...]:
    """Index of whole rows, the last axis of an array: `rows` are those of the axes before it, numbers or vectors."""
    shape = (max(jnp.size(row) for row in rows), width)
    columns = jnp.broadcast_to(jnp.arange(width)[None], shape)
    return (*(jnp.broadcast_to(jnp.reshape(row, (-1, 1)), shape) for row in rows), columns)


def row_mask(
    width: int, used: int, valid: Bool[Array, " rows"] | None, num_rows: int
) -> Bool[Array, "rows width"] | None:
    """Which numbers of some rows there are: rows that are `valid`, as far as they are `used`; None is all of them."""
    columns = None if width == used else jnp.broadcast_to((jnp.arange(width) < used)[None], (num_rows, width))
    if valid is None:
        return columns
    rows = jnp.broadcast_to(valid[:, None], (num_rows, width))
    return rows if columns is None else rows & columns


def load(ref: Ref, index: tuple[Array, ...], mask: Bool[Array, ...] | None) -> Num[Array, ...]:
    """Some numbers of an array. What is masked out is never read, but zero: there may be NaN."""
    zero = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else zero)


def load_rows(ref: Ref, width: int, valid: Bool[Array, " rows"] | None, *rows: Any) -> Num[Array, "rows width"]:
    """Rows of an array, zero from its own width to `width` and where they are not `valid`."""
    index = row_index(width, *rows)
    return load(ref, index, row_mask(width, ref.shape[-1], valid, len(index[0])))


def store_rows(ref: Ref, x: Num[Array, "rows width"], valid: Bool[Array, " rows"], *rows: Any) -> None:
    """Rows back, those that are `valid`, in the dtype of the array."""
    index = row_index(x.shape[1], *rows)
    plgpu.store(ref.at[index], x.astype(ref.dtype), mask=row_mask(x.shape[1], ref.shape[-1], valid, len(x)))


@dataclasses.dataclass(frozen=True)
class PagedReader:
    """Reads the tiles of one head of one sequence through its row of the block table.

    The pools are indexed by their four axes, so that their size in bytes may pass 2**32.
    """

    k_ref: Ref  # [blocks, kv_heads, block_size, head_dim]
    v_ref: Ref
    scale_refs: tuple[Ref, ...]  # of K and V, [blocks, kv_heads, block_size], or none
    table_ref: Ref  # [seqs, max_blocks]
    seq: Int[Array, ""]
    head: Int[Array, ""]

    def read(self, position: Int[Array, " tile"], seen: Bool[Array, " tile"] | None) -> KVTile:
        """The tokens at `position`; `seen` is None if all of them may be looked at."""
        block_size, head_dim = self.k_ref.shape[2:]
        width = padded_width(head_dim)
        logical, offset = position // block_size, position % block_size
        block = load(self.table_ref, (jnp.full_like(logical, self.seq), logical), seen)
        k, v = (load_rows(ref, width, seen, block, self.head, offset) for ref in (self.k_ref, self.v_ref))
        index = (block, jnp.full_like(block, self.head), offset)
        return KVTile(k, v, *(load(ref, index, seen) for ref in self.scale_refs))


def padded_width(head_dim: int) -> int:
    """Numbers of a row as a kernel holds it: a power of two, and enough for a tensor core."""
    return max(MIN_ROWS, pl.next_power_of_2(head_dim))


def for_tiles(begin: Any, end: Any, state: Softmax, step: Callable[[Softmax, Int[Array, " tile"]], Softmax]) -> Softmax:
    """`step` over the tiles [begin, end), which it gets as the positions of their tokens."""
    return lax.fori_loop(begin, end, lambda tile, state: step(state, tile * TILE + jnp.arange(TILE)), state)


class Sight(NamedTuple):
    """Which keys the queries of a tile see: query `r` those of the positions [begins[r], ends[r]).

    Attributes:
        begin: the first position that any query sees.
        end: the one behind the last.
        whole_begin: all queries see all positions from here...
        whole_end: ... to here, this one not included.
    """

    begins: Int[Array, " rows"]
    ends: Int[Array, " rows"]
    begin: Int[Array, ""]
    end: Int[Array, ""]
    whole_begin: Int[Array, ""]
    whole_end: Int[Array, ""]

    @classmethod
    def causal(
        cls, own: Int[Array, " rows"], first: Int[Array, ""], num_tokens: Int[Array, ""], sliding_window: int | None
    ) -> Sight:
        """Of queries at the positions `own`, `num_tokens` of them from `first` on; none see anything if that is 0."""
        end = jnp.where(num_tokens > 0, first + num_tokens, 0)
        if sliding_window is None:
            zero = jnp.zeros_like(end)
            return cls(jnp.zeros_like(own), own + 1, zero, end, zero, first + 1)
        begins = own + (1 - sliding_window)
        return cls(begins, own + 1, jnp.maximum(first + 1 - sliding_window, 0), end, end - sliding_window, first + 1)

    @classmethod
    def everything(cls, rows: int, end: Int[Array, ""]) -> Sight:
        """Of queries that see all positions up to `end`."""
        zero = jnp.zeros_like(end)
        return cls(jnp.zeros(rows, jnp.int32), jnp.full(rows, end), zero, end, zero, end)

    def walk(self, q: Float[Array, "rows width"], reader: Any, how: Math) -> Softmax:
        """The softmax over all tiles in sight; positions are compared only where not all queries see a whole tile."""

        def masked(state, position):
            seen = (position >= self.begin) & (position < self.end)
            keep = (position[None] < self.ends[:, None]) & (position[None] >= self.begins[:, None])
            return attend(state, q, reader.read(position, seen), keep & seen[None], how)

        def whole(state, position):
            return attend(state, q, reader.read(position, None), None, how)

        first, last = self.begin // TILE, pl.cdiv(self.end, TILE)
        state = Softmax.start(*q.shape)
        if how.dtype == jnp.float32:  # a second loop would cost more registers than it saves
            return for_tiles(first, last, state, masked)
        whole_first = jnp.clip(pl.cdiv(jnp.maximum(self.whole_begin, 0), TILE), first, last)
        whole_last = jnp.clip(self.whole_end // TILE, whole_first, last)
        state = for_tiles(first, whole_first, state, masked)
        state = for_tiles(whole_first, whole_last, state, whole)
        return for_tiles(whole_last, last, state, masked)
