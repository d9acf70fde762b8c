"""One sequence's map from logical to physical blocks (paper sections 4.2 and 4.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from pagedjax.errors import InvariantError
from pagedjax.host.block_pool import BlockPool


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class Growth(NamedTuple):
    """What changed at the end of a table.

    Attributes:
        first_block: index in the table from which on its blocks are new.
        new_blocks: physical blocks from there on; often none.
        copies: (source, destination): blocks whose content must be copied before anything is written.
    """

    first_block: int
    new_blocks: list[int]
    copies: list[tuple[int, int]]


class BlockTable:
    """Physical blocks of one sequence in logical order. Every block but the last is full.

    Attributes:
        blocks: physical block of each logical block.
        num_tokens: tokens that were asked for so far; at most `capacity`. The next one to come is written behind them.
    """

    __slots__ = ("_block_size", "_pool", "blocks", "num_tokens")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.blocks: list[int] = []
        self.num_tokens = 0

    @property
    def capacity(self) -> int:
        """Tokens that the blocks can hold."""
        return len(self.blocks) * self._block_size

    @property
    def writes_to_shared(self) -> bool:
        """Whether the next token's place is in a block that others refer to as well."""
        index, offset = divmod(self.num_tokens, self._block_size)
        return offset > 0 and self._pool.ref_count(self.blocks[index]) > 1

    def append(self, num_tokens: int) -> Growth:
        """Makes room for that many further tokens, to be written behind those there are.

        If the last block is partly filled and shared, a copy takes its place: whoever writes first copies, and whoever
        is left alone with it writes in place.

        Raises:
            OutOfBlocks: if the pool has too few; nothing is changed then.
        """
        total, first = self.num_tokens + num_tokens, len(self.blocks)
        copies = num_tokens > 0 and self.writes_to_shared
        taken = self._pool.allocate(max(0, num_blocks_for(total, self._block_size) - first) + copies)
        self.num_tokens = total
        if not copies:
            self.blocks += taken
            return Growth(first, taken, [])
        source = self.blocks[first - 1]
        self.blocks[first - 1 :] = taken
        self._pool.decref(source)
        return Growth(first - 1, taken, [(source, taken[0])])

    def fork(self, num_blocks: int | None = None) -> BlockTable:
        """A table that shares the first `num_blocks` blocks; by default all of them, and all tokens."""
        child = BlockTable(self._pool, self._block_size)
        child.blocks = self.blocks[:num_blocks]
        child.num_tokens = min(self.num_tokens, child.capacity)
        self._pool.share(child.blocks)
        return child

    def moved_to(self, pool: BlockPool, blocks: list[int]) -> BlockTable:
        """A table of as many tokens over blocks of another pool, whose references the caller counts."""
        table = BlockTable(pool, self._block_size)
        table.blocks, table.num_tokens = blocks, self.num_tokens
        return table

    def slots(self, start: int, n: int) -> list[int]:
        """Slots (`block * block_size + offset`) of the tokens at positions `start` to `start + n - 1`.

        Raises:
            IndexError: if there is no block for one of them.
        """
        if start < 0 or n < 0 or start + n > self.capacity:
            raise IndexError(f"positions {start} to {start + n - 1} of a table that holds {self.capacity} tokens")
        size, blocks = self._block_size, self.blocks
        return [blocks[position // size] * size + position % size for position in range(start, start + n)]

    def free(self) -> None:
        """Gives all blocks back, the last one first, so that the next table to take them lists them alike.

        Of what stays cached, a prefix's tail is then evicted before its head.
        """
        self._pool.release(reversed(self.blocks))
        self.blocks = []
        self.num_tokens = 0


Tables = dict[int, BlockTable]
"""By sequence."""


def dump_tables(tables: Tables) -> list[list[Any]]:
    """Tables as plain data."""
    return [[seq_id, table.num_tokens, list(table.blocks)] for seq_id, table in tables.items()]


def load_tables(data: Any, pool: BlockPool, block_size: int) -> Tables:
    """Inverse of `dump_tables`; references are not counted."""
    tables: Tables = {}
    for seq_id, num_tokens, blocks in data:
        table = tables[int(seq_id)] = BlockTable(pool, block_size)
        table.blocks, table.num_tokens = [int(block) for block in blocks], int(num_tokens)
    return tables


def check_tables(tables: Tables, pool: BlockPool, block_size: int, pinned: Iterable[int] = ()) -> None:
    """Raises InvariantError unless the references to a pool's blocks are these tables' and `pinned`.

    And unless each table just holds its tokens.
    """
    pool.check_invariants()
    references = Counter(pinned)
    for seq_id, table in tables.items():
        if table.num_tokens < 1 or num_blocks_for(table.num_tokens, block_size) != len(table.blocks):
            raise InvariantError(f"sequence {seq_id}: {len(table.blocks)} blocks for {table.num_tokens} tokens")
        references.update(table.blocks)
        for block in table.blocks:
            if not pool.ref_count(block):
                raise InvariantError(f"sequence {seq_id} holds block {block}, which is free")
    for block in range(1, pool.num_blocks + 1):
        found, counted = references[block], pool.ref_count(block)
        if found != counted:
            raise InvariantError(f"block {block} is in {found} tables and pins, but counts {counted} references")
