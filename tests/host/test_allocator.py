import json

import pytest
from host_harness import make_request

from pagedjax.config import CacheConfig
from pagedjax.errors import InvariantError, OutOfBlocks, SnapshotError
from pagedjax.host import Admission, Growth, KVUsage, PagedAllocator
from pagedjax.request import Sequence


def make_sequence(seq_id: int, num_tokens: int) -> Sequence:
    request = make_request(seq_id, num_tokens)
    return Sequence(seq_id, request, token_ids=list(request.prompt_token_ids))


def test_admission_takes_the_blocks_of_all_known_tokens():
    allocator = PagedAllocator(CacheConfig(4, 8))
    assert allocator.admit([make_sequence(0, 9)], alone=True) == [Admission()]
    assert allocator.admit([make_sequence(5, 4)], alone=True) == [Admission()]
    assert (allocator.block_table(0), allocator.block_table(5)) == ([1, 2, 3], [4])
    assert allocator.seq_ids() == [0, 5]


def test_growth_takes_a_block_only_when_the_last_is_full():
    allocator = PagedAllocator(CacheConfig(4, 8))
    seq = make_sequence(0, 3)
    allocator.admit([seq], alone=True)
    assert allocator.grow(seq, 4) == Growth(1, [], [])
    assert allocator.grow(seq, 5) == Growth(1, [2], [])
    assert allocator.grow(seq, 2) == Growth(2, [], [])
    assert allocator.grow(seq, 13) == Growth(2, [3, 4], [])


def test_growing_past_the_pool_changes_nothing():
    allocator = PagedAllocator(CacheConfig(4, 2))
    seq = make_sequence(0, 3)
    allocator.admit([seq], alone=True)
    before = allocator.snapshot()
    with pytest.raises(OutOfBlocks, match=r"^2 blocks were asked for, but 1 of 2 are free$"):
        allocator.grow(seq, 9)
    with pytest.raises(OutOfBlocks, match=r"^3 blocks were asked for, but 1 of 2 are free$"):
        allocator.admit([make_sequence(1, 10)], alone=True)
    assert allocator.snapshot() == before


def test_the_watermark_is_kept_free_unless_nothing_else_runs():
    allocator = PagedAllocator(CacheConfig(4, 10, watermark=0.25))  # 2 blocks
    for num_tokens, alone in ((33, False), (41, True)):
        with pytest.raises(OutOfBlocks, match=r"blocks were asked for, but 10 of 10 are free"):
            allocator.admit([make_sequence(0, num_tokens)], alone=alone)
    for num_tokens, alone in ((32, False), (40, True)):
        sequence = make_sequence(0, num_tokens)
        allocator.admit([sequence], alone=alone)
        allocator.free(sequence)


def test_usage_splits_every_slot():
    allocator = PagedAllocator(CacheConfig(4, 10))
    prefilling, decoding = make_sequence(0, 9), make_sequence(1, 6)
    allocator.admit([prefilling], alone=True)
    allocator.admit([decoding], alone=True)
    # 3 blocks: 5 computed, 4 known and to come, 3 beyond; 2 blocks: 7 computed, 1 beyond; 5 blocks free.
    usage = allocator.usage({0: 5, 1: 7})
    assert usage == KVUsage(token_states=12, reserved=4, internal_fragmentation=4, external_fragmentation=0, free=20)
    assert sum(usage) == CacheConfig(4, 10).num_slots


def test_free_gives_everything_back():
    allocator = PagedAllocator(CacheConfig(4, 10))
    seq = make_sequence(0, 9)
    allocator.admit([seq], alone=True)
    allocator.free(seq)
    assert allocator.pool.num_used == 0
    assert allocator.seq_ids() == []
    assert allocator.usage({}) == KVUsage(0, 0, 0, 0, 40)


def test_a_restored_allocator_goes_on_identically():
    allocator, copy = PagedAllocator(CacheConfig(4, 10)), PagedAllocator(CacheConfig(4, 10))
    first, second = make_sequence(0, 9), make_sequence(1, 6)
    allocator.admit([first], alone=True)
    allocator.admit([second], alone=True)
    allocator.free(first)
    copy.restore(json.loads(json.dumps(allocator.snapshot())))
    assert copy.snapshot() == allocator.snapshot()
    assert copy.grow(second, 9) == allocator.grow(second, 9) == Growth(2, [1], [])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (CacheConfig(8, 10), r"^snapshot of \('paged', 8\), but this allocator is \('paged', 4\)$"),
        (CacheConfig(4, 9), r"^snapshot of 9 blocks, but this pool has 10$"),
    ],
)
def test_a_snapshot_of_another_shape_is_refused(other, message):
    with pytest.raises(SnapshotError, match=message):
        PagedAllocator(CacheConfig(4, 10)).restore(PagedAllocator(other).snapshot())


@pytest.mark.parametrize("tables", [[], [[0, 9, [1, 2]]], [[0, 9, [1, 2, 8]]], [[0, 9, [1, 2, -1]]], [[0, 9]], 3])
def test_a_snapshot_that_makes_no_sense_is_refused_and_changes_nothing(tables):
    allocator = PagedAllocator(CacheConfig(4, 10))
    allocator.admit([make_sequence(0, 9)], alone=True)
    before = allocator.snapshot()
    with pytest.raises(SnapshotError, match=r"^not a snapshot of a paged allocator: "):
        allocator.restore({**before, "tables": tables})
    assert allocator.snapshot() == before


def test_invariants_name_what_is_broken():
    allocator = PagedAllocator(CacheConfig(4, 10))
    seq = make_sequence(3, 6)
    allocator.admit([seq], alone=True)
    allocator.check_invariants()
    table = allocator._tables[3]
    table.num_tokens = 4
    with pytest.raises(InvariantError, match=r"^sequence 3: 2 blocks for 4 tokens$"):
        allocator.check_invariants()
    table.num_tokens, table.blocks = 6, [1, 5]
    with pytest.raises(InvariantError, match=r"^sequence 3 holds block 5, which is free$"):
        allocator.check_invariants()
    table.blocks = [1, 1]
    with pytest.raises(InvariantError, match=r"^block 1 is in 2 tables and pins, but counts 1 references$"):
        allocator.check_invariants()
