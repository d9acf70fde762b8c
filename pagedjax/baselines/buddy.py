"""A buddy allocator of contiguous blocks (Knuth, The Art of Computer Programming, vol. 1, section 2.5).

Chunks are of a power of two blocks, and aligned to their size when usable blocks are counted from 0 (their ids count
from 1). What the baselines reserve for a request, whole, is such a chunk (paper section 6.1).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from pagedjax.config import require
from pagedjax.errors import DoubleFree, InvariantError, OutOfBlocks, SnapshotError


class BuddyAllocator:
    """Hands out runs of 2**order blocks, the lowest one that fits first, and joins free neighbours.

    Args:
        num_blocks: usable blocks, any number: what is no power of two is cut into chunks that are.
        max_order: of the largest chunk.
    """

    def __init__(self, num_blocks: int, max_order: int) -> None:
        require(num_blocks >= 1, "num_blocks", num_blocks, "an integer of at least 1")
        require(max_order >= 0, "max_order", max_order, "an integer of at least 0")
        self.num_blocks = num_blocks
        self.max_order = max_order
        self._free: list[list[int]] = [[] for _ in range(max_order + 1)]  # by order: offsets, sorted
        self._taken: dict[int, int] = {}  # offset -> order
        offset = 0
        while offset < num_blocks:
            order = self._largest_at(offset)
            self._free[order].append(offset)
            offset += 1 << order

    def _largest_at(self, offset: int) -> int:
        order = self.max_order
        while offset % (1 << order) or offset + (1 << order) > self.num_blocks:
            order -= 1
        return order

    @property
    def num_free(self) -> int:
        """Blocks in no chunk that was handed out."""
        return sum(len(offsets) << order for order, offsets in enumerate(self._free))

    @property
    def num_chunks(self) -> int:
        """Chunks handed out."""
        return len(self._taken)

    def taken(self) -> list[tuple[int, int]]:
        """(offset, order) of the chunks handed out."""
        return list(self._taken.items())

    def order_for(self, num_blocks: int) -> int:
        """Order of the smallest chunk of so many blocks."""
        return max(0, num_blocks - 1).bit_length()

    def largest_free(self) -> int:
        """Blocks of the largest chunk that could be had; 0 if there is none."""
        return next((1 << order for order in range(self.max_order, -1, -1) if self._free[order]), 0)

    def num_free_below(self, order: int) -> int:
        """Free blocks in chunks smaller than that."""
        return sum(len(offsets) << small for small, offsets in enumerate(self._free[:order]))

    def allocate(self, order: int) -> list[int]:
        """Takes a chunk of 2**order blocks; their ids.

        Raises:
            OutOfBlocks: if no free chunk is as large; nothing is changed then.
        """
        found = next((size for size in range(order, self.max_order + 1) if self._free[size]), None)
        if found is None:
            raise OutOfBlocks(
                f"a run of {1 << order} blocks was asked for, but the largest free one of {self.num_blocks} has "
                f"{self.largest_free()}"
            )
        offset = self._free[found].pop(0)
        for size in range(found - 1, order - 1, -1):
            insort(self._free[size], offset + (1 << size))
        self._taken[offset] = order
        return list(range(offset + 1, offset + 1 + (1 << order)))

    def free(self, first_block: int) -> None:
        """Gives the chunk back that begins with this block. Raises DoubleFree if none does."""
        offset = first_block - 1
        order = self._taken.pop(offset, None)
        if order is None:
            raise DoubleFree(f"no chunk that was handed out begins with block {first_block}")
        while order < self.max_order:
            buddy = offset ^ (1 << order)
            neighbours = self._free[order]
            at = bisect_left(neighbours, buddy)
            if at == len(neighbours) or neighbours[at] != buddy:
                break
            del neighbours[at]
            offset, order = min(offset, buddy), order + 1
        insort(self._free[order], offset)

    def snapshot(self) -> dict[str, Any]:
        """As plain JSON-able data."""
        return {
            "num_blocks": self.num_blocks,
            "max_order": self.max_order,
            "taken": [[offset, order] for offset, order in self._taken.items()],
        }

    def restore(self, data: Any) -> None:
        """Takes over a snapshot's state, or raises SnapshotError and changes nothing."""
        try:
            if (data["num_blocks"], data["max_order"]) != (self.num_blocks, self.max_order):
                raise SnapshotError("snapshot of a buddy allocator of another size")
            candidate = BuddyAllocator(self.num_blocks, self.max_order)
            for offset, order in data["taken"]:
                candidate._take_at(int(offset), int(order))
            candidate.check_invariants()
        except (KeyError, TypeError, ValueError, IndexError, InvariantError) as error:
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(f"not a snapshot of a buddy allocator: {error!r}") from error
        vars(self).update(vars(candidate))

    def _take_at(self, offset: int, order: int) -> None:
        """Takes one chunk out of the free one that holds it."""
        for size in range(order, self.max_order + 1):
            start = offset & -(1 << size)
            if start in self._free[size]:
                self._free[size].remove(start)
                for smaller in range(size - 1, order - 1, -1):
                    half = 1 << smaller
                    insort(self._free[smaller], start if offset >= start + half else start + half)
                    start += half if offset >= start + half else 0
                self._taken[offset] = order
                return
        raise ValueError(f"the chunk at {offset} of order {order} is not free")

    def check_invariants(self) -> None:
        """Raises InvariantError unless chunks are aligned and cover every block once, and free buddies are joined."""
        cover = [0] * self.num_blocks
        chunks = [(offset, order) for order, offsets in enumerate(self._free) for offset in offsets]
        for offset, order in [*chunks, *self._taken.items()]:
            if offset % (1 << order) or offset + (1 << order) > self.num_blocks:
                raise InvariantError(f"a chunk of {1 << order} blocks begins at {offset} of {self.num_blocks}")
            for block in range(offset, offset + (1 << order)):
                cover[block] += 1
        if any(count != 1 for count in cover):
            raise InvariantError("a block is in two chunks or in none")
        free = set(chunks)
        for offset, order in chunks:
            if order < self.max_order and (offset ^ (1 << order), order) in free:
                raise InvariantError(f"the free chunks at {offset} and {offset ^ (1 << order)} were not joined")
