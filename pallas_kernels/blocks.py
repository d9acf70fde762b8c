"""The public ops that move blocks: new tokens into their slots, copies on write, and swapping."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from pallas_kernels import checks, reference
from pallas_kernels.dispatch import PALLAS, Interpret, choose, kernel
from pallas_kernels.validate import validate_copies, validate_slots

Pools = Any  # a pytree of arrays whose first axis is the block


def write_kv(
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    k_pool: Real[Array, "blocks kv_heads block_size stored_dim"],
    v_pool: Real[Array, "blocks kv_heads block_size stored_dim"],
    slot_mapping: Int[Array, " tokens"],
    *,
    k_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    v_scale: Float[Array, "blocks kv_heads block_size"] | None = None,
    validate: bool = False,
    backend: str = "auto",
    interpret: Interpret = False,
) -> tuple[Array, ...]:
    """New K and V into their slots: in place where the pools are donated to the jitted function around this.

    Args:
        k: K of the new tokens; cast to the dtype of the pool, or quantised for an int8 or float8 pool: there a NaN or
            infinity spoils all numbers of its token and head.
        v: V of the new tokens.
        k_pool: K by block; a `stored_dim` beyond head_dim is filled with zeros.
        v_pool: V by block.
        slot_mapping: int32, `block * block_size + offset` of each token; padding goes to the null block, a slot below
            `block_size`. A slot outside the pool is dropped.
        k_scale: float32, for int8 and float8 pools: gets each token's scale per head, its largest number / 127 or 448.
        v_scale: the same of V.
        validate: check what `slot_mapping` holds, as `paged_decode` says.
        backend, interpret: see `paged_decode`.

    Returns:
        The two pools; behind them the two scales, if there are any.

    Raises:
        ValueError: an argument of the wrong shape or dtype, or a backend that cannot run here.
    """
    checks.flags(validate=validate)
    checks.pools(k_pool, v_pool, k_scale, v_scale)
    checks.new_kv(k, v, k_pool, slot_mapping)
    name = choose("write_kv", backend, interpret, k, k_pool)
    if validate:
        validate_slots(k_pool, slot_mapping)
    pad = ((0, 0), (0, 0), (0, k_pool.shape[-1] - k.shape[-1]))
    k, v = jnp.pad(k, pad), jnp.pad(v, pad)
    new, pools, slot_mapping = (k, v), (jnp.asarray(k_pool), jnp.asarray(v_pool)), jnp.asarray(slot_mapping)
    if k_scale is not None and v_scale is not None:
        new, pools = reference.quantize_kv(k, v, k_pool.dtype), (*pools, jnp.asarray(k_scale), jnp.asarray(v_scale))
    if name in PALLAS:
        return kernel(name, "write_kv")(new, pools, slot_mapping, interpret=interpret)
    return reference.write_kv(new, pools, slot_mapping)


def copy_blocks(
    pools: Pools,
    src: Int[Array, " copies"],
    dst: Int[Array, " copies"],
    *,
    validate: bool = False,
    backend: str = "auto",
    interpret: Interpret = False,
) -> Pools:
    """A batch of copies of whole blocks, as copy-on-write asks for: in place where the pools are donated.

    Args:
        pools: any pytree of arrays with the block as their first axis, all of as many blocks.
        src: int32, the blocks to copy.
        dst: int32, where to; padding has 0 in both. One source may go to several destinations, but no block is copied
            to twice, or is both source and destination. A copy from or to outside the pool is dropped.
        validate: check what `src` and `dst` hold, as `paged_decode` says.
        backend, interpret: see `paged_decode`.

    Returns:
        The pools.

    Raises:
        ValueError: an argument of the wrong shape or dtype, or a backend that cannot run here.
    """
    checks.flags(validate=validate)
    num_blocks = checks.pool_tree(pools)
    checks.block_ids("src", src)
    checks.block_ids("dst", dst, src)
    name = choose("copy_blocks", backend, interpret, *jax.tree.leaves(pools))
    if validate:
        validate_copies(num_blocks, src, dst)
    return _copy_blocks(pools, src, dst, backend=name, interpret=interpret)


def gather_blocks(pools: Pools, ids: Int[Array, " count"]) -> Pools:
    """Whole blocks out of the pools, to be swapped out.

    Args:
        pools: any pytree of arrays with the block as their first axis, all of as many blocks.
        ids: int32, the blocks; padding is 0. For an id outside the pool the null block is given.

    Returns:
        A pytree like `pools`, with the `count` blocks in the order of `ids`.

    Raises:
        ValueError: an argument of the wrong shape or dtype.
    """
    checks.pool_tree(pools)
    checks.block_ids("ids", ids)
    return _gather_blocks(pools, ids)


def scatter_blocks(pools: Pools, ids: Int[Array, " count"], blocks: Pools) -> Pools:
    """Whole blocks into the pools, to be swapped in: in place where the pools are donated.

    Args:
        pools: any pytree of arrays with the block as their first axis, all of as many blocks.
        ids: int32, where each block goes; padding is 0. A block for outside the pool is dropped.
        blocks: as `gather_blocks` gives them.

    Returns:
        The pools.

    Raises:
        ValueError: an argument of the wrong shape or dtype.
    """
    checks.pool_tree(pools)
    checks.block_ids("ids", ids)
    checks.swapped_blocks(pools, ids, blocks)
    return _scatter_blocks(pools, ids, blocks)


# Ids outside the pool name nothing, for all backends alike; indexing would count negative ones from the end.


@functools.partial(jax.jit, static_argnames=("backend", "interpret"))
def _copy_blocks(pools: Pools, src: Array, dst: Array, *, backend: str, interpret: Interpret) -> Pools:
    there = _named(pools, src) & _named(pools, dst)
    src, dst = jnp.where(there, src, 0), jnp.where(there, dst, 0)
    if backend in PALLAS:
        return kernel(backend, "copy_blocks")(pools, src, dst, interpret=interpret)
    return jax.tree.map(lambda pool: pool.at[dst].set(pool[src]), pools)


@jax.jit
def _gather_blocks(pools: Pools, ids: Array) -> Pools:
    ids = jnp.where(_named(pools, ids), ids, 0)
    return jax.tree.map(lambda pool: pool.at[ids].get(mode="promise_in_bounds"), pools)


@jax.jit
def _scatter_blocks(pools: Pools, ids: Array, blocks: Pools) -> Pools:
    ids = jnp.where(_named(pools, ids), ids, _num_blocks(pools))
    return jax.tree.map(lambda pool, new: pool.at[ids].set(new, mode="drop"), pools, blocks)


def _named(pools: Pools, ids: Array) -> Array:
    return (ids >= 0) & (ids < _num_blocks(pools))


def _num_blocks(pools: Pools) -> int:
    return len(jax.tree.leaves(pools)[0])
