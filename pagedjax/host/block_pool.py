"""Physical KV blocks: who is free, who is used and by how many, and which full ones can be found by their content.

A block is in one of three states: free, used (it has references), or cached: nobody refers to it, but it is sealed, so
its content is kept until the block is needed (paper section 4.3; sharing, section 4.4).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pagedjax.config import require
from pagedjax.errors import BlocksInUse, DoubleFree, InvariantError, OutOfBlocks, SnapshotError, UnknownBlock
from pagedjax.host.prefix import BlockHash, dump_hashes, load_hashes

NULL_BLOCK = 0
"""Never handed out: padding reads and writes land there."""

_NEVER_USED = -1


@contextmanager
def counted_before() -> Iterator[None]:
    """For allocations whose blocks were counted and are there: running out of them is a bug, not a full pool."""
    try:
        yield
    except OutOfBlocks as error:
        raise InvariantError(f"the free blocks were counted, and still: {error}") from error


class BlockPool:
    """Hands out the blocks 1 to `num_blocks`, the one freed last first, and counts the references to each.

    Only when no block is free are cached ones evicted, least recently used first.

    Args:
        num_blocks: usable blocks, at least 1; the device's arrays hold one more, the null block.

    Attributes:
        num_evictions: cached blocks that were handed out anew, so that their content was lost.

    Raises:
        ConfigError: if the pool would have no block.
    """

    def __init__(self, num_blocks: int) -> None:
        require(isinstance(num_blocks, int) and num_blocks >= 1, "num_blocks", num_blocks, "an integer of at least 1")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._free = list(range(num_blocks, 0, -1))  # a stack; its top is at the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._ref_counts = [_NEVER_USED] * (num_blocks + 1)
        self._hashes: dict[int, BlockHash] = {}  # of sealed blocks
        self._by_hash: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, the cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody refers to, but whose content could still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """References to a block, 0 if it is free or cached.

        Raises:
            UnknownBlock: if the pool has no such block.
        """
        return max(0, self._count(block))

    def allocate(self, n: int = 1) -> list[int]:
        """Takes `n` blocks, each with one reference, in the order in which a table lists them.

        Raises:
            OutOfBlocks: if fewer can be had; nothing is taken then.
        """
        free = self._free
        if n == 1 and free:  # a decode's, and so most calls by far
            block = free.pop()
            self._ref_counts[block] = 1
            return [block]
        if n < 0:
            raise ValueError(f"n={n} is not allowed: n must be at least 0 (blocks)")
        missing = n - len(free)
        if missing > len(self._cached):
            raise OutOfBlocks(f"{n} blocks were asked for, but {self.num_free} of {self.num_blocks} are free")
        blocks = free[: -n - 1 : -1]
        del free[len(free) - len(blocks) :]
        if missing > 0:
            blocks += [self._evict() for _ in range(missing)]
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def incref(self, block: int) -> None:
        """Adds a reference to a block that is used or cached.

        Raises:
            UnknownBlock: if the pool never handed it out.
            DoubleFree: if it is free again.
        """
        if self._count(block) == 0 and block in self._cached:
            del self._cached[block]
        else:
            self._require_used(block)
        self._ref_counts[block] += 1

    def share(self, blocks: list[int]) -> None:
        """`incref` for each of them, quickly; atomic only if all are used or cached, as those that `match` gave are."""
        ref_counts = self._ref_counts
        for block in blocks:
            if ref_counts[block] > 0:
                ref_counts[block] += 1
            else:
                self.incref(block)

    def release(self, blocks: Iterable[int]) -> None:
        """`decref` for each of them, quickly."""
        ref_counts = self._ref_counts
        for block in blocks:
            if ref_counts[block] > 1:
                ref_counts[block] -= 1
            else:
                self.decref(block)

    def decref(self, block: int) -> bool:
        """Drops a reference; says whether it was the last one, after which the block is free, or cached if sealed.

        Raises:
            UnknownBlock: if the pool never handed it out.
            DoubleFree: if nobody refers to it.
        """
        self._require_used(block)
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return False
        if block in self._hashes:
            self._cached[block] = None
        else:
            self._free.append(block)
        return True

    # ------------------------------------------------------------------ content

    def seal(self, block: int, hash: BlockHash) -> BlockHash:
        """Lets a full block in use be found by its hash; from then on nobody writes to it.

        Nothing changes if another block of the same content is there already: one is enough.

        Returns:
            The hash by which the content is known: equal to the one given, maybe an older object.

        Raises:
            UnknownBlock, DoubleFree: if the block is not in use.
            ValueError: if it is sealed with another hash.
        """
        self._require_used(block)
        found = self._by_hash.get(hash)
        if found is not None:
            return self._hashes[found]
        if block in self._hashes:
            raise ValueError(f"block {block} is sealed with {self._hashes[block]!r}, not {hash!r}")
        self._hashes[block] = hash
        self._by_hash[hash] = block
        return hash

    def lookup(self, hash: BlockHash) -> int | None:
        """The block that holds this content; use it by taking a reference."""
        return self._by_hash.get(hash)

    def match(self, chain: list[BlockHash]) -> list[int]:
        """The blocks that hold a sequence's beginning, as far as they are there, given the hashes of all its blocks.

        Puts the hashes by which they are known into the chain: the next look at it need not compare far back.
        """
        find, known, blocks = self._by_hash.get, self._hashes, []
        for index, hash_ in enumerate(chain):
            block = find(hash_)
            if block is None:
                break
            blocks.append(block)
            same = known[block]
            if same is not hash_:
                chain[index] = same
                if index + 1 < len(chain):
                    chain[index + 1].parent = same
        return blocks

    def unreferenced(self, blocks: list[int]) -> list[int]:
        """Those of the blocks that nobody refers to."""
        ref_counts = self._ref_counts
        return [block for block in blocks if ref_counts[block] <= 0]

    def hash_of(self, block: int) -> BlockHash | None:
        """A sealed block's hash, None for others. Raises UnknownBlock."""
        self._count(block)
        return self._hashes.get(block)

    def holding(self) -> list[int]:
        """Blocks whose content is needed, or could be found: used or cached."""
        return [
            block for block in range(1, self.num_blocks + 1) if self._ref_counts[block] > 0 or block in self._cached
        ]

    def unseal(self, block: int) -> None:
        """Lets a block no longer be found; a cached one becomes free. Raises UnknownBlock."""
        self._count(block)
        hash_ = self._hashes.pop(block, None)
        if hash_ is not None:
            del self._by_hash[hash_]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def reset_cache(self) -> None:
        """Forgets the content of all blocks.

        Raises:
            BlocksInUse: if anybody refers to a block; nothing is changed then.
        """
        if self.num_used:
            raise BlocksInUse(f"the prefix cache cannot be reset while {self.num_used} blocks are in use")
        self._free += reversed(self._cached)
        self._cached.clear()
        self._hashes.clear()
        self._by_hash.clear()

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._by_hash[self._hashes.pop(block)]
        self.num_evictions += 1
        return block

    # ------------------------------------------------------------------ snapshots and checks

    def snapshot(self) -> dict[str, Any]:
        """The pool as plain JSON-able data."""
        hashes, numbers = dump_hashes(self._hashes.values())
        return {
            "num_blocks": self.num_blocks,
            "free": list(self._free),
            "cached": list(self._cached),
            "ref_counts": list(self._ref_counts),
            "hashes": hashes,
            "sealed": [[block, number] for block, number in zip(self._hashes, numbers, strict=True)],
            "num_evictions": self.num_evictions,
        }

    def restore(self, data: Any) -> None:
        """Takes over the state of a snapshot of a pool of the same size.

        Raises:
            SnapshotError: if it is of another size or makes no sense; nothing is changed then.
        """
        try:
            if data["num_blocks"] != self.num_blocks:
                raise SnapshotError(f"snapshot of {data['num_blocks']} blocks, but this pool has {self.num_blocks}")
            candidate = BlockPool(self.num_blocks)
            candidate._load(data)
            candidate.check_invariants()
        except SnapshotError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, InvariantError) as error:
            raise SnapshotError(f"not a snapshot of a block pool: {error!r}") from error
        vars(self).update(vars(candidate))

    def _load(self, data: Any) -> None:
        self._free = [int(block) for block in data["free"]]
        self._cached = OrderedDict.fromkeys(int(block) for block in data["cached"])
        self._ref_counts = [int(count) for count in data["ref_counts"]]
        self.num_evictions = int(data["num_evictions"])
        hashes = load_hashes(data["hashes"])
        for block, number in data["sealed"]:
            if not 0 <= number < len(hashes):
                raise ValueError(f"block {block} has hash {number} of {len(hashes)}")
            self._hashes[int(block)] = hashes[number]
        self._by_hash = {hash_: block for block, hash_ in self._hashes.items()}

    def check_invariants(self) -> None:
        """Raises InvariantError if a block is in two states or in none, or the index of hashes is not one."""
        free, blocks = set(self._free), set(range(1, self.num_blocks + 1))
        if len(free) != len(self._free):
            raise InvariantError("a block is in the free list twice")
        if len(self._ref_counts) != self.num_blocks + 1 or not free | self._cached.keys() <= blocks:
            raise InvariantError(f"blocks outside 1 to {self.num_blocks}")
        if self._ref_counts[NULL_BLOCK] != _NEVER_USED:
            raise InvariantError("the null block was handed out")
        for block in blocks:
            count, states = self._ref_counts[block], (block in free) + (block in self._cached)
            if count < _NEVER_USED or states + (count > 0) != 1:
                raise InvariantError(
                    f"block {block} has {count} references, free: {block in free}, cached: {block in self._cached}"
                )
        if not self._hashes.keys() <= blocks - free or not self._cached.keys() <= self._hashes.keys():
            raise InvariantError("a free block is sealed, or a cached one is not")
        found = {hash_: block for block, hash_ in self._hashes.items()}
        if self._by_hash != found or len(found) != len(self._hashes):
            raise InvariantError("the index of hashes does not name the sealed blocks")

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
