import pytest

from pagedjax.errors import OutOfBlocks
from pagedjax.host import BlockPool, BlockTable, Growth


def test_blocks_come_on_demand_and_only_the_last_is_partly_filled():
    table = BlockTable(BlockPool(8), block_size=4)
    assert table.append(3) == Growth(0, [1], [])
    assert table.append(1) == Growth(1, [], [])
    assert table.append(1) == Growth(1, [2], [])
    assert table.append(8) == Growth(2, [3, 4], [])
    assert (table.blocks, table.num_tokens, table.capacity) == ([1, 2, 3, 4], 13, 16)


def test_slots_are_block_times_size_plus_offset():
    pool = BlockPool(8)
    pool.allocate(3)
    pool.decref(2)
    table = BlockTable(pool, block_size=4)
    table.append(6)
    assert table.blocks == [2, 4]
    assert table.slots(0, 6) == [8, 9, 10, 11, 16, 17]
    assert table.slots(3, 2) == [11, 16]
    assert table.slots(8, 0) == []


@pytest.mark.parametrize(("start", "n"), [(-1, 1), (7, 2), (0, 9), (0, -1)])
def test_positions_without_a_block(start, n):
    table = BlockTable(BlockPool(8), block_size=4)
    table.append(6)
    with pytest.raises(IndexError, match=rf"^positions {start} to {start + n - 1} of a table that holds 8 tokens$"):
        table.slots(start, n)


def test_running_out_changes_nothing():
    pool = BlockPool(3)
    table = BlockTable(pool, block_size=2)
    table.append(3)
    with pytest.raises(OutOfBlocks, match=r"^2 blocks were asked for, but 1 of 3 are free$"):
        table.append(4)
    assert (table.blocks, table.num_tokens, pool.num_free) == ([1, 2], 3, 1)


def test_a_freed_table_is_empty_and_the_next_lists_the_blocks_alike():
    pool = BlockPool(4)
    table = BlockTable(pool, block_size=2)
    table.append(5)
    table.free()
    assert (table.blocks, table.num_tokens, pool.num_used) == ([], 0, 0)
    assert table.append(5).new_blocks == [1, 2, 3]
