"""The public attention ops over the pool: arguments are checked, a backend is chosen, and its kernel is called.

Shapes, dtypes and contracts are the same for every backend (README.md says which takes what):
  pools [blocks, kv_heads, block_size, stored_dim], block 0 being the null block, which padding reads and writes;
    stored_dim is head_dim, or more where a chip wants rows of 128 numbers: what lies behind head_dim is zero;
  block_tables i32 [seqs, max_blocks], logical to physical block, padded with 0;
  seq_lens i32 [seqs], tokens in the cache, this step's included, 0 in a padding row.
Null block, blocks that no table names and slots past a sequence's end may hold NaN and change nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from pallas_kernels import checks, reference, xla
from pallas_kernels.dispatch import PALLAS, Interpret, choose, kernel
from pallas_kernels.validate import validate_batch

Lse = Float[Array, "queries heads"]


def paged_decode(
    q: Float[Array, "seqs heads head_dim"],
    k_pool: Real[Array, "blocks kv_heads block_size stored_dim"],
    v_pool: Real[Array, "blocks kv_heads block_size stored_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    v_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    return_lse: bool = False,
    validate: bool = False,
    backend: str = "auto",
    interpret: Interpret = False,
) -> Any:
    """Attention of one query token per sequence, the last of its `seq_lens` tokens (section 4.1 of the paper).

    Args:
        q: float32, bfloat16 or float16; `heads` is a multiple of `kv_heads`.
        k_pool: K by block; `block_size` is a power of two. One of the three dtypes, or int8 or float8_e4m3fn.
        v_pool: V, as `k_pool`.
        block_tables: int32; padded with 0 behind a sequence's blocks.
        seq_lens: int32, in tokens; 0 marks a padding row, which gives zeros.
        scale: of the scores; head_dim ** -0.5 by default.
        sliding_window: how many tokens back a query sees, itself included; None is all.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap).
        k_scale: float32, what a token's K is to be multiplied with, for int8 and float8 pools and for them alone.
        v_scale: the same of V.
        return_lse: also return the log-sum-exp of the scores, for `merge_partials`.
        validate: check what `block_tables` and `seq_lens` hold, at a cost. Under `jit` the check is a
            `checkify.check`, and the caller wraps the function in `checkify.checkify`.
        backend: one of `BACKENDS`.
        interpret: run the Pallas kernel in interpret mode, on any platform; True, or the parameters of the backend's
            interpreter.

    Returns:
        What the queries attend to, in the dtype of `q`; with `return_lse`, a pair of it and float32 [seqs, heads].

    Raises:
        ValueError: an argument of the wrong shape, dtype or value, or a backend that cannot run here.
    """
    checks.flags(return_lse=return_lse, validate=validate)
    checks.attention(q, k_pool, v_pool, block_tables, seq_lens, k_scale, v_scale)
    checks.one_query_a_sequence(q, block_tables)
    options = checks.options(q, scale, sliding_window, soft_cap)
    name = choose("paged_decode", backend, interpret, q, k_pool)
    if validate:
        validate_batch(k_pool, block_tables, seq_lens)
    out, lse = _paged_decode(
        q, k_pool, v_pool, block_tables, seq_lens, k_scale, v_scale, backend=name, interpret=interpret, **options
    )
    return (out, lse) if return_lse else out


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Real[Array, "blocks kv_heads block_size stored_dim"],
    v_pool: Real[Array, "blocks kv_heads block_size stored_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    query_start_loc: Int[Array, " seqs+1"],
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    v_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    return_lse: bool = False,
    validate: bool = False,
    backend: str = "auto",
    interpret: Interpret = False,
) -> Any:
    """Causal attention of a ragged batch: prefill chunks and decodes in one call (section 4.1 of the paper).

    The queries of a sequence are its last tokens: `query_start_loc[i + 1] - query_start_loc[i]` of them, the last at
    position `seq_lens[i] - 1`.

    Args:
        q: all query tokens, one sequence after the other; tokens from `query_start_loc[-1]` on are padding.
        query_start_loc: int32, where each sequence's query tokens begin; constant over padding rows.
        k_pool, v_pool, block_tables, seq_lens, scale, sliding_window, soft_cap, k_scale, v_scale, return_lse, validate,
            backend, interpret: see `paged_decode`.

    Returns:
        What the queries attend to, in the dtype of `q`, zeros for padding; with `return_lse`, a pair of it and
        float32 [tokens, heads].

    Raises:
        ValueError: an argument of the wrong shape, dtype or value, or a backend that cannot run here.
    """
    checks.flags(return_lse=return_lse, validate=validate)
    checks.attention(q, k_pool, v_pool, block_tables, seq_lens, k_scale, v_scale)
    checks.query_start_loc(query_start_loc, block_tables)
    options = checks.options(q, scale, sliding_window, soft_cap)
    name = choose("paged_attention", backend, interpret, q, k_pool)
    if validate:
        validate_batch(k_pool, block_tables, seq_lens, query_start_loc, len(q))
    arrays = (q, k_pool, v_pool, block_tables, seq_lens, query_start_loc, k_scale, v_scale)
    out, lse = _paged_attention(*arrays, backend=name, interpret=interpret, **options)
    return (out, lse) if return_lse else out


# Jitted, so that a model of many layers traces and lowers each op once.
_STATIC = ("scale", "sliding_window", "soft_cap", "backend", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC)
def _paged_decode(
    q, k_pool, v_pool, block_tables, seq_lens, k_scale, v_scale, *, backend, interpret, **options
) -> tuple[Array, Lse]:
    arrays = (_widen(q, k_pool), k_pool, v_pool, block_tables, seq_lens)
    out, lse = _kernel("paged_decode", backend, interpret)(*arrays, k_scale=k_scale, v_scale=v_scale, **options)
    return out[..., : q.shape[-1]], lse


@functools.partial(jax.jit, static_argnames=_STATIC)
def _paged_attention(
    q, k_pool, v_pool, block_tables, seq_lens, query_start_loc, k_scale, v_scale, *, backend, interpret, **options
) -> tuple[Array, Lse]:
    arrays = (_widen(q, k_pool), k_pool, v_pool, block_tables, seq_lens, query_start_loc)
    out, lse = _kernel("paged_attention", backend, interpret)(*arrays, k_scale=k_scale, v_scale=v_scale, **options)
    return out[..., : q.shape[-1]], lse


def _kernel(op: str, backend: str, interpret: Interpret) -> Any:
    """The function of one backend: same arguments for all, returns the attention and its log-sum-exp."""
    if backend in PALLAS:
        return functools.partial(kernel(backend, op), interpret=interpret)
    return getattr({"reference": reference, "xla": xla}[backend], op)


def _widen(q: Array, k_pool: Array) -> Array:
    """`q` with zeros up to the width of the stored rows: they add nothing to the scores."""
    return jnp.pad(q, ((0, 0), (0, 0), (0, k_pool.shape[-1] - q.shape[-1])))
