"""Blocks in the host's memory, for sequences whose blocks of the device's pool others need (paper section 4.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedjax.errors import InvariantError, OutOfBlocks, SnapshotError
from pagedjax.host.block_pool import BlockPool, counted_before
from pagedjax.host.block_table import Tables, check_tables, dump_tables, load_tables, num_blocks_for

Moves = list[tuple[int, int]]
"""(from, to): a block of one pool, and the block of the other that its content goes to."""


class SwapSpace:
    """A second pool, and the tables of the sequences that are swapped out, which list its blocks.

    What was shared stays shared, and is moved once. Content with a hash is looked for in the pool that it would be
    moved to, and not moved if it is there. Atomic like all else: what raises changes nothing.

    Args:
        num_blocks: blocks of the host's memory; with none, nothing can be swapped out.

    Attributes:
        pool: the blocks; None if there are none.
        tables: of the sequences that are swapped out.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks) if num_blocks else None
        self.tables: Tables = {}
        self._block_size = block_size

    @property
    def num_used(self) -> int:
        """Blocks that sequences refer to."""
        return self.pool.num_used if self.pool else 0

    def take(self, tables: Tables, num_computed: Mapping[int, int], device: BlockPool) -> Moves:
        """Takes over the tables of a group's sequences, and gives up their blocks in the device's pool.

        Args:
            num_computed: tokens of each sequence that have K and V: behind those there is nothing worth moving.

        Returns:
            (device block, host block) to be copied before anything is written to the device's pool.

        Raises:
            OutOfBlocks: if there are too few free blocks.
        """
        if self.pool is None:
            raise OutOfBlocks("there is no swap space")
        moved, moves = self._move(tables, num_computed, device, self.pool, 0)
        self.tables |= moved
        return moves

    def give_back(
        self, seq_ids: list[int], num_computed: Mapping[int, int], device: BlockPool, num_kept: int
    ) -> tuple[Tables, Moves]:
        """The reverse of `take`.

        Args:
            num_kept: blocks of the device's pool that must stay free.

        Returns:
            The tables, and (host block, device block) to be copied before they are read.

        Raises:
            OutOfBlocks: if the device's pool has too few free blocks.
        """
        assert self.pool is not None, "nothing was swapped out"
        tables = {seq_id: self.tables[seq_id] for seq_id in seq_ids}
        back, moves = self._move(tables, num_computed, self.pool, device, num_kept)
        for seq_id in seq_ids:
            del self.tables[seq_id]
        return back, moves

    def _move(
        self, tables: Tables, num_computed: Mapping[int, int], source: BlockPool, target: BlockPool, num_kept: int
    ) -> tuple[Tables, Moves]:
        """Tables over blocks of `target` in the place of those over blocks of `source`, which are freed."""
        blocks = list(dict.fromkeys(block for table in tables.values() for block in table.blocks))
        hashes = {block: hash_ for block in blocks if (hash_ := source.hash_of(block)) is not None}
        found = {block: twin for block, hash_ in hashes.items() if (twin := target.lookup(hash_)) is not None}
        new = [block for block in blocks if block not in found]
        needed = len(new) + len(target.unreferenced(list(found.values())))
        if needed + num_kept > target.num_free:
            keeping = f", and {num_kept} must stay so" if num_kept else ""
            raise OutOfBlocks(
                f"{needed} blocks were asked for, but {target.num_free} of {target.num_blocks} are free{keeping}"
            )
        target.share(list(found.values()))  # before anything is allocated, which could evict them
        with counted_before():
            twins = found | dict(zip(new, target.allocate(len(new)), strict=True))
        filled = {
            block
            for seq_id, table in tables.items()
            for block in table.blocks[: num_blocks_for(num_computed[seq_id], self._block_size)]
        }
        for block in new:
            if block in hashes and block in filled:
                target.seal(twins[block], hashes[block])
        moved, listed = {}, set()
        for seq_id, table in tables.items():
            moved[seq_id] = table.moved_to(target, [twins[block] for block in table.blocks])
            target.share([twin for twin in moved[seq_id].blocks if twin in listed])  # all but the first to list it
            listed.update(moved[seq_id].blocks)
            table.free()
        return moved, [(block, twins[block]) for block in new if block in filled]

    # ------------------------------------------------------------------ snapshots and checks

    def snapshot(self) -> dict[str, Any]:
        """Pool and tables as plain JSON-able data."""
        return {"pool": self.pool and self.pool.snapshot(), "tables": dump_tables(self.tables)}

    def load(self, data: Any) -> None:
        """Takes over a snapshot; not atomic: the allocator that it belongs to is.

        Raises:
            SnapshotError: if it is of another size.
        """
        given = data["pool"]
        if (given is None) != (self.pool is None):
            raise SnapshotError(
                f"snapshot {'without' if given is None else 'with'} a swap space, unlike this allocator"
            )
        if self.pool is not None:
            self.pool.restore(given)
            self.tables = load_tables(data["tables"], self.pool, self._block_size)
        elif data["tables"]:
            raise SnapshotError("a sequence is swapped out, but there is no swap space")

    def check_invariants(self) -> None:
        """Raises InvariantError unless every reference is a table's."""
        if self.pool is not None:
            check_tables(self.tables, self.pool, self._block_size)
        elif self.tables:
            raise InvariantError("a sequence is swapped out, but there is no swap space")
