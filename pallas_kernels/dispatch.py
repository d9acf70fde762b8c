"""The public ops: arguments are checked, a backend is chosen by platform and chip, and its kernel is called.

Shapes, dtypes and contracts are the same for every backend (README.md says which takes what):
  pools [blocks, kv_heads, block_size, head_dim], block 0 being the null block, which padding reads and writes;
  block_tables i32 [seqs, max_blocks], logical to physical block, padded with 0;
  seq_lens i32 [seqs], tokens in the cache, this step's included, 0 in a padding row.
Null block, blocks that no table names and slots past a sequence's end may hold NaN and change nothing.
"""

from __future__ import annotations

import functools
from types import ModuleType

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import checks, reference, xla

BACKENDS = ("auto", "reference", "xla", "triton")
TRITON_CAPABILITY = 8.0


def resolve_backend(
    backend: str = "auto",
    *,
    interpret: bool = False,
    platform: str | None = None,
    compute_capability: str | None = None,
) -> tuple[str, str]:
    """The backend that `backend` stands for, and why, as half a sentence.

    Args:
        backend: one of `BACKENDS`.
        interpret: a Pallas kernel is to be interpreted, which works anywhere.
        platform: "cpu", "gpu" or "tpu"; by default JAX's own choice here.
        compute_capability: of the GPU, "8.0" for instance; by default that of the first one here.

    Raises:
        ValueError: an unknown backend, or one that this platform cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if interpret and backend in ("reference", "xla"):
        raise ValueError(f"interpret is True with backend {backend!r}; only a Pallas backend, triton, is interpreted")
    if interpret:
        return "triton", "interpret=True asks for a Pallas kernel"
    if backend in ("reference", "xla"):
        return backend, "asked for by name"
    obstacle = _triton_obstacle(platform or jax.default_backend(), compute_capability)
    if backend == "auto":
        return ("xla", obstacle) if obstacle else ("triton", "an NVIDIA GPU of compute capability 8.0 or more")
    if obstacle:
        raise ValueError(f"backend is 'triton', but {obstacle}; use 'auto', 'xla' or 'reference', or interpret=True")
    return backend, "asked for by name"


def paged_decode(
    q: Float[Array, "seqs heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> Float[Array, "seqs heads head_dim"]:
    """Attention of one query token per sequence, the last of its `seq_lens` tokens (section 4.1 of the paper).

    Args:
        q: float32, bfloat16 or float16; `heads` is a multiple of `kv_heads`.
        k_pool: K by block; `block_size` is a power of two. Any of the three dtypes.
        v_pool: V, as `k_pool`.
        block_tables: int32; padded with 0 behind a sequence's blocks.
        seq_lens: int32, in tokens; 0 marks a padding row, which gives zeros.
        scale: of the scores; head_dim ** -0.5 by default.
        sliding_window: how many tokens back a query sees, itself included; None is all.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap).
        backend: one of `BACKENDS`.
        interpret: run the Pallas kernel in interpret mode, on any platform.

    Returns:
        What the queries attend to, in the dtype of `q`.

    Raises:
        ValueError: an argument of the wrong shape, dtype or value, or a backend that cannot run here.
    """
    checks.attention(q, k_pool, v_pool, block_tables, seq_lens)
    checks.one_query_a_sequence(q, block_tables)
    options = checks.options(q, scale, sliding_window, soft_cap)
    backend = _choose(backend, interpret, q, k_pool)
    return _paged_decode(q, k_pool, v_pool, block_tables, seq_lens, backend=backend, interpret=interpret, **options)


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    query_start_loc: Int[Array, " seqs+1"],
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention of a ragged batch: prefill chunks and decodes in one call (section 4.1 of the paper).

    The queries of a sequence are its last tokens: `query_start_loc[i + 1] - query_start_loc[i]` of them, the last at
    position `seq_lens[i] - 1`. The triton backend has a kernel for sequences with one query token and leaves the
    others to XLA.

    Args:
        q: all query tokens, one sequence after the other; tokens from `query_start_loc[-1]` on are padding.
        query_start_loc: int32, where each sequence's query tokens begin; constant over padding rows.
        k_pool, v_pool, block_tables, seq_lens, scale, sliding_window, soft_cap, backend, interpret: see `paged_decode`.

    Returns:
        What the queries attend to, in the dtype of `q`; zeros for padding.

    Raises:
        ValueError: an argument of the wrong shape, dtype or value, or a backend that cannot run here.
    """
    checks.attention(q, k_pool, v_pool, block_tables, seq_lens)
    checks.query_start_loc(query_start_loc, block_tables)
    options = checks.options(q, scale, sliding_window, soft_cap)
    backend = _choose(backend, interpret, q, k_pool)
    return _paged_attention(
        q, k_pool, v_pool, block_tables, seq_lens, query_start_loc, backend=backend, interpret=interpret, **options
    )


def write_kv(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    slot_mapping: Int[Array, " tokens"],
) -> tuple[Array, Array]:
    """New K and V into their slots: in place where the pools are donated to the jitted function around this.

    Args:
        k: K of the new tokens; cast to the dtype of the pool.
        v: V of the new tokens.
        k_pool: K by block.
        v_pool: V by block.
        slot_mapping: int32, `block * block_size + offset` of each token; padding goes to the null block, a slot below
            `block_size`. A slot outside the pool is dropped.

    Returns:
        The two pools.

    Raises:
        ValueError: an argument of the wrong shape or dtype.
    """
    checks.pools(k_pool, v_pool)
    checks.new_kv(k, v, k_pool, slot_mapping)
    return reference.write_kv(k, v, k_pool, v_pool, slot_mapping)


# Jitted, so that a model of many layers traces and lowers each op once.
_STATIC = ("scale", "sliding_window", "soft_cap", "backend", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC)
def _paged_decode(q, k_pool, v_pool, block_tables, seq_lens, *, backend, interpret, **options) -> Array:
    arrays = (q, k_pool, v_pool, block_tables, seq_lens)
    if backend == "reference":
        return reference.paged_decode(*arrays, **options)
    if backend == "triton":
        return _triton().paged_decode(*arrays, **options, interpret=interpret)
    return xla.paged_decode(*arrays, **options)


@functools.partial(jax.jit, static_argnames=_STATIC)
def _paged_attention(
    q, k_pool, v_pool, block_tables, seq_lens, query_start_loc, *, backend, interpret, **options
) -> Array:
    arrays = (q, k_pool, v_pool, block_tables, seq_lens, query_start_loc)
    if backend == "reference":
        return reference.paged_attention(*arrays, **options)
    if backend == "triton":
        decode = functools.partial(_triton().paged_decode, interpret=interpret)
        return xla.paged_attention(*arrays, **options, decode=decode)
    return xla.paged_attention(*arrays, **options)


def _choose(backend: str, interpret: bool, q: Array, k_pool: Array) -> str:
    """The backend for these arguments: `auto` falls back where a kernel does not take them, a named one refuses."""
    name, _ = resolve_backend(backend, interpret=interpret)
    if name == "triton" and (problem := _triton().unsupported(q, k_pool)):
        if backend == "auto" and not interpret:
            return "xla"
        raise ValueError(problem)
    return name


def _triton_obstacle(platform: str, compute_capability: str | None) -> str | None:
    """Why the Triton kernels cannot run on this platform; None if they can."""
    if platform not in ("gpu", "cuda"):
        return f"there is no Pallas kernel for the platform {platform}"
    capability = compute_capability or str(jax.devices()[0].compute_capability)
    try:
        new_enough = float(capability) >= TRITON_CAPABILITY
    except ValueError:  # an AMD GPU: "gfx90a"
        return f"the Triton kernel is for NVIDIA GPUs, and this one is {capability}"
    if not new_enough:
        return f"compute capability {capability} is below {TRITON_CAPABILITY}, which the Triton kernel needs"
    try:
        _triton()
    except ImportError as missing:
        return str(missing)
    return None


def _triton() -> ModuleType:
    # Imported when it is needed: a JAX without that backend still has the others.
    from pallas_kernels import triton

    return triton
