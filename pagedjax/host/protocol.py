"""How sequences get their KV memory: what every scheduler asks of every allocator."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pagedjax.host.block_table import Growth
from pagedjax.host.prefix import BlockHash
from pagedjax.host.swap_space import Moves
from pagedjax.request import Sequence


class KVUsage(NamedTuple):
    """What the slots of a pool are used for (paper Fig. 2). Slots, that is tokens; their sum is the pool's size.

    A slot that several sequences share counts once.

    Attributes:
        token_states: hold the K and V of a token.
        reserved: wait for a token that is already known or will certainly come.
        internal_fragmentation: taken by a sequence, but held for tokens that may never come.
        external_fragmentation: free, but in no run that an allocation could use; 0 with paging.
        free: could be allocated, cached blocks that nobody refers to included.
    """

    token_states: int
    reserved: int
    internal_fragmentation: int
    external_fragmentation: int
    free: int


class Occupancy(NamedTuple):
    """How the blocks are used, now.

    Attributes:
        logical: blocks that the running sequences' tables list, a shared one as often as it is listed.
        physical: the same, each counted once.
        used: blocks of the pool that somebody holds, registered prefixes included.
        cached: blocks that nobody holds, but whose content can still be found.
        num_evictions: cached blocks whose content was given up for others, so far.
        host: blocks of the swap space.
        host_used: of these, those that a swapped sequence holds.
    """

    logical: int
    physical: int
    used: int
    cached: int
    num_evictions: int
    host: int
    host_used: int


@dataclass(slots=True)
class PrefixStats:
    """Of the prefix cache, since the allocator was made.

    Attributes:
        queries: sequences admitted that looked for their prefix; not again after a preemption.
        query_tokens: tokens of those.
        hits: sequences that found at least one block.
        hit_tokens: tokens that were not computed, because they were found.
    """

    queries: int = 0
    query_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0


class Admission(NamedTuple):
    """What an admitted sequence found.

    Attributes:
        num_shared: tokens at its beginning whose K and V need not be computed for it: another sequence of the same
            request computes them, or they are cached.
        num_cached: tokens of the blocks found in the prefix cache. As many as `num_shared`, unless that would leave
            nothing to compute: then one more.
        leader_id: of a sequence of the same request with the very same tokens, which computes all of them; or None.
    """

    num_shared: int = 0
    num_cached: int = 0
    leader_id: int | None = None


@runtime_checkable
class KVAllocator(Protocol):
    """KV memory for sequences, in blocks. Each operation is atomic: one that raises changes nothing."""

    prefix_stats: PrefixStats

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the pool."""
        ...

    @property
    def caches_prefixes(self) -> bool:
        """Whether full blocks should be sealed as they are computed."""
        ...

    def admit(self, sequences: List[Sequence], *, alone: bool) -> list[Admission]:
        """Takes memory for all tokens known of the sequences of one request.

        Args:
            sequences: those that have not ended.
            alone: nothing else runs, so nothing need be kept free.

        Raises:
            OutOfBlocks: if there is too little.
        """
        ...

    def can_grow(self, sequences: List[Sequence]) -> bool:
        """Whether each of these has, or can get, room for the token after those computed."""
        ...

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth:
        """Makes room for `num_tokens` tokens in all, those after the computed ones to be written.

        Raises:
            OutOfBlocks: if there is too little.
        """
        ...

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child` what `parent` holds, shared where the allocator can share."""
        ...

    def seal(self, sequence: Sequence) -> None:
        """Lets others find the full blocks that a sequence has computed, or that are planned to be."""
        ...

    def pin(self, name: str, sequence: Sequence) -> None:
        """Keeps the full blocks of a sequence's prompt until `unpin`, to be found by every request."""
        ...

    def unpin(self, name: str) -> None:
        """Lets go of what `pin` kept."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets what is cached. Raises BlocksInUse while anybody holds memory."""
        ...

    def free(self, sequence: Sequence) -> None:
        """Gives back all memory of an admitted sequence, swapped out or not."""
        ...

    def swap_out(self, sequences: List[Sequence]) -> Moves:
        """Moves the memory of a request's sequences to the host.

        Returns:
            (device block, host block) to be copied before anything is written.

        Raises:
            OutOfBlocks: if the swap space has too little, or there is none.
        """
        ...

    def swap_in(self, sequences: List[Sequence], *, alone: bool) -> Moves:
        """Moves it back, for all of a request's sequences that have not ended.

        Args:
            alone: nothing else runs, so nothing need be kept free.

        Returns:
            (host block, device block) to be copied before anything is read.

        Raises:
            OutOfBlocks: if there is too little.
        """
        ...

    def reset(self) -> None:
        """Forgets who holds what, and all contents."""
        ...

    def block_table(self, seq_id: int) -> list[int]:
        """Physical blocks of an admitted sequence, in logical order."""
        ...

    def num_blocks_of(self, seq_id: int) -> int:
        """Length of that table."""
        ...

    def seq_ids(self) -> list[int]:
        """Sequences that hold memory on the device, in the order in which they got it."""
        ...

    def swapped_ids(self) -> list[int]:
        """Sequences that are swapped out, in the order in which they were."""
        ...

    def pins(self) -> dict[str, list[int]]:
        """Blocks of each pinned prefix, in logical order."""
        ...

    def occupancy(self) -> Occupancy:
        """How the blocks are used."""
        ...

    def content(self, block: int) -> tuple[int, BlockHash | None]:
        """References to a block of the pool, and the hash by which its content is found, if it can be."""
        ...

    def held_blocks(self) -> tuple[list[int], list[int]]:
        """Blocks of the pool, and of the swap space, whose content is needed or could be found."""
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
