"""Copies on write and swapping: whole blocks move, in place, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import Backend

from pallas_kernels import copy_blocks, gather_blocks, scatter_blocks

BLOCKS = 12


def _pools(backend: Backend) -> dict[str, list[jax.Array]]:
    """Two layers of K and V, and a layer of scales, every block different."""
    rng = np.random.default_rng(0)
    shape = (BLOCKS, 2, 16, backend.stored_dim(64))
    pools = {name: [jnp.asarray(rng.standard_normal(shape), backend.dtype) for _ in range(2)] for name in "kv"}
    return {**pools, "scale": [jnp.asarray(rng.standard_normal(shape[:3]), jnp.float32)]}


def _expected(pools: Any, src: list[int], dst: list[int]) -> Any:
    def copied(pool: jax.Array) -> np.ndarray:
        out = np.array(pool)
        for a, b in zip(src, dst, strict=True):
            out[b] = np.asarray(pool)[a]
        return out

    return jax.tree.map(copied, pools)


@pytest.mark.jax_matrix
def test_copies_go_where_they_are_told_and_nowhere_else(backend: Backend) -> None:
    """One source to two destinations among them, and two entries of padding."""
    pools = _pools(backend)
    src, dst = [3, 3, 7, 0, 0], [5, 9, 1, 0, 0]
    out = backend.run("copy_blocks", pools, jnp.array(src, jnp.int32), jnp.array(dst, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, out, _expected(pools, src, dst))


def test_copies_alone_of_padding_change_nothing(backend: Backend) -> None:
    pools = _pools(backend)
    out = backend.run("copy_blocks", pools, jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, out, pools)


def test_ids_outside_the_pool_name_nothing(backend: Backend) -> None:
    pools = _pools(backend)
    src, dst = [3, -1, 7, BLOCKS, 4], [-1, 5, BLOCKS, 6, 9]
    out = backend.run("copy_blocks", pools, jnp.array(src, jnp.int32), jnp.array(dst, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, out, _expected(pools, [4], [9]))


def test_swaps_outside_the_pool_read_the_null_block_and_write_nothing() -> None:
    pools, ids = _pools(Backend("xla")), jnp.array([-1, BLOCKS, 3], jnp.int32)
    blocks = gather_blocks(pools, ids)
    jax.tree.map(lambda block, pool: np.testing.assert_array_equal(block, pool[jnp.array([0, 0, 3])]), blocks, pools)
    jax.tree.map(np.testing.assert_array_equal, scatter_blocks(pools, ids, blocks), pools)


@pytest.mark.jax_matrix
def test_blocks_that_are_swapped_out_and_in_come_back() -> None:
    pools = _pools(Backend("xla"))
    out, into = jnp.array([4, 2, 11, 0], jnp.int32), jnp.array([1, 6, 3, 0], jnp.int32)
    back = scatter_blocks(pools, into, gather_blocks(pools, out))
    jax.tree.map(np.testing.assert_array_equal, back, _expected(pools, [4, 2, 11], [1, 6, 3]))


@pytest.mark.parametrize("op", ["copy", "scatter"])
def test_pools_are_updated_in_place(op: str) -> None:
    pools = {"k": jnp.zeros((2000, 2, 16, 64)), "v": jnp.zeros((2000, 2, 16, 64))}
    ids = jnp.arange(1, 5, dtype=jnp.int32)
    if op == "copy":
        step, arguments = copy_blocks, (pools, ids, ids + 10)
    else:
        step, arguments = scatter_blocks, (pools, ids, gather_blocks(pools, ids))
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    pool_bytes = sum(pool.nbytes for pool in pools.values())
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < 0.01 * pool_bytes
    compiled(*arguments)
    assert all(pool.is_deleted() for pool in pools.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)), "pools is a pytree without an array"),
        (([jnp.zeros(())], jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)), "pools holds a scalar; the first axis"),
        (
            ([jnp.zeros((3, 1)), jnp.zeros((4, 1))], jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)),
            r"pools holds arrays of \[3, 4\] blocks; all must have as many",
        ),
        (([jnp.zeros((3, 1))], jnp.zeros(1), jnp.zeros(1, jnp.int32)), "src is float32; it must be int32"),
        (
            ([jnp.zeros((3, 1))], jnp.zeros(2, jnp.int32), jnp.zeros(1, jnp.int32)),
            r"dst is \(1,\); it must be \(2,\): one destination for each source",
        ),
        (([jnp.zeros((3, 1))], jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)), r"src is \(1, 1\); it must"),
    ],
)
def test_wrong_copies_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        copy_blocks(*arguments)


def test_wrong_swaps_are_named() -> None:
    pools, ids = {"k": jnp.zeros((3, 4))}, jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="blocks is a pytree of another structure than pools"):
        scatter_blocks(pools, ids, {"v": jnp.zeros((2, 4))})
    with pytest.raises(ValueError, match=r"an array of blocks is \(1, 4\); it must be \(2, 4\): as many blocks as ids"):
        scatter_blocks(pools, ids, {"k": jnp.zeros((1, 4))})
    with pytest.raises(ValueError, match="an array of blocks is int32; it must be float32"):
        scatter_blocks(pools, ids, {"k": jnp.zeros((2, 4), jnp.int32)})
    with pytest.raises(ValueError, match=r"ids is \(\); it must have 1 axes"):
        gather_blocks(pools, jnp.zeros((), jnp.int32))
