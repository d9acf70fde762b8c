"""`write_kv` puts tokens into their slots and nothing elsewhere; a step of many layers copies no pool."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_problem import make_problem

from pallas_kernels import paged_attention, write_kv

KV_HEADS, BLOCK_SIZE, HEAD_DIM = 3, 16, 64


def _new_tokens(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.random.default_rng(seed).standard_normal((2, count, KV_HEADS, HEAD_DIM), np.float32)
    return k, v


def _pools(num_blocks: int, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    shape = (num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return jnp.full(shape, 1.0, dtype), jnp.full(shape, 2.0, dtype)


@pytest.mark.jax_matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_go_to_their_slots_and_nowhere_else(dtype: str) -> None:
    k, v = _new_tokens(4)
    slots = np.array([17, 16, 5 * BLOCK_SIZE + 3, 2 * BLOCK_SIZE - 1], np.int32)
    before = _pools(6, dtype)
    after = write_kv(jnp.asarray(k), jnp.asarray(v), *before, jnp.asarray(slots))
    for pool, old, new in zip(after, before, (k, v), strict=True):
        expected = np.array(old)
        for slot, token in zip(slots, jnp.asarray(new, dtype), strict=True):
            expected[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = token
        np.testing.assert_array_equal(pool, expected)


def test_padding_goes_to_the_null_block_and_slots_outside_the_pool_are_dropped() -> None:
    k, v = (jnp.asarray(x) for x in _new_tokens(5))
    before = _pools(3)
    slots = jnp.array([0, 0, -1, 3 * BLOCK_SIZE, BLOCK_SIZE], jnp.int32)
    after = write_kv(k.at[:2].set(np.nan), v, *before, slots)
    for pool, old, new in zip(after, before, (k, v), strict=True):
        np.testing.assert_array_equal(pool[1:], old[1:].at[0, :, 0].set(new[4]))


def _step(k_pools: list, v_pools: list, q: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, *batch: Any) -> Any:
    """The attention of a model: each layer writes its pools, then reads them, and the next depends on it."""
    k_pools, v_pools = list(k_pools), list(v_pools)
    for i in range(len(k_pools)):
        k_pools[i], v_pools[i] = write_kv(k, v, k_pools[i], v_pools[i], slots)
        q = q + paged_attention(q, k_pools[i], v_pools[i], *batch, backend="xla")
    return q, k_pools, v_pools


def _compiled_step(num_blocks: int, layers: int = 3) -> tuple[Any, tuple[Any, ...]]:
    problem = make_problem([60, 33, 200, 9], [60, 1, 1, 2], num_seqs=8, num_tokens=64)
    q, _, _, *batch = problem.arguments()
    k, v = (jnp.asarray(x) for x in _new_tokens(64))
    k_pools, v_pools = zip(*(_pools(num_blocks) for _ in range(layers)), strict=True)
    arguments = (list(k_pools), list(v_pools), q, k, v, jnp.arange(64, dtype=jnp.int32) + BLOCK_SIZE, *batch)
    return jax.jit(_step, donate_argnums=(0, 1)).lower(*arguments).compile(), arguments


@pytest.mark.jax_matrix
def test_a_step_of_many_layers_updates_its_pools_in_place() -> None:
    compiled, arguments = _compiled_step(num_blocks=2000)
    pools = [*arguments[0], *arguments[1]]
    pool_bytes = sum(pool.nbytes for pool in pools)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes
    _, k_pools, _ = compiled(*arguments)
    assert all(pool.is_deleted() for pool in pools)
    np.testing.assert_array_equal(k_pools[-1][1, :, 0], arguments[3][0])

    smaller, _ = _compiled_step(num_blocks=100)
    assert smaller.memory_analysis().temp_size_in_bytes == memory.temp_size_in_bytes
