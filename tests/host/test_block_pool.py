import json

import pytest

from pagedjax.errors import ConfigError, DoubleFree, InvariantError, OutOfBlocks, SnapshotError, UnknownBlock
from pagedjax.host import NULL_BLOCK, BlockPool


def test_hands_out_ascending_ids_and_never_the_null_block():
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate() == [4]
    assert (pool.num_free, pool.num_used) == (0, 4)
    assert NULL_BLOCK == 0


def test_the_block_freed_last_is_handed_out_first():
    pool = BlockPool(5)
    pool.allocate(4)
    assert pool.decref(2) and pool.decref(4)
    assert pool.allocate(3) == [4, 2, 5]


def test_a_block_is_free_when_its_last_reference_goes():
    pool = BlockPool(2)
    (block,) = pool.allocate()
    pool.incref(block)
    assert pool.ref_count(block) == 2
    assert pool.decref(block) is False
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    assert pool.decref(block) is True
    assert (pool.ref_count(block), pool.num_free) == (0, 2)


def test_running_out_changes_nothing_and_says_how_many():
    pool = BlockPool(3)
    pool.allocate()
    before = pool.snapshot()
    with pytest.raises(OutOfBlocks, match=r"^3 blocks were asked for, but 2 of 3 are free$"):
        pool.allocate(3)
    assert pool.snapshot() == before
    assert pool.allocate(0) == []


def test_freeing_twice_is_an_error():
    pool = BlockPool(2)
    pool.allocate(2)
    pool.decref(2)
    for call in (pool.decref, pool.incref):
        with pytest.raises(DoubleFree, match=r"^block 2 is free already$"):
            call(2)
    assert (pool.num_free, pool.num_used) == (1, 1)


@pytest.mark.parametrize("block", [0, -1, 4, "1", None])
def test_blocks_the_pool_does_not_have(block):
    pool = BlockPool(3)
    for call in (pool.decref, pool.incref, pool.ref_count):
        with pytest.raises(UnknownBlock, match=r"is not one of the pool's: they are 1 to 3$"):
            call(block)


def test_freeing_what_was_never_handed_out_is_its_own_error():
    pool = BlockPool(3)
    pool.allocate()
    with pytest.raises(UnknownBlock, match=r"^block 2 was never handed out$"):
        pool.decref(2)
    assert pool.ref_count(2) == 0


@pytest.mark.parametrize("num_blocks", [0, -3, 2.5])
def test_a_pool_needs_blocks(num_blocks):
    with pytest.raises(ConfigError, match=rf"^num_blocks={num_blocks} is not allowed: .* an integer of at least 1$"):
        BlockPool(num_blocks)


def test_a_negative_number_of_blocks():
    with pytest.raises(ValueError, match=r"^n=-1 is not allowed: n must be at least 0 \(blocks\)$"):
        BlockPool(3).allocate(-1)


def test_a_restored_pool_goes_on_identically():
    pool = BlockPool(6)
    pool.allocate(5)
    for block in (2, 4):
        pool.decref(block)
    pool.incref(1)
    copy = BlockPool(6)
    copy.restore(json.loads(json.dumps(pool.snapshot())))
    assert copy.snapshot() == pool.snapshot()
    assert copy.allocate(3) == pool.allocate(3) == [4, 2, 6]
    assert copy.ref_count(1) == 2


def test_a_snapshot_of_another_size_is_refused():
    pool = BlockPool(6)
    with pytest.raises(SnapshotError, match=r"^snapshot of 5 blocks, but this pool has 6$"):
        pool.restore(BlockPool(5).snapshot())


@pytest.mark.parametrize(
    "change",
    [
        {"free": [1, 1]},
        {"free": [3, 2, 9]},
        {"free": "abc"},
        {"free": None},
        {"ref_counts": [-1, 0]},
        {"ref_counts": [-1, 1, 1, 1]},
        {"ref_counts": [1, 0, 0, 0]},
        {"ref_counts": [-1, -2, 0, 0]},
    ],
)
def test_a_snapshot_that_makes_no_sense_is_refused_and_changes_nothing(change):
    pool = BlockPool(3)
    pool.allocate(2)
    before = pool.snapshot()
    with pytest.raises(SnapshotError, match=r"^not a snapshot of a block pool: "):
        pool.restore({**BlockPool(3).snapshot(), **change})
    assert pool.snapshot() == before


def test_invariants_name_what_is_broken():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.check_invariants()
    pool._free.append(1)
    with pytest.raises(InvariantError, match=r"^block 1 has 1 references, free: True, cached: False$"):
        pool.check_invariants()
    pool._free.append(1)
    with pytest.raises(InvariantError, match=r"^a block is in the free list twice$"):
        pool.check_invariants()
    pool._free[:] = [7]
    with pytest.raises(InvariantError, match=r"^blocks outside 1 to 3$"):
        pool.check_invariants()
    pool._free[:] = [3]
    pool._ref_counts[0] = 1
    with pytest.raises(InvariantError, match=r"^the null block was handed out$"):
        pool.check_invariants()
