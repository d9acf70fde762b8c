"""int8 and float8 pools: what is written is near what was given, and attention over it is right for what is stored."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from backends import Backend
from paged_problem import MIXED, TOLERANCE, PagedProblem, error, make_problem

from pallas_kernels import paged_attention, paged_decode, write_kv

POOLS = ("int8", "float8_e4m3fn")


def _quantized(backend: Backend, problem: PagedProblem, dtype: str, rest: float = 0.0) -> tuple[Any, ...]:
    """The arguments of `paged_attention` with a pool of `dtype` and its scales, written by `write_kv`; `rest` is the
    scale, and where the dtype has it the number, of all other slots."""
    q, _, _, *batch = backend.arguments(problem)
    shape = (problem.num_blocks, problem.keys[0].shape[1], problem.block_size, backend.stored_dim(problem.head_dim))
    filler = rest if dtype != "int8" else 77
    pools = (jnp.full(shape, filler, dtype), jnp.full(shape, filler, dtype))
    scales = (jnp.full(shape[:3], rest), jnp.full(shape[:3], rest))
    k, v = (jnp.asarray(np.concatenate(x)) for x in (problem.keys, problem.values))
    slots = np.concatenate(
        [
            table[np.arange(n) // problem.block_size] * problem.block_size + np.arange(n) % problem.block_size
            for table, n in zip(problem.block_tables, problem.seq_lens, strict=False)
        ]
    )
    slots = jnp.asarray(slots, jnp.int32)
    pools = write_kv(k, v, *pools, slots, k_scale=scales[0], v_scale=scales[1], backend="xla")
    return q, *pools[:2], *batch, *pools[2:]


def _as_stored(problem: PagedProblem, dtype: str) -> PagedProblem:
    """The problem with the keys and values that a pool of `dtype` holds, from the definition in float64."""

    def stored(x: np.ndarray) -> np.ndarray:
        largest = 127.0 if dtype == "int8" else 448.0
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(largest)
        scaled = x / np.where(scale == 0, 1, scale)
        numbers = np.round(scaled) if dtype == "int8" else np.asarray(jnp.asarray(scaled, dtype), np.float32)
        return numbers * scale

    return dataclasses.replace(
        problem, keys=[stored(k) for k in problem.keys], values=[stored(v) for v in problem.values]
    )


@pytest.mark.parametrize("dtype", POOLS)
def test_attention_is_right_for_what_is_stored(backend: Backend, dtype: str) -> None:
    problem = make_problem(**backend.mixed, block_size=backend.quantized_block)
    *arguments, k_scale, v_scale = _quantized(backend, problem, dtype)
    out = backend.run("paged_attention", *arguments, k_scale=k_scale, v_scale=v_scale)
    assert out.dtype == backend.dtype
    # XLA and numpy may round a number that lies between two of int8 or float8 apart; a few of them do.
    assert error(out, _as_stored(problem, dtype).right(backend.dtype)) <= max(2e-4, TOLERANCE[backend.dtype])


@pytest.mark.parametrize("dtype", POOLS)
def test_the_error_of_quantising_is_what_its_rounding_allows(dtype: str) -> None:
    """Each number is off by at most half a step: 1/254 of the token's largest for int8; for float8, with 3 bits behind
    the point, 1/16 of the number itself. So scores are off by at most |q| |dk| * scale, weights by a factor e to twice
    that, and values by their own share."""
    problem, backend = make_problem(**MIXED), Backend("xla")
    *arguments, k_scale, v_scale = _quantized(backend, problem, dtype)
    out = paged_attention(*arguments, k_scale=k_scale, v_scale=v_scale, backend="xla")

    def rounding(x: np.ndarray) -> np.ndarray:
        largest = np.abs(x).max(axis=-1, keepdims=True)
        return np.broadcast_to(largest / 254, x.shape) if dtype == "int8" else np.abs(x) / 16 + largest / 448 / 512

    right = problem.right()
    for seq, num_queries in enumerate(problem.query_lens):
        for i in range(num_queries):
            token = problem.query_start_loc[seq] + i
            end = len(problem.keys[seq]) - num_queries + i + 1
            q = problem.q[token].reshape(3, 3, 64)
            dk, dv = (rounding(x[seq][:end].astype(np.float64)) for x in (problem.keys, problem.values))
            ds = np.einsum("kgd,tkd->kgt", np.abs(q), dk).max(axis=-1) / 8
            spread = np.abs(problem.values[seq][:end]).max(axis=0)[:, None]
            bound = np.expm1(2 * ds)[..., None] * spread + np.exp(2 * ds)[..., None] * dv.max(axis=0)[:, None]
            off = np.abs(np.asarray(out[token]).reshape(3, 3, 64) - right[token].reshape(3, 3, 64))
            assert (off <= bound + 1e-5).all()
    assert error(out, right) <= (0.02 if dtype == "int8" else 0.08)


@pytest.mark.parametrize("dtype", POOLS)
def test_garbage_in_numbers_and_scales_changes_nothing(backend: Backend, dtype: str) -> None:
    problem = make_problem(**backend.mixed, block_size=backend.quantized_block)
    outs = []
    for rest in (1.0, np.nan):
        *arguments, k_scale, v_scale = _quantized(backend, problem, dtype, rest)
        out = backend.run("paged_attention", *arguments, k_scale=k_scale, v_scale=v_scale)
        outs.append(np.asarray(out))  # nothing else may be dispatched while an interpreter computes
    np.testing.assert_array_equal(*outs)


def test_written_tokens_come_back() -> None:
    k = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 64)), jnp.float32)
    k = k.at[1].set(0).at[2, 1, 5].set(jnp.nan)
    pools = (jnp.zeros((3, 2, 16, 64), "int8"),) * 2
    scales = (jnp.ones((3, 2, 16)),) * 2
    slots = jnp.array([17, 20, 40], jnp.int32)
    k_pool, _, k_scale, _ = write_kv(k, k, *pools, slots, k_scale=scales[0], v_scale=scales[1])
    back = (k_pool.astype(jnp.float32) * k_scale[..., None]).transpose(0, 2, 1, 3).reshape(48, 2, 64)[slots]
    np.testing.assert_allclose(back[0], k[0], atol=float(jnp.abs(k[0]).max()) / 254 * 1.001)
    assert not np.asarray(back[1]).any()
    assert np.isnan(back[2, 1]).any(), "a NaN must not turn into a number"


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, r"k_scale is None; a pool of int8 needs float32 scales \(9, 3, 16\)"),
        ({"k_scale": jnp.zeros((9, 3, 16))}, r"v_scale is None; a pool of int8 needs"),
        (
            {"k_scale": jnp.zeros((9, 3)), "v_scale": jnp.zeros((9, 3, 16))},
            r"k_scale is \(9, 3\); it must be \(9, 3, 16\): one scale per token and head",
        ),
        (
            {"k_scale": jnp.zeros((9, 3, 16)), "v_scale": jnp.zeros((9, 3, 16), jnp.bfloat16)},
            r"v_scale is bfloat16; it must be float32",
        ),
    ],
)
def test_wrong_scales_are_named(scales: dict[str, Any], message: str) -> None:
    pool = jnp.zeros((9, 3, 16, 64), jnp.int8)
    batch = (jnp.ones((2, 2), jnp.int32), jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match=message):
        paged_decode(jnp.zeros((2, 9, 64)), pool, pool, *batch, **scales)


def test_scales_for_a_float_pool_are_refused() -> None:
    pool, scale = jnp.zeros((9, 3, 16, 64)), jnp.zeros((9, 3, 16))
    with pytest.raises(ValueError, match="k_scale is given, but k_pool is float32; scales are for int8 and float8_e4"):
        write_kv(*[jnp.zeros((4, 3, 64))] * 2, pool, pool, jnp.zeros(4, jnp.int32), k_scale=scale, v_scale=scale)
