"""The online softmax of the attention kernels, in float32, with its state in vector memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.constants import MASKED, QUANTIZED
from pallas_kernels.tpu.config import LANES

ROWS = 128  # of scores against 256 keys, at most, that are worked on at a time: more do not fit into the registers
_ALIGNMENT = 16  # rows that a register of 16-bit numbers holds


def for_rows(rows: int, act: Callable[[Any], None]) -> None:
    """`act(slice)` for all rows, part by part, so that what is computed of one part is all that is alive."""
    part = rows
    if rows > ROWS:
        part = max((size for size in range(_ALIGNMENT, ROWS + 1, _ALIGNMENT) if rows % size == 0), default=rows)
    if part == rows:
        act(pl.ds(0, rows))
        return

    def one_part(i, _):
        act(pl.ds(pl.multiple_of(i * part, part), part))
        return 0

    lax.fori_loop(0, rows // part, one_part, 0)


class Softmax(NamedTuple):
    """References to the state of one or of several tiles of rows.

    Attributes:
        top: the largest score yet, [..., rows, 128], the same in all lanes.
        total: the sum of exp(score - top), likewise.
        acc: the values weighted with exp(score - top), [..., rows, head_dim].
    """

    top: Any
    total: Any
    acc: Any

    @staticmethod
    def scratch(shape: tuple[int, ...], head_dim: int) -> list[Any]:
        """Vector memory for the state of `shape` = (..., rows)."""
        return [pltpu.VMEM((*shape, width), jnp.float32) for width in (LANES, LANES, head_dim)]

    def at(self, *index: Any) -> Softmax:
        """One of several tiles, or some of a tile's rows."""
        return Softmax(*(ref.at[index] for ref in self))

    def start(self) -> None:
        """No score yet."""
        for ref, value in zip(self, (MASKED, 0.0, 0.0), strict=True):
            ref[...] = jnp.full(ref.shape, value, jnp.float32)

    def add(
        self,
        scores: Float[Array, "rows keys"],
        seen: Bool[Array, "rows keys"],
        weigh: Callable[[Array], Float[Array, "rows head_dim"]],
    ) -> None:
        """More keys; `weigh` multiplies weights of [rows, keys] with the values. What is not seen may be NaN."""
        scores = jnp.where(seen, scores, MASKED)
        old_top = self.top[:, :1]
        new_top = jnp.maximum(old_top, scores.max(axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0)
        decay = jnp.exp(old_top - new_top)
        total = self.total[:, :1] * decay + weights.sum(axis=1, keepdims=True)
        self.acc[...] = self.acc[...] * decay + weigh(weights)
        self.top[...] = jnp.broadcast_to(new_top, self.top.shape)
        self.total[...] = jnp.broadcast_to(total, self.total.shape)

    def finish(self) -> tuple[Float[Array, "rows head_dim"], Float[Array, "1 rows"]]:
        """The attention, and the log-sum-exp; zeros and `MASKED` for a row that saw nothing."""
        total = self.total[:, :1]
        safe = jnp.where(total > 0, total, 1)
        lse = jnp.where(total > 0, self.top[:, :1] + jnp.log(safe), MASKED)
        # A column becomes a row: its numbers on a diagonal, summed downwards.
        shape = (len(total), len(total))
        diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
        return self.acc[...] / safe, jnp.where(diagonal, lse, 0).sum(axis=0, keepdims=True)


def product(q_dtype: Any, kv_dtype: Any, a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """`a` and `b` multiplied in the wider of the dtypes of queries and K and V, float32 ones in full.

    Quantised K and V are multiplied in the dtype of the queries, which holds their numbers exactly.
    """
    dtype = q_dtype if str(kv_dtype) in QUANTIZED else jnp.promote_types(q_dtype, kv_dtype)
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
