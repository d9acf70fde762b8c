"""What may not matter does not, to the bit: garbage, where blocks lie, how large they are, who shares the batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from backends import Backend
from paged_problem import MIXED, TOLERANCE, error, make_problem


# Interpreters multiply with numpy, which warns of what the masks then take out.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.jax_matrix
@pytest.mark.parametrize(("block_size", "garbage"), [(16, np.nan), (256, np.inf)])
def test_garbage_outside_the_sequences_changes_nothing(backend: Backend, block_size: int, garbage: float) -> None:
    problem = make_problem(**backend.mixed, block_size=block_size)
    clean, dirty = (backend.attention(problem, rest=rest) for rest in (0.0, garbage))
    np.testing.assert_array_equal(dirty, clean)


def test_garbage_before_a_sliding_window_changes_nothing(backend: Backend) -> None:
    """Blocks behind the window may be given to others."""
    problem = make_problem([200, 150], [1, 30])
    q, k_pool, v_pool, *rest = backend.arguments(problem)
    clean = backend.attention_and_lse(q, k_pool, v_pool, *rest, sliding_window=20)[0]
    block = problem.block_tables[0, 1]
    dirty_k, dirty_v = (pool.at[block].set(np.nan) for pool in (k_pool, v_pool))
    dirty = backend.attention_and_lse(q, dirty_k, dirty_v, *rest, sliding_window=20)[0]
    np.testing.assert_array_equal(dirty, clean)


@pytest.mark.jax_matrix
def test_block_size_changes_no_bit(backend: Backend) -> None:
    # a tile of 64 tokens out of many blocks, one, and a part of one; where it is cheap, more
    sizes = [backend.smallest_block, 64, 256] if backend.interpret else [1, 4, 8, 16, 64, 256]
    problems = [make_problem(**backend.mixed, block_size=size) for size in sizes]
    first, *others = (backend.attention(problem) for problem in problems)
    right = problems[0].right(backend.dtype)
    assert error(first, right) <= TOLERANCE[backend.dtype]
    for out in others:
        if backend.name == "reference":  # its sums run over the table's width, which depends on the block size
            assert error(out, right) <= TOLERANCE["float32"]
        else:
            np.testing.assert_array_equal(out, first)


def test_a_wider_table_changes_no_bit(backend: Backend) -> None:
    problem = make_problem(**backend.mixed)
    if backend.name == "reference":
        np.testing.assert_allclose(backend.attention(problem, max_blocks=50), backend.attention(problem), atol=1e-5)
    else:
        np.testing.assert_array_equal(backend.attention(problem, max_blocks=50), backend.attention(problem))


@pytest.mark.jax_matrix
def test_where_the_blocks_lie_changes_no_bit(backend: Backend) -> None:
    problem = make_problem(**backend.mixed)
    place = np.concatenate([[0], 1 + np.random.default_rng(1).permutation(problem.num_blocks - 1)])
    moved = dataclasses.replace(problem, block_tables=place[problem.block_tables].astype(np.int32))
    np.testing.assert_array_equal(backend.attention(moved), backend.attention(problem))


def test_neighbours_and_order_change_no_bit(backend: Backend) -> None:
    """Sequence 5 (a decode) and 3 (a chunk) among others, in another order, beside longer and shorter ones."""
    problem = make_problem(**MIXED)
    others = make_problem([240, 64, 7, 30, 20], [1, 2, 1, 1, 3], seed=1)
    order = [("other", 0), ("other", 1), ("own", 3), ("other", 2), ("own", 5), ("other", 3), ("other", 4)]
    source = {"own": problem, "other": others}
    q, keys, values, query_lens = [], [], [], []
    for name, i in order:
        start, end = source[name].query_start_loc[i : i + 2]
        q.append(source[name].q[start:end])
        keys.append(source[name].keys[i])
        values.append(source[name].values[i])
        query_lens.append(int(end - start))
    mixed = make_problem([len(k) for k in keys], query_lens, num_seqs=12, num_tokens=160)
    mixed = dataclasses.replace(mixed, q=np.concatenate([*q, mixed.q[sum(query_lens) :]]), keys=keys, values=values)
    # One program, so one shape: as many blocks, and as wide a table.
    blocks = max(mixed.num_blocks, problem.num_blocks)
    mixed, problem = (dataclasses.replace(p, num_blocks=blocks) for p in (mixed, problem))
    alone, among = (backend.attention(p, max_blocks=20) for p in (problem, mixed))
    for mine, theirs in ((5, 4), (3, 2)):
        np.testing.assert_array_equal(
            among[slice(*mixed.query_start_loc[theirs : theirs + 2])],
            alone[slice(*problem.query_start_loc[mine : mine + 2])],
        )
