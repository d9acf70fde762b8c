"""Every backend computes attention, to the tolerance of its dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_problem import MIXED, TOLERANCE, error, make_problem

from pallas_kernels import paged_attention, paged_decode

Backend = dict[str, Any]

DECODES = make_problem([513, 0, 1, 1100, 64], [1] * 5)  # over one, no, three splits of the Triton kernel


@pytest.mark.jax_matrix
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_mixed_batch_is_right_in_every_dtype(backend: Backend, dtype: str) -> None:
    problem = make_problem(**MIXED)
    out = paged_attention(*problem.arguments(dtype), **backend)
    assert out.dtype == dtype
    assert error(out, problem.right(dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("heads", "head_dim"), [((20, 1), 128), ((4, 4), 80)])
def test_mixed_batch_is_right_for_every_shape_of_heads(backend: Backend, heads: tuple[int, int], head_dim: int) -> None:
    problem = make_problem(**MIXED, heads=heads, head_dim=head_dim)
    assert error(paged_attention(*problem.arguments(), **backend), problem.right()) <= TOLERANCE["float32"]


@pytest.mark.parametrize(
    "options", [{"sliding_window": 1}, {"sliding_window": 70, "soft_cap": 2.0, "scale": 0.3}], ids=str
)
def test_options(backend: Backend, options: dict[str, Any]) -> None:
    problem = make_problem(**MIXED)
    out = paged_attention(*problem.arguments(), **backend, **options)
    right = problem.right(scale=options.get("scale"), window=options.get("sliding_window"), cap=options.get("soft_cap"))
    assert error(out, right) <= TOLERANCE["float32"]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 600, "soft_cap": 5.0}], ids=str)
def test_paged_decode_is_right_over_several_splits(backend: Backend, options: dict[str, Any]) -> None:
    q, *arrays, _ = DECODES.arguments()
    out = np.asarray(paged_decode(q, *arrays, **backend, **options))
    right = DECODES.right(window=options.get("sliding_window"), cap=options.get("soft_cap"))
    assert error(out, right) <= TOLERANCE["float32"]
    assert not out[1].any()


def test_decode_and_a_chunk_of_one_token_agree(backend: Backend) -> None:
    q, *arrays, starts = DECODES.arguments()
    np.testing.assert_array_equal(
        paged_decode(q, *arrays, **backend), paged_attention(q, *arrays, query_start_loc=starts, **backend)
    )


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(backend: Backend, chunk: int) -> None:
    whole = make_problem([150], [150])
    expected = np.asarray(paged_attention(*whole.arguments(), **backend))
    for start in range(0, 150, chunk):
        end = min(start + chunk, 150)
        part = dataclasses.replace(
            whole,
            q=np.pad(whole.q[start:end], ((0, 150 - (end - start)), (0, 0), (0, 0))),
            keys=[whole.keys[0][:end]],
            values=[whole.values[0][:end]],
            query_lens=[end - start],
        )
        out = paged_attention(*part.arguments(), **backend)[: end - start]
        assert error(out, expected[start:end]) <= TOLERANCE["float32"]


def test_padding_gives_zeros(backend: Backend) -> None:
    problem = make_problem(**MIXED)
    out = np.asarray(paged_attention(*problem.arguments(rest=np.nan), **backend))
    assert not out[sum(problem.query_lens) :].any()
    q, k_pool, v_pool, tables, lens, starts = problem.arguments(rest=np.nan)
    empty = paged_attention(q, k_pool, v_pool, tables, jnp.zeros_like(lens), jnp.zeros_like(starts), **backend)
    assert not np.asarray(empty).any()


def test_works_inside_a_jitted_step_that_is_differently_typed(backend: Backend) -> None:
    """A query wider than the pool, as with a bfloat16 cache under a float32 model."""
    problem = make_problem(**MIXED)
    q, k_pool, v_pool, *rest = problem.arguments("bfloat16")
    step = jax.jit(lambda *arrays: paged_attention(*arrays, **backend) * 2)
    out = step(q.astype(jnp.float32), k_pool, v_pool, *rest) / 2
    assert out.dtype == jnp.float32
    assert error(out, problem.right("bfloat16")) <= TOLERANCE["float32"]
