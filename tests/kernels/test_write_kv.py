"""`write_kv` puts tokens into their slots and nothing elsewhere; a step of many layers copies no pool."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import Backend
from paged_problem import make_problem

from pallas_kernels import paged_attention, write_kv

KV_HEADS, BLOCK_SIZE, HEAD_DIM = 3, 16, 64


def _new_tokens(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.random.default_rng(seed).standard_normal((2, count, KV_HEADS, HEAD_DIM), np.float32)
    return k, v


def _pools(num_blocks: int, dtype: Any = jnp.float32, stored_dim: int = HEAD_DIM) -> tuple[jax.Array, jax.Array]:
    shape = (num_blocks, KV_HEADS, BLOCK_SIZE, stored_dim)
    return jnp.full(shape, 1.0, dtype), jnp.full(shape, 2.0, dtype)


def _written(before: jax.Array, slots: np.ndarray, new: np.ndarray) -> np.ndarray:
    """What a pool should hold: the tokens in their slots, with zeros behind a head narrower than a stored row."""
    expected = np.array(before)
    for slot, token in zip(slots, jnp.asarray(new, before.dtype), strict=True):
        if 0 <= slot < len(expected) * BLOCK_SIZE:
            expected[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = 0
            expected[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE, :HEAD_DIM] = token
    return expected


@pytest.mark.jax_matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_go_to_their_slots_and_nowhere_else(backend: Backend, dtype: str) -> None:
    k, v = _new_tokens(4)
    slots = np.array([17, 16, 5 * BLOCK_SIZE + 3, 2 * BLOCK_SIZE - 1], np.int32)
    before = _pools(6, dtype, backend.stored_dim(HEAD_DIM))
    after = backend.run("write_kv", jnp.asarray(k), jnp.asarray(v), *before, jnp.asarray(slots))
    for pool, old, new in zip(after, before, (k, v), strict=True):
        np.testing.assert_array_equal(pool, _written(old, slots, new))


def test_padding_goes_to_the_null_block_and_slots_outside_the_pool_are_dropped(backend: Backend) -> None:
    k, v = (jnp.asarray(x) for x in _new_tokens(5))
    before = _pools(3, backend.dtype, backend.stored_dim(HEAD_DIM))
    slots = np.array([0, 0, -1, 3 * BLOCK_SIZE, BLOCK_SIZE], np.int32)
    after = backend.run("write_kv", k.at[:2].set(np.nan), v, *before, jnp.asarray(slots))
    for pool, old, new in zip(after, before, (k, v), strict=True):
        np.testing.assert_array_equal(pool[1:], _written(old, slots, np.asarray(new))[1:])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_tokens_and_their_scales_go_where_xla_puts_them(backend: Backend, dtype: str) -> None:
    k, v = (jnp.asarray(x) for x in _new_tokens(4))
    size = backend.quantized_block
    slots = jnp.array([size + 8, size + 1, 2 * size + 6, 0], jnp.int32)
    shape = (3, KV_HEADS, size, backend.stored_dim(HEAD_DIM))
    pools, scales = (jnp.zeros(shape, dtype),) * 2, (jnp.ones(shape[:3]),) * 2
    arguments = (k, v, *pools, slots)
    own, xla = (
        write_kv(*arguments, k_scale=scales[0], v_scale=scales[1], **chosen)
        for chosen in (backend.chosen, {"backend": "xla"})
    )
    for mine, theirs in zip(own, xla, strict=True):
        np.testing.assert_array_equal(mine[1:].astype(jnp.float32), theirs[1:].astype(jnp.float32))


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
