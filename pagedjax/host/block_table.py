"""One sequence's map from logical to physical blocks (paper section 4.2)."""

from __future__ import annotations

from pagedjax.host.block_pool import BlockPool


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Physical blocks of one sequence in logical order. Every block but the last is full.

    Attributes:
        blocks: physical block of each logical block.
        num_tokens: tokens that were asked for so far; at most `capacity`.
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

    def append(self, num_tokens: int) -> list[int]:
        """Makes room for that many further tokens; returns the blocks taken for them.

        Raises:
            OutOfBlocks: if the pool has too few; nothing is changed then.
        """
        total = self.num_tokens + num_tokens
        taken = self._pool.allocate(max(0, num_blocks_for(total, self._block_size) - len(self.blocks)))
        self.blocks += taken
        self.num_tokens = total
        return taken

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
        """Gives all blocks back, the last one first, so that the next table to take them lists them alike."""
        for block in reversed(self.blocks):
            self._pool.decref(block)
        self.blocks = []
        self.num_tokens = 0
