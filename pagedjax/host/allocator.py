"""How sequences get their KV memory: the protocol every scheduler works with, and the paged allocator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pagedjax.config import CacheConfig
from pagedjax.errors import InvariantError, SnapshotError
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.block_table import BlockTable, num_blocks_for
from pagedjax.request import Sequence


class KVUsage(NamedTuple):
    """What the slots of a pool are used for (paper Fig. 2). Slots, that is tokens; their sum is the pool's size.

    Attributes:
        token_states: hold the K and V of a token.
        reserved: wait for a token that is already known or will certainly come.
        internal_fragmentation: taken by a sequence, but held for tokens that may never come.
        external_fragmentation: free, but in no run that an allocation could use; 0 with paging.
        free: could be allocated.
    """

    token_states: int
    reserved: int
    internal_fragmentation: int
    external_fragmentation: int
    free: int


@runtime_checkable
class KVAllocator(Protocol):
    """KV memory for sequences, in blocks. Each operation is atomic: one that raises changes nothing."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the pool."""
        ...

    def can_admit(self, sequence: Sequence, *, alone: bool) -> bool:
        """Whether `admit` has the memory now. `alone`: nothing else runs, so nothing need be kept free."""
        ...

    def admit(self, sequence: Sequence) -> list[int]:
        """Takes memory for all tokens known of a sequence; returns its block table.

        Raises:
            OutOfBlocks: if there is too little.
        """
        ...

    def grow(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Makes room for `num_tokens` tokens in all; returns the blocks that the table gained at its end.

        Raises:
            OutOfBlocks: if there is too little.
        """
        ...

    def free(self, sequence: Sequence) -> None:
        """Gives back all memory of an admitted sequence."""
        ...

    def block_table(self, seq_id: int) -> list[int]:
        """Physical blocks of an admitted sequence, in logical order."""
        ...

    def seq_ids(self) -> list[int]:
        """Sequences that hold memory, in the order in which they were admitted."""
        ...

    def usage(self, num_computed: Mapping[int, int]) -> KVUsage:
        """What the pool's slots are used for. `num_computed`: {seq_id: tokens with K and V} of all admitted."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """The allocator as plain JSON-able data."""
        ...

    def restore(self, data: Any) -> None:
        """Takes over a snapshot's state, or raises SnapshotError and changes nothing."""
        ...

    def check_invariants(self) -> None:
        """Raises InvariantError, saying what is broken."""
        ...


class PagedAllocator:
    """Blocks on demand: a sequence holds what its tokens need, rounded up to one block (paper sections 4.2, 4.3).

    Admission takes the blocks of every token known, so that a prompt computed in chunks never runs out halfway, and
    keeps the watermark free for the sequences that run already.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.pool = BlockPool(config.num_blocks)
        self._watermark = config.watermark_blocks
        self._tables: dict[int, BlockTable] = {}

    def can_admit(self, sequence: Sequence, *, alone: bool) -> bool:
        """Whether the free blocks hold all known tokens and, unless it runs `alone`, leave the watermark free."""
        needed = num_blocks_for(len(sequence.token_ids), self.block_size)
        return self.pool.num_free - needed >= (0 if alone else self._watermark)

    def admit(self, sequence: Sequence) -> list[int]:
        """Takes the blocks of all known tokens; returns them in logical order. Raises OutOfBlocks."""
        assert sequence.seq_id not in self._tables, f"sequence {sequence.seq_id} is admitted already"
        table = BlockTable(self.pool, self.block_size)
        table.append(len(sequence.token_ids))
        self._tables[sequence.seq_id] = table
        return list(table.blocks)

    def grow(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Holds `num_tokens` tokens in all; returns the blocks gained, often none. Raises OutOfBlocks."""
        table = self._tables[sequence.seq_id]
        return table.append(max(0, num_tokens - table.num_tokens))

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks of the sequence back."""
        self._tables.pop(sequence.seq_id).free()

    def block_table(self, seq_id: int) -> list[int]:
        """Physical blocks of an admitted sequence, in logical order."""
        return list(self._tables[seq_id].blocks)

    def seq_ids(self) -> list[int]:
        """Sequences that hold blocks, in order of admission."""
        return list(self._tables)

    def usage(self, num_computed: Mapping[int, int]) -> KVUsage:
        """What the slots are used for: waste is only the unfilled end of each last block."""
        states = reserved = taken = 0
        for seq_id, table in self._tables.items():
            computed = num_computed[seq_id]
            states += computed
            reserved += max(0, table.num_tokens - computed)
            taken += table.capacity
        free = self.pool.num_free * self.block_size
        return KVUsage(states, reserved, taken - states - reserved, 0, free)

    def snapshot(self) -> dict[str, Any]:
        """Pool and tables as plain JSON-able data."""
        tables = [[seq_id, table.num_tokens, list(table.blocks)] for seq_id, table in self._tables.items()]
        return {"kind": "paged", "block_size": self.block_size, "pool": self.pool.snapshot(), "tables": tables}

    def restore(self, data: Any) -> None:
        """Takes over the state of a snapshot of the same block size and number of blocks.

        Raises:
            SnapshotError: if it is of another shape or makes no sense; nothing is changed then.
        """
        try:
            given = data["kind"], data["block_size"]
            if given != ("paged", self.block_size):
                raise SnapshotError(f"snapshot of {given}, but this allocator is {('paged', self.block_size)}")
            candidate = PagedAllocator(CacheConfig(self.block_size, self.num_blocks))
            candidate.pool.restore(data["pool"])
            for seq_id, num_tokens, blocks in data["tables"]:
                table = candidate._tables[int(seq_id)] = BlockTable(candidate.pool, self.block_size)
                table.blocks, table.num_tokens = [int(block) for block in blocks], int(num_tokens)
            candidate.check_invariants()
        except SnapshotError:
            raise
        except (KeyError, TypeError, ValueError, InvariantError) as error:
            raise SnapshotError(f"not a snapshot of a paged allocator: {error!r}") from error
        self.pool, self._tables = candidate.pool, candidate._tables

    def check_invariants(self) -> None:
        """Raises InvariantError unless every reference is a table's and every table just holds its tokens."""
        self.pool.check_invariants()
        references = [0] * (self.num_blocks + 1)
        for seq_id, table in self._tables.items():
            if table.num_tokens < 1 or num_blocks_for(table.num_tokens, self.block_size) != len(table.blocks):
                raise InvariantError(f"sequence {seq_id}: {len(table.blocks)} blocks for {table.num_tokens} tokens")
            for block in table.blocks:
                if not self.pool.ref_count(block):
                    raise InvariantError(f"sequence {seq_id} holds block {block}, which is free")
                references[block] += 1
        for block in range(1, self.num_blocks + 1):
            found, counted = references[block], self.pool.ref_count(block)
            if found != counted:
                raise InvariantError(f"block {block} is in {found} tables, but counts {counted} references")
