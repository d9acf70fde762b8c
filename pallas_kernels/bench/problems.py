"""Arrays for a case, and the calls that are timed against each other on them."""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels.bench.cases import Case
from pallas_kernels.bench.timing import Call
from pallas_kernels.constants import QUANTIZED

QUICK = "rbg"  # a generator that compiles in a third of the default one's time


def random_pools(case: Case, seed: int = 0) -> tuple[jax.Array, ...]:
    """K and V of all blocks, zeros behind head_dim; with scales if quantised."""
    keys = jax.random.split(jax.random.key(seed, impl=QUICK), 4)
    return tuple(_draw(key, shape, case.head_dim) for key, shape in zip(keys, case.pools(), strict=False))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: jax.ShapeDtypeStruct, head_dim: int) -> jax.Array:
    if shape.dtype == jnp.int8:
        return jax.random.randint(key, shape.shape, -127, 128, jnp.int8)
    values = jax.random.normal(key, shape.shape, jnp.bfloat16 if shape.dtype != jnp.float32 else jnp.float32)
    if len(shape.shape) == 3:
        return jnp.abs(values).astype(shape.dtype) / 127
    return jnp.where(jnp.arange(shape.shape[-1]) < head_dim, values, 0).astype(shape.dtype)


def random_table(case: Case, seed: int = 0) -> jax.Array:
    """Each sequence's blocks, strewn over the pool."""
    ids = 1 + np.random.default_rng(seed).permutation(case.num_blocks - 1)[: case.seqs * case.blocks_per_seq]
    return jnp.asarray(ids.reshape(case.seqs, -1), jnp.int32)


def internal_arguments(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrays for the internal contract of a backend's op, positional and by name; all sequences are of full length."""
    shapes, named_shapes = case.arguments()
    pools = random_pools(case)
    q, lens = _queries(case), jnp.full(case.seqs, case.context, jnp.int32)
    if case.op == "flash_attention":
        k, v = (jax.random.normal(jax.random.key(i, impl=QUICK), shapes[1].shape, shapes[1].dtype) for i in range(2))
        return (q.reshape(shapes[0].shape), k, v, lens), {}
    if case.op == "write_kv":
        new = tuple(jnp.ones(shape.shape, shape.dtype) for shape in shapes[0])
        return (new, pools, _slots(case)), {}
    if case.op == "copy_blocks":
        return (pools, *_two_sets(case)), {}
    q = jnp.pad(q, ((0, 0), (0, 0), (0, case.stored_dim - case.head_dim)))
    starts = jnp.arange(case.seqs + 1, dtype=jnp.int32) * case.queries
    batch = (random_table(case), lens) if case.op == "paged_decode" else (random_table(case), lens, starts)
    return (q, *pools[:2], *batch), dict(zip(named_shapes, pools[2:], strict=True))


def operands(case: Case, arrays: tuple[Any, ...]) -> list[Any]:
    """Those of an op's positional arguments that `unsupported` looks at."""
    if case.op == "copy_blocks":
        return jax.tree.leaves(arrays[0])
    return [arrays[0][0], arrays[1][0]] if case.op == "write_kv" else list(arrays[:2])


def calls(case: Case) -> dict[str, Call]:
    """What to time: "ours", and for attention whichever of "flash", "jax" and "cudnn" there is here.

    "flash" is this package's own contiguous kernel over the same tokens, "jax" the paged attention that JAX brings,
    "cudnn" cuDNN's contiguous attention.
    """
    if case.op in ("paged_decode", "paged_attention"):
        return _paged_calls(case)
    if case.op == "flash_attention":
        return _flash_calls(case)
    return {"ours": _move_call(case)}


def _queries(case: Case) -> jax.Array:
    shape = (case.tokens, case.heads, case.head_dim)
    return jax.random.normal(jax.random.key(7, impl=QUICK), shape, jnp.dtype(case.dtype))


def _paged_calls(case: Case) -> dict[str, Call]:
    pools, table, q = random_pools(case), random_table(case), _queries(case)
    lens = jnp.full(case.seqs, case.context, jnp.int32)
    k_pool, v_pool, *scales = pools
    named = dict(zip(("k_scale", "v_scale"), scales, strict=False))
    if case.op == "paged_decode":
        ours = functools.partial(pallas_kernels.paged_decode, q, k_pool, v_pool, table, lens, **named)
    else:
        starts = jnp.arange(case.seqs + 1, dtype=jnp.int32) * case.queries
        ours = functools.partial(pallas_kernels.paged_attention, q, k_pool, v_pool, table, lens, starts, **named)
    found: dict[str, Call] = {"ours": ours}
    if scales:
        return found
    k, v = (_contiguous(case, pool, table) for pool in pools)
    batched = q.reshape(case.seqs, case.queries, case.heads, case.head_dim)
    found["flash"] = functools.partial(pallas_kernels.flash_attention, batched, k, v, causal=True)
    if case.op == "paged_decode":
        found |= _jax_paged(case, q, k_pool, v_pool, table, lens) | _cudnn(batched, k, v, causal=False)
    return found


def _flash_calls(case: Case) -> dict[str, Call]:
    q = _queries(case).reshape(case.seqs, case.queries, case.heads, case.head_dim)
    shape = (case.seqs, case.context, case.kv_heads, case.head_dim)
    k, v = (jax.random.normal(jax.random.key(i, impl=QUICK), shape, jnp.dtype(case.dtype)) for i in range(2))
    ours = functools.partial(pallas_kernels.flash_attention, q, k, v, causal=True)
    # cuDNN's causal mask begins at the first query and key, ours ends at the last: the same where there are as many.
    return {"ours": ours} | (_cudnn(q, k, v, causal=True) if case.queries == case.context else {})


@functools.partial(jax.jit, static_argnums=0)
def _contiguous(case: Case, pool: jax.Array, table: jax.Array) -> jax.Array:
    """K or V of every sequence as one run, [seqs, context, kv_heads, head_dim]."""
    rows = pool[table].transpose(0, 1, 3, 2, 4).reshape(case.seqs, -1, case.kv_heads, case.stored_dim)
    return rows[:, : case.context, :, : case.head_dim]


def _jax_paged(
    case: Case, q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, table: jax.Array, lens: jax.Array
) -> dict[str, Call]:
    """The paged attention that JAX brings for this platform, if it does; it scales no scores, and wants heads first."""
    platform = jax.default_backend()
    try:
        module = importlib.import_module(f"jax.experimental.pallas.ops.{platform}.paged_attention")
    except ImportError:
        return {}
    k, v = (jax.jit(lambda pool: pool.transpose(1, 0, 2, 3))(pool) for pool in (k_pool, v_pool))
    q = jnp.pad(q * case.head_dim**-0.5, ((0, 0), (0, 0), (0, case.stored_dim - case.head_dim)))
    per_step = math.gcd(table.shape[1], 8)
    if platform == "tpu":
        call = functools.partial(module.paged_attention, q, k, v, lens, table, pages_per_compute_block=per_step)
    else:
        splits = math.gcd(table.shape[1] // per_step, 16)
        options = {"pages_per_compute_block": per_step, "k_splits": splits}
        call = functools.partial(module.paged_attention, q, k, v, table, lens, **options)
    return {"jax": call}


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> dict[str, Call]:
    """cuDNN takes 16-bit numbers on NVIDIA GPUs."""
    if jax.default_backend() != "gpu" or q.dtype == jnp.float32:
        return {}
    attention = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    return {"cudnn": functools.partial(jax.jit(attention), q, k, v)}


def _move_call(case: Case) -> Call:
    """An op that moves blocks or tokens; what it updates in place is handed from call to call."""
    pools = random_pools(case)
    src, dst = _two_sets(case)
    if case.op == "gather_blocks":
        return functools.partial(pallas_kernels.gather_blocks, pools, src)
    if case.op == "scatter_blocks":
        blocks = jax.block_until_ready(pallas_kernels.gather_blocks(pools, src))
        step = jax.jit(lambda pools: pallas_kernels.scatter_blocks(pools, dst, blocks), donate_argnums=0)
    elif case.op == "copy_blocks":
        step = jax.jit(lambda pools: pallas_kernels.copy_blocks(pools, src, dst), donate_argnums=0)
    else:
        step = _write_step(case)

    def call() -> Any:
        nonlocal pools
        pools = step(pools)
        return pools

    return call


def _write_step(case: Case) -> Any:
    shape = (2, case.tokens, case.kv_heads, case.head_dim)
    k, v = jax.random.normal(jax.random.key(3, impl=QUICK), shape, jnp.dtype(case.dtype))
    slots = _slots(case)
    names = ("k_scale", "v_scale") if case.pool_dtype in QUANTIZED else ()

    def step(pools: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        scales = dict(zip(names, pools[2:], strict=True))
        return pallas_kernels.write_kv(k, v, pools[0], pools[1], slots, **scales)

    return jax.jit(step, donate_argnums=0)


def _two_sets(case: Case) -> list[jax.Array]:
    """Blocks to copy from and others to copy to."""
    order = np.random.default_rng(0).permutation(case.num_blocks - 1)[: 2 * case.blocks] + 1
    return [jnp.asarray(part, jnp.int32) for part in np.split(order, 2)]


def _slots(case: Case) -> jax.Array:
    """A slot of its own for each token, none of the null block."""
    slots = np.random.default_rng(1).permutation((case.num_blocks - 1) * case.block_size)[: case.tokens]
    return jnp.asarray(slots + case.block_size, jnp.int32)
