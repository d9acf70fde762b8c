"""Physical KV blocks: who is free, who is used, and by how many (paper section 4.3)."""

from __future__ import annotations

from typing import Any

from pagedjax.config import require
from pagedjax.errors import DoubleFree, InvariantError, OutOfBlocks, SnapshotError, UnknownBlock

NULL_BLOCK = 0
"""Never handed out: padding reads and writes land there."""

_NEVER_USED = -1


class BlockPool:
    """Hands out the blocks 1 to `num_blocks`, the one freed last first, and counts the references to each.

    Args:
        num_blocks: usable blocks, at least 1; the device's arrays hold one more, the null block.

    Raises:
        ConfigError: if the pool would have no block.
    """

    def __init__(self, num_blocks: int) -> None:
        require(isinstance(num_blocks, int) and num_blocks >= 1, "num_blocks", num_blocks, "an integer of at least 1")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))  # a stack; its top is at the end
        self._ref_counts = [_NEVER_USED] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - len(self._free)

    def ref_count(self, block: int) -> int:
        """References to a block, 0 if it is free.

        Raises:
            UnknownBlock: if the pool has no such block.
        """
        return max(0, self._count(block))

    def allocate(self, n: int = 1) -> list[int]:
        """Takes `n` free blocks, each with one reference, in the order in which a table lists them.

        Raises:
            OutOfBlocks: if fewer are free; nothing is taken then.
        """
        if n < 0:
            raise ValueError(f"n={n} is not allowed: n must be at least 0 (blocks)")
        free = self._free
        if n > len(free):
            raise OutOfBlocks(f"{n} blocks were asked for, but {len(free)} of {self.num_blocks} are free")
        blocks = [free.pop() for _ in range(n)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def incref(self, block: int) -> None:
        """Adds a reference to a block in use.

        Raises:
            UnknownBlock: if the pool never handed it out.
            DoubleFree: if it is free again.
        """
        self._require_used(block)
        self._ref_counts[block] += 1

    def decref(self, block: int) -> bool:
        """Drops a reference; says whether it was the last one, which frees the block.

        Raises:
            UnknownBlock: if the pool never handed it out.
            DoubleFree: if it is free already.
        """
        self._require_used(block)
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return False
        self._free.append(block)
        return True

    def snapshot(self) -> dict[str, Any]:
        """The pool as plain JSON-able data."""
        return {"num_blocks": self.num_blocks, "free": list(self._free), "ref_counts": list(self._ref_counts)}

    def restore(self, data: Any) -> None:
        """Takes over the state of a snapshot of a pool of the same size.

        Raises:
            SnapshotError: if it is of another size or makes no sense; nothing is changed then.
        """
        try:
            if data["num_blocks"] != self.num_blocks:
                raise SnapshotError(f"snapshot of {data['num_blocks']} blocks, but this pool has {self.num_blocks}")
            candidate = BlockPool(self.num_blocks)
            candidate._free = [int(block) for block in data["free"]]
            candidate._ref_counts = [int(count) for count in data["ref_counts"]]
            candidate.check_invariants()
        except SnapshotError:
            raise
        except (KeyError, TypeError, ValueError, InvariantError) as error:
            raise SnapshotError(f"not a snapshot of a block pool: {error!r}") from error
        self._free, self._ref_counts = candidate._free, candidate._ref_counts

    def check_invariants(self) -> None:
        """Raises InvariantError if a block is in two states or in none."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a block is in the free list twice")
        if len(self._ref_counts) != self.num_blocks + 1 or not free <= set(range(1, self.num_blocks + 1)):
            raise InvariantError(f"blocks outside 1 to {self.num_blocks}")
        if self._ref_counts[NULL_BLOCK] != _NEVER_USED:
            raise InvariantError("the null block was handed out")
        for block in range(1, self.num_blocks + 1):
            count = self._ref_counts[block]
            if count < _NEVER_USED or (count > 0) == (block in free):
                raise InvariantError(f"block {block} has {count} references, free: {block in free}")

    def _count(self, block: int) -> int:
        if not isinstance(block, int) or not 0 < block <= self.num_blocks:
            raise UnknownBlock(f"block {block!r} is not one of the pool's: they are 1 to {self.num_blocks}")
        return self._ref_counts[block]

    def _require_used(self, block: int) -> None:
        count = self._count(block)
        if count > 0:
            return
        if count == _NEVER_USED:
            raise UnknownBlock(f"block {block} was never handed out")
        raise DoubleFree(f"block {block} is free already")
