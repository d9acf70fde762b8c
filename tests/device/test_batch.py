"""Shapes of a step: buckets, slices, and the arrays made of a plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.device.batch import LOGIT_BYTES, bucket_for, row_buckets, row_slices, token_buckets
from pagedjax.device.slots import SlotTable
from pagedjax.host.plan import ScheduledChunk, StepPlan


@given(st.integers(1, 10_000), st.data())
def test_every_size_has_the_smallest_bucket_that_holds_it(limit: int, data: st.DataObject) -> None:
    buckets = token_buckets(limit)
    size = data.draw(st.integers(1, limit))
    bucket = bucket_for(size, buckets)
    assert bucket >= size
    assert all(other < size for other in buckets if other < bucket)
    assert buckets[0] == 1 and buckets[-1] == limit and len(buckets) <= limit.bit_length() + 1


@given(st.integers(1, 300), st.integers(1, 200_000))
def test_logits_of_one_head_program_stay_small(max_num_seqs: int, vocab_size: int) -> None:
    buckets = row_buckets(max_num_seqs, vocab_size)
    assert buckets[0] == 1 and buckets[-1] <= max_num_seqs
    assert buckets[-1] == 1 or 4 * vocab_size * buckets[-1] <= LOGIT_BYTES


@given(st.integers(0, 200), st.integers(1, 64))
def test_row_slices_cover_all_rows_in_order(num_rows: int, largest: int) -> None:
    slices = row_slices(num_rows, token_buckets(largest))
    assert [i for first, count in slices for i in range(first, first + count)] == list(range(num_rows))
    assert all(1 <= count <= largest for _, count in slices)


@pytest.fixture
def plan() -> StepPlan:
    """A decode at slot 2 (position 5), the middle of a prompt at slot 3, and a one-token prompt at slot 1."""
    return StepPlan(
        step=0,
        chunks=(
            ScheduledChunk(10, 2, 5, 1, (), 1, (9,), True, False),
            ScheduledChunk(11, 3, 2, 3, (71, 72, 73), 0, (4, 5), False, False),
            ScheduledChunk(12, 1, 0, 1, (81,), 0, (6,), True, False),
        ),
        num_tokens=5,
    )


def test_a_plan_becomes_the_arrays_of_the_design(plan: StepPlan) -> None:
    slots = SlotTable(max_num_seqs=4, max_blocks_per_seq=3, block_size=4)
    slots.block_tables[2] = [8, 0, 0]
    for chunk in plan.chunks:
        slots.extend(chunk)
    batch = slots.build_batch(plan, token_buckets(8))
    np.testing.assert_array_equal(batch.token_ids, [-2, 71, 72, 73, 81, 0, 0, 0])  # -2: last sampled at slot 2
    np.testing.assert_array_equal(batch.positions, [5, 2, 3, 4, 0, 0, 0, 0])
    # block 9 offset 1; blocks 4 and 5; block 6; padding in the null block
    np.testing.assert_array_equal(batch.slot_mapping, [37, 18, 19, 20, 24, 0, 0, 0])
    np.testing.assert_array_equal(batch.block_tables, [[8, 9, 0], [4, 5, 0], [6, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(batch.seq_lens, [6, 5, 1, 0])
    np.testing.assert_array_equal(batch.query_start_loc, [0, 1, 4, 5, 5])
    np.testing.assert_array_equal(batch.logit_rows, [0, 4, 0, 0])
    assert all(np.asarray(leaf).dtype == np.int32 for leaf in vars(batch).values())
