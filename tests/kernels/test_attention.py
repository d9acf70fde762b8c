"""Every backend computes attention, to the tolerance of its dtype, against float64 and the definition."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import Backend
from paged_problem import TOLERANCE, PagedProblem, error, make_problem

from pallas_kernels import paged_attention, reference

DECODES = make_problem([513, 0, 1, 1100, 64], [1] * 5)  # over one, no, three splits of 512 tokens

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 5, 7, 8, 16)
PATTERNS = ("decode", "prefill", "mixed", "padded")


def _patterned(pattern: str, block_size: int, head_dim: int, group: int, kv_heads: int = 2) -> PagedProblem:
    """Lengths 0, 1, and around a block and a tile of the KV axis, as decodes, whole prompts, or a mixture."""
    lens = sorted(
        {0, 1, block_size - 1, block_size, block_size + 1, 131} - ({block_size + 1} if block_size > 64 else set())
    )
    queries = {
        "decode": [1] * len(lens),
        "prefill": lens,
        "mixed": [min(n, q) for n, q in zip(lens, itertools.cycle((1, 5, 200)), strict=False)],
        "padded": [min(n, q) for n, q in zip(lens, itertools.cycle((70, 1)), strict=False)],
    }[pattern]
    spare = {"num_seqs": len(lens) + 3, "num_tokens": sum(queries) + 7} if pattern == "padded" else {}
    return make_problem(lens, queries, (kv_heads * group, kv_heads), head_dim, block_size, **spare)


def _check_or_refusal(backend: Backend, problem: PagedProblem, dtype: str) -> None:
    """The backend is right, or refuses by name what its table in the README says it does not take."""
    kernel_takes = problem.block_size >= backend.smallest_block and dtype in backend.dtypes
    if not kernel_takes:
        with pytest.raises(ValueError, match=r"block_size|is \w+float\w+|is float"):
            backend.attention(problem, dtype)
        return
    assert error(backend.attention(problem, dtype), problem.right(dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("block_size", "head_dim", "group", "pattern"),
    [
        (block_size, HEAD_DIMS[i % 5], GROUPS[i % 7], PATTERNS[i % 4])  # each value of each once at least
        for i, block_size in enumerate(BLOCK_SIZES)
    ],
)
def test_every_shape_is_right_or_refused(
    backend: Backend, block_size: int, head_dim: int, group: int, pattern: str
) -> None:
    _check_or_refusal(backend, _patterned(pattern, block_size, head_dim, group, kv_heads=1), backend.dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_whole_grid(backend: Backend, block_size: int, head_dim: int, group: int, pattern: str, dtype: str) -> None:
    _check_or_refusal(backend, _patterned(pattern, block_size, head_dim, group), dtype)


@pytest.mark.jax_matrix
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_mixed_batch_is_right_in_every_dtype(backend: Backend, dtype: str) -> None:
    problem = make_problem(**backend.mixed)
    _check_or_refusal(backend, problem, dtype)
    if dtype in backend.dtypes:
        assert backend.attention(problem, dtype).dtype == dtype


@pytest.mark.jax_matrix
@pytest.mark.parametrize(
    "options", [{"sliding_window": 1}, {"sliding_window": 70, "soft_cap": 2.0, "scale": 0.3}], ids=str
)
def test_options(backend: Backend, options: dict[str, Any]) -> None:
    problem = make_problem(**backend.mixed)
    out = backend.attention(problem, **options)
    right = problem.right(
        backend.dtype,
        scale=options.get("scale"),
        window=options.get("sliding_window"),
        cap=options.get("soft_cap"),
    )
    assert error(out, right) <= TOLERANCE[backend.dtype]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 600, "soft_cap": 5.0}], ids=str)
def test_paged_decode_is_right_over_several_splits(backend: Backend, options: dict[str, Any]) -> None:
    out = backend.decode(DECODES, **options)
    right = DECODES.right(backend.dtype, window=options.get("sliding_window"), cap=options.get("soft_cap"))
    assert error(out, right) <= TOLERANCE[backend.dtype]
    assert not out[1].any()


def test_decode_and_a_chunk_of_one_token_agree(backend: Backend) -> None:
    np.testing.assert_array_equal(backend.decode(DECODES), backend.attention(DECODES))


def test_a_chunk_of_two_agrees_with_two_decodes(backend: Backend) -> None:
    """Prefill and decode are kernels of their own, and must see the same."""
    problem = make_problem([70, 130], [2, 2])
    chunk = backend.attention(problem)
    cut = dataclasses.replace(problem, query_lens=[1, 1], q=problem.q[[1, 3]])
    np.testing.assert_allclose(backend.decode(cut), chunk[[1, 3]], rtol=0, atol=TOLERANCE[backend.dtype])


@pytest.mark.jax_matrix
def test_the_log_sum_exp_is_right(backend: Backend) -> None:
    problem = make_problem(**backend.mixed)
    _, lse = backend.attention_and_lse(*backend.arguments(problem))
    right = problem.right_lse(backend.dtype)
    np.testing.assert_allclose(lse, right, rtol=0, atol=1e-5 if backend.dtype == "float32" else 2e-3)
    assert lse.dtype == jnp.float32
    assert (np.asarray(lse)[sum(problem.query_lens) :] == np.float32(-1e30)).all()


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(backend: Backend, chunk: int) -> None:
    whole = make_problem([150], [150])
    expected = backend.attention(whole)
    for start in (0, 2 * chunk, 150 // chunk * chunk):
        end = min(start + chunk, 150)
        part = dataclasses.replace(
            whole,
            q=np.pad(whole.q[start:end], ((0, 150 - (end - start)), (0, 0), (0, 0))),
            keys=[whole.keys[0][:end]],
            values=[whole.values[0][:end]],
            query_lens=[end - start],
        )
        out = backend.attention(part)[: end - start]
        assert error(out, expected[start:end].astype(np.float64)) <= TOLERANCE[backend.dtype]


def test_padding_gives_zeros(backend: Backend) -> None:
    problem = make_problem(**backend.mixed)
    out = backend.attention(problem, rest=np.nan)
    assert not out[sum(problem.query_lens) :].any()
    q, k_pool, v_pool, tables, lens, starts = backend.arguments(problem, rest=np.nan)
    arguments = (q, k_pool, v_pool, tables, jnp.zeros_like(lens), jnp.zeros_like(starts))
    assert not np.asarray(backend.attention_and_lse(*arguments)[0]).any()


def test_works_inside_a_jitted_step_that_is_differently_typed(backend: Backend) -> None:
    """A query wider than the pool, as with a bfloat16 cache under a float32 model."""
    if backend.dtype != "float32":
        pytest.skip(f"the {backend.name} kernels take no float32")
    problem = make_problem(**backend.mixed)
    q, k_pool, v_pool, *rest = backend.arguments(problem, "bfloat16")
    step = jax.jit(lambda *arrays: paged_attention(*arrays, **backend.chosen) * 2)
    out = jax.block_until_ready(step(q.astype(jnp.float32), k_pool, v_pool, *rest)) / 2
    assert out.dtype == jnp.float32
    assert error(out, problem.right("bfloat16")) <= TOLERANCE["float32"]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100, "soft_cap": 3.0}], ids=str)
def test_the_paper_s_steps_and_the_online_softmax_agree(options: dict[str, Any]) -> None:
    q, *arrays, _ = DECODES.arguments()
    steps, online = (
        fn(q, *arrays, scale=0.125, **options) for fn in (reference.paged_decode, reference.paged_decode_online)
    )
    for a, b in zip(steps, online, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_a_pool_stored_wider_than_a_head_gives_the_same(backend: Backend) -> None:
    """Rows of 128 numbers, as TPUs want them, with zeros behind the head's own."""
    problem = make_problem(**backend.mixed)
    wide = problem.arguments(backend.dtype, stored_dim=128)
    out = np.asarray(backend.attention_and_lse(*wide)[0])
    assert out.shape == problem.q.shape
    assert error(out, problem.right(backend.dtype)) <= TOLERANCE[backend.dtype]
    decoded = np.asarray(backend.run("paged_decode", wide[0][: len(problem.seq_lens)], *wide[1:5]))
    assert decoded.shape[-1] == problem.head_dim
