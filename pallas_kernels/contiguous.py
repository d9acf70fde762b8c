"""The public ops over contiguous K and V: what the paged ones are compared with."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import checks, reference, xla
from pallas_kernels.dispatch import PALLAS, Interpret, choose, kernel


def flash_attention(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    *,
    causal: bool = False,
    kv_lens: Int[Array, " batch"] | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: str = "auto",
    interpret: Interpret = False,
) -> Float[Array, "batch q_len heads head_dim"]:
    """Attention in tiles with an online softmax (FlashAttention): no score leaves the chip.

    Args:
        q: float32, bfloat16 or float16; `heads` is a multiple of `kv_heads`. The axes are those of
            `jax.nn.dot_product_attention`.
        k: K of all tokens.
        v: V of all tokens.
        causal: a query sees no later token; the queries are the last `q_len` of a sequence's tokens.
        kv_lens: int32, how many tokens of K and V a sequence has; None is all, as is a number above `kv_len`. With
            `causal`, the first queries of a sequence of fewer than `q_len` tokens see none.
        scale: of the scores; head_dim ** -0.5 by default.
        sliding_window: how many tokens back a query sees, itself included, with `causal` alone; None is all.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap).
        backend, interpret: see `paged_decode`.

    Returns:
        What the queries attend to, in the dtype of `q`; zeros for a query that sees no token.

    Raises:
        ValueError: an argument of the wrong shape, dtype or value, or a backend that cannot run here.
    """
    checks.contiguous(q, k, v, kv_lens, causal, sliding_window)
    options = checks.options(q, scale, sliding_window, soft_cap)
    name = choose("flash_attention", backend, interpret, q, k)
    return _flash_attention(q, k, v, _within(kv_lens, k), causal=causal, backend=name, interpret=interpret, **options)


def standard_attention(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    *,
    causal: bool = False,
    kv_lens: Int[Array, " batch"] | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "batch q_len heads head_dim"]:
    """Attention as three operations, with all scores in memory: softmax(q k^T * scale) v, by XLA everywhere.

    Arguments, result and errors are those of `flash_attention`.
    """
    checks.contiguous(q, k, v, kv_lens, causal, sliding_window)
    options = checks.options(q, scale, sliding_window, soft_cap)
    return _standard_attention(q, k, v, _within(kv_lens, k), causal=causal, **options)


def _within(kv_lens: Array | None, k: Array) -> Array | None:
    """The same number for all backends, whatever was given."""
    return None if kv_lens is None else jnp.clip(kv_lens, 0, k.shape[1])


_STATIC = ("causal", "scale", "sliding_window", "soft_cap")


@functools.partial(jax.jit, static_argnames=(*_STATIC, "backend", "interpret"))
def _flash_attention(q: Array, k: Array, v: Array, kv_lens: Any, *, backend: str, interpret: Interpret, **options):
    if backend in PALLAS:
        return kernel(backend, "flash_attention")(q, k, v, kv_lens, **options, interpret=interpret)
    if backend == "reference":
        return reference.standard_attention(q, k, v, kv_lens, **options)
    return xla.flash_attention(q, k, v, kv_lens, **options)


_standard_attention = functools.partial(jax.jit, static_argnames=_STATIC)(reference.standard_attention)
