"""One softmax out of several partial ones, by their log-sum-exp."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import checks
from pallas_kernels.constants import FLOATS, MASKED


def merge_partials(
    outs: Float[Array, ...], lses: Float[Array, ...]
) -> tuple[Float[Array, "... head_dim"], Float[Array, ...]]:
    """Attention over a set of keys out of attention over its parts: splits of the KV axis, or a shared prefix.

    Args:
        outs: each part's own attention, normalised.
        lses: natural logarithm of each part's sum of exp(score), float32; for a part without keys `MASKED` (-1e30) or
            -inf, and what `outs` holds there counts for nothing, NaN included.

    Returns:
        The attention over all keys in the dtype of `outs`, zeros where no part has a key; and its log-sum-exp, which
        is `MASKED` there.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    checks.arrays(outs=outs, lses=lses)
    for name, array, allowed in (("outs", outs, FLOATS), ("lses", lses, ("float32",))):
        if str(array.dtype) not in allowed:
            raise ValueError(f"{name} is {array.dtype}; it must be {' or '.join(allowed)}")
    if outs.ndim < 1 or outs.shape[:-1] != lses.shape or 0 in lses.shape[:1] or not lses.ndim:
        raise ValueError(
            f"outs is {outs.shape} and lses is {lses.shape}; they must be [parts, ..., head_dim] and [parts, ...], "
            "with one part at least"
        )
    weights, lse = merge_weights(lses)
    wide = jnp.where((weights > 0)[..., None], outs.astype(jnp.float32), 0)
    return (wide * weights[..., None]).sum(axis=0).astype(outs.dtype), lse


def merge_weights(lses: Float[Array, "parts ..."]) -> tuple[Float[Array, "parts ..."], Float[Array, ...]]:
    """What each part counts for, exactly 0 for one without keys; and the log-sum-exp of all parts."""
    lses = lses.astype(jnp.float32)
    has_keys = lses > MASKED / 2
    top = jnp.where(has_keys, lses, MASKED).max(axis=0)
    weights = jnp.where(has_keys, jnp.exp(jnp.where(has_keys, lses, 0) - jnp.where(top > MASKED / 2, top, 0)), 0)
    total = weights.sum(axis=0)
    some = jnp.where(total > 0, total, 1)
    return weights / some, jnp.where(total > 0, top + jnp.log(some), MASKED)
