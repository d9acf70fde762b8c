"""Merges the splits of a decode on Mosaic GPU, reading no split that a sequence has not.

XLA would read all that the table is wide for: for short sequences more than their keys and values are.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.merge import merge_weights
from pallas_kernels.mosaic_gpu.attend import full, interpreter, load

THREADS = 128  # of a warpgroup: a row of a partial result is stored as a multiple of as many numbers


def merge_splits(
    parts: Float[Array, "splits seqs kv_heads rows width"],
    lses: Float[Array, "splits seqs kv_heads rows"],
    first: Int[Array, " seqs"],
    last: Int[Array, " seqs"],
    group: int,
    dtype: Any,
    interpret: Any,
) -> tuple[Float[Array, "seqs kv_heads group width"], Float[Array, "seqs kv_heads group"]]:
    """What `merge_partials` gives for the first `group` rows; of `parts` nothing else is read, and of each sequence
    only splits `first` to `last - 1`."""
    _, seqs, kv_heads, _, width = parts.shape
    weights, lse = merge_weights(lses[..., :group])

    def merge(part_ref, weight_ref, first_ref, last_ref, out_ref):
        place = tuple(lax.axis_index(name) for name in ("seq", "head", "row"))
        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=1)

        def add(split, out):
            part = load(part_ref.at[(split, *place)], layout)
            return out + part * full((width,), weight_ref[(split, *place)], layout)

        seq = place[0]
        out = lax.fori_loop(first_ref[seq], last_ref[seq], add, full((width,), 0, layout))
        out_ref.at[place][...] = out.astype(dtype)

    run = plgpu.kernel(
        merge,
        out_type=jax.ShapeDtypeStruct((seqs, kv_heads, group, width), dtype),
        grid=(group, kv_heads, seqs),
        grid_names=("row", "head", "seq"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({"interpret": interpreter(interpret)} if interpret else {}),
    )
    return run(parts, weights, first, last), lse


def padded(head_dim: int) -> int:
    """How wide the rows of partial results are."""
    return pl.cdiv(head_dim, THREADS) * THREADS
