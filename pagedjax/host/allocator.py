"""Blocks on demand: the allocator that the paper is about (sections 4.2 to 4.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import Any, NamedTuple

from pagedjax.config import CacheConfig
from pagedjax.errors import InvariantError, OutOfBlocks, SnapshotError
from pagedjax.host.block_pool import BlockPool, counted_before
from pagedjax.host.block_table import BlockTable, Growth, check_tables, dump_tables, load_tables, num_blocks_for
from pagedjax.host.prefix import BlockHash, extend_chain, root_hash
from pagedjax.host.protocol import Admission, KVAllocator, KVUsage, Occupancy, PrefixStats
from pagedjax.host.swap_space import Moves, SwapSpace
from pagedjax.request import Sequence

__all__ = ["Admission", "KVAllocator", "KVUsage", "PagedAllocator", "PrefixStats"]


class _Share(NamedTuple):
    """Where the beginning of a sequence to be admitted comes from: one of the four, or nowhere."""

    cached: list[int]
    donor_id: int | None = None
    num_donated: int = 0
    leader_id: int | None = None


class _Kin(NamedTuple):
    """What a sequence has in common with those before it in its request: all tokens with the leader, or blocks."""

    leader_id: int | None = None
    donor_id: int | None = None
    num_blocks: int = 0


class PagedAllocator:
    """Blocks on demand: a sequence holds what its tokens need, rounded up to one block (paper sections 4.2, 4.3).

    Admission takes the blocks of every token known, so that a prompt computed in chunks never runs out halfway, and
    keeps the watermark free for the sequences that run already. Sequences of one request share what they have in
    common, and with prefix caching everybody shares equal prefixes in full blocks.

    Attributes:
        pool: the physical blocks.
        swap_space: those in the host's memory, and who is there.
        prefix_stats: of the prefix cache.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.caches_prefixes = config.enable_prefix_caching
        self.pool = BlockPool(config.num_blocks)
        self.swap_space = SwapSpace(config.num_host_blocks, config.block_size)
        self.prefix_stats = PrefixStats()
        self._config = config
        self._watermark = config.watermark_blocks
        self._tables: dict[int, BlockTable] = {}
        self._pins: dict[str, list[int]] = {}
        self._kinship: tuple[list[tuple[int, int]], list[_Kin]] = ([], [])

    # ------------------------------------------------------------------ admission

    def admit(self, sequences: List[Sequence], *, alone: bool) -> list[Admission]:
        """Takes the blocks of all tokens known and not shared and, unless `alone`, leaves the watermark free.

        Raises:
            OutOfBlocks: if there are too few.
        """
        shares, needed = self._find_shares(sequences)
        pool, kept = self.pool, 0 if alone else self._watermark
        if needed > pool.num_free - kept:
            keeping = f", and {kept} must stay so" if kept else ""
            raise OutOfBlocks(
                f"{needed} blocks were asked for, but {pool.num_free} of {pool.num_blocks} are free{keeping}"
            )
        for share in shares:  # before anything is allocated, which could evict them
            pool.share(share.cached)
        with counted_before():
            return [self._admit(seq, share) for seq, share in zip(sequences, shares, strict=True)]

    def _admit(self, sequence: Sequence, share: _Share) -> Admission:
        assert sequence.seq_id not in self._tables, f"sequence {sequence.seq_id} is admitted already"
        size, num_tokens, table = self.block_size, len(sequence.token_ids), BlockTable(self.pool, self.block_size)
        if share.leader_id is not None:
            table = self._tables[share.leader_id].fork()
        elif share.donor_id is not None:
            table = self._tables[share.donor_id].fork(share.num_donated)
        elif share.cached:
            table.blocks, table.num_tokens = list(share.cached), len(share.cached) * size
        num_found = table.num_tokens
        table.append(num_tokens - num_found)
        self._tables[sequence.seq_id] = table
        if share.leader_id is not None:
            return Admission(leader_id=share.leader_id)
        sequence.num_sealed = len(share.cached)
        num_cached = len(share.cached) * size
        # The last token is computed even if it is cached: its hidden state is what the next one is sampled from.
        num_shared = min(num_found, num_tokens - 1)
        if self._looks_up(sequence) and not sequence.num_preemptions:
            stats = self.prefix_stats
            stats.queries += 1
            stats.query_tokens += num_tokens
            stats.hits += num_cached > 0
            stats.hit_tokens += min(num_cached, num_shared)
        return Admission(num_shared, num_cached)

    def _find_shares(self, sequences: List[Sequence]) -> tuple[list[_Share], int]:
        """What each sequence need not take for itself, and the blocks that must be free for all of them."""
        shares: list[_Share] = []
        needed, revived = 0, set()
        for sequence, kin in zip(sequences, self._find_kinship(sequences), strict=True):
            share = self._find_share(sequence, kin)
            shares.append(share)
            if share.leader_id is None:
                num_shared = len(share.cached) + share.num_donated
                needed += num_blocks_for(len(sequence.token_ids), self.block_size) - num_shared
                revived.update(self.pool.unreferenced(share.cached))
        return shares, needed + len(revived)

    def _find_share(self, sequence: Sequence, kin: _Kin) -> _Share:
        if kin.leader_id is not None:
            return _Share([], leader_id=kin.leader_id)
        cached = self._find_cached(sequence)
        if kin.num_blocks > len(cached):
            return _Share([], kin.donor_id, kin.num_blocks)
        return _Share(cached)

    def _find_kinship(self, sequences: List[Sequence]) -> list[_Kin]:
        """Remembers the last answer: whoever waits for memory at the head of the queue is looked at in every step."""
        if len(sequences) == 1:
            return [_Kin()]
        known = [(sequence.seq_id, len(sequence.token_ids)) for sequence in sequences]
        if self._kinship[0] != known:
            self._kinship = known, _kinship(sequences, self.block_size)
        return self._kinship[1]

    def _looks_up(self, sequence: Sequence) -> bool:
        """Whether a sequence may use what is cached. Logprobs of a prompt need all of it computed."""
        wanted = self.caches_prefixes or bool(self._pins)
        return wanted and sequence.request.params.prompt_logprobs is None

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """The blocks that hold a sequence's tokens from the first one on, as far as they are cached."""
        if not self._looks_up(sequence):
            return []
        return self.pool.match(self._chain(sequence, len(sequence.token_ids) // self.block_size))

    def _chain(self, sequence: Sequence, num_blocks: int) -> list[BlockHash]:
        """The hashes of a sequence's full blocks, at least of the first `num_blocks`."""
        hashes = sequence.hashes
        if len(hashes) < num_blocks:
            root = hashes[-1] if hashes else root_hash(self._config.prefix_hash_seed, sequence.request.cache_salt)
            extend_chain(hashes, root, sequence.token_ids, num_blocks, self.block_size)
        return hashes

    # ------------------------------------------------------------------ running sequences

    def can_grow(self, sequences: List[Sequence]) -> bool:
        """Whether the pool has the blocks and copies that these need for one more token each."""
        needed, writers = 0, Counter[int]()
        for sequence in sequences:
            table = self._synced(sequence)
            if table.num_tokens >= table.capacity:
                needed += 1
            elif table.writes_to_shared:
                writers[table.blocks[-1]] += 1
        if writers:  # the last holder of a block writes in place
            needed += sum(min(count, self.pool.ref_count(block) - 1) for block, count in writers.items())
        return needed <= self.pool.num_free

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth:
        """Holds `num_tokens` tokens in all; gives the blocks gained, often none, and the copies. Raises OutOfBlocks."""
        table = self._synced(sequence)
        return table.append(max(0, num_tokens - table.num_tokens))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child` a table of its own over the same blocks."""
        self._home(parent)[child.seq_id] = self._synced(parent).fork()
        child.hashes = list(parent.hashes)
        child.num_sealed = parent.num_sealed

    def _synced(self, sequence: Sequence) -> BlockTable:
        """A sequence's table, told how far it is filled: most decodes need no growth and do not come by here."""
        table = self._home(sequence)[sequence.seq_id]
        table.num_tokens = max(table.num_tokens, sequence.num_computed)
        return table

    def _home(self, sequence: Sequence) -> dict[int, BlockTable]:
        """Where the sequence's table is: among those of the device's pool or those of the swap space."""
        return self._tables if sequence.seq_id in self._tables else self.swap_space.tables

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks of the sequence back, wherever they are."""
        self._home(sequence).pop(sequence.seq_id).free()
        sequence.num_sealed = 0

    def reset(self) -> None:
        """Forgets all blocks and whatever they hold, registered prefixes too; the counters go on."""
        stats, evictions = self.prefix_stats, self.pool.num_evictions
        vars(self).update(vars(PagedAllocator(self._config)))
        self.prefix_stats, self.pool.num_evictions = stats, evictions

    # ------------------------------------------------------------------ swapping

    def swap_out(self, sequences: List[Sequence]) -> Moves:
        """Gives the blocks of a group's sequences up, for as many in the swap space; shared ones once.

        Returns:
            (device block, host block): what must be copied before anything is written.

        Raises:
            OutOfBlocks: if the swap space has too few free ones.
        """
        tables = {seq.seq_id: self._synced(seq) for seq in sequences}
        moves = self.swap_space.take(tables, {seq.seq_id: seq.num_computed for seq in sequences}, self.pool)
        for seq_id in tables:
            del self._tables[seq_id]
        return moves

    def swap_in(self, sequences: List[Sequence], *, alone: bool) -> Moves:
        """Brings a group's sequences back; unless `alone`, leaves a block for each and the watermark free.

        Returns:
            (host block, device block): what must be copied before anything is read.

        Raises:
            OutOfBlocks: if there are too few free blocks.
        """
        num_kept = 0 if alone else self._watermark + len(sequences)
        computed = {seq.seq_id: seq.num_computed for seq in sequences}
        tables, moves = self.swap_space.give_back(list(computed), computed, self.pool, num_kept)
        self._tables |= tables
        for seq in sequences:
            num_sealed, seq.num_sealed = seq.num_sealed, 0
            if self.caches_prefixes:
                self._seal(seq, num_sealed)
        return moves

    def swapped_ids(self) -> list[int]:
        """Sequences that are swapped out, in the order in which they were."""
        return list(self.swap_space.tables)

    # ------------------------------------------------------------------ prefixes

    def seal(self, sequence: Sequence) -> None:
        """Lets others find a sequence's full blocks, of confirmed tokens, that are computed or planned to be."""
        self._seal(sequence, min(len(sequence.token_ids), sequence.num_computed) // self.block_size)

    def _seal(self, sequence: Sequence, num_blocks: int) -> None:
        hashes, blocks, pool = sequence.hashes, self._tables[sequence.seq_id].blocks, self.pool
        for index in range(sequence.num_sealed, num_blocks):
            if index >= len(hashes):
                self._chain(sequence, num_blocks)
            hashes[index] = pool.seal(blocks[index], hashes[index])
            if index + 1 < len(hashes):
                hashes[index + 1].parent = hashes[index]
        sequence.num_sealed = max(num_blocks, sequence.num_sealed)

    def pin(self, name: str, sequence: Sequence) -> None:
        """Keeps the full blocks of a sequence's prompt, which are computed or planned to be, for all to find."""
        assert name not in self._pins, f"prefix {name!r} is pinned already"
        num_blocks = sequence.prompt_len // self.block_size
        sequence.num_sealed = 0  # what it found when it was admitted may have been unpinned since
        self._seal(sequence, num_blocks)
        found = [self.pool.lookup(hash_) for hash_ in sequence.hashes[:num_blocks]]
        blocks = [block for block in found if block is not None]
        assert len(blocks) == num_blocks, "a sealed block cannot be found"
        for block in blocks:
            self.pool.incref(block)
        self._pins[name] = blocks

    def unpin(self, name: str) -> None:
        """Lets go of a prefix. Without prefix caching its blocks are then found by nobody new."""
        blocks = self._pins.pop(name)
        kept = {block for others in self._pins.values() for block in others}
        for block in reversed(blocks):
            if not self.caches_prefixes and block not in kept:
                self.pool.unseal(block)
            self.pool.decref(block)

    def pins(self) -> dict[str, list[int]]:
        """Blocks of each pinned prefix, in logical order."""
        return {name: list(blocks) for name, blocks in self._pins.items()}

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Raises BlocksInUse while a sequence or a registered prefix holds a block."""
        self.pool.reset_cache()

    # ------------------------------------------------------------------ looking inside

    def block_table(self, seq_id: int) -> list[int]:
        """Physical blocks of an admitted sequence, in logical order."""
        return list(self._tables[seq_id].blocks)

    def num_blocks_of(self, seq_id: int) -> int:
        """Blocks that an admitted sequence's table lists."""
        return len(self._tables[seq_id].blocks)

    def seq_ids(self) -> list[int]:
        """Sequences that hold blocks, in the order in which they got them."""
        return list(self._tables)

    @property
    def num_logical_blocks(self) -> int:
        """Blocks that the tables list, shared ones as often as they are listed."""
        return sum(len(table.blocks) for table in self._tables.values())

    @property
    def num_physical_blocks(self) -> int:
        """Blocks that the tables list, each once."""
        pinned = Counter(block for blocks in self._pins.values() for block in blocks)
        only_pinned = sum(self.pool.ref_count(block) == count for block, count in pinned.items())
        return self.pool.num_used - only_pinned

    def occupancy(self) -> Occupancy:
        """How the blocks are used."""
        pool, space = self.pool, self.swap_space
        return Occupancy(
            self.num_logical_blocks,
            self.num_physical_blocks,
            pool.num_used,
            pool.num_cached,
            pool.num_evictions,
            space.num_blocks,
            space.num_used,
        )

    def content(self, block: int) -> tuple[int, BlockHash | None]:
        """References to a block, and the hash by which it is found, if it can be. Raises UnknownBlock."""
        return self.pool.ref_count(block), self.pool.hash_of(block)

    def held_blocks(self) -> tuple[list[int], list[int]]:
        """Blocks of the pool, and of the swap space, whose content is needed or could be found."""
        host = self.swap_space.pool
        return self.pool.holding(), host.holding() if host else []

    def usage(self, num_computed: Mapping[int, int]) -> KVUsage:
        """What the slots are used for: waste is only the unfilled end of each last block."""
        size, reserved = self.block_size, 0
        unfilled: dict[int, int] = {}  # slots of a block; whoever shares it has filled as many
        for seq_id, table in self._tables.items():
            computed = num_computed[seq_id]
            blocks = table.blocks
            for index in range(computed // size, len(blocks)):
                if blocks[index] not in unfilled:
                    begin, end = max(computed, index * size), (index + 1) * size
                    unfilled[blocks[index]] = end - begin
                    reserved += max(0, min(table.num_tokens, end) - begin)
        empty = sum(unfilled.values())
        states = self.pool.num_used * size - empty
        return KVUsage(states, reserved, empty - reserved, 0, self.pool.num_free * size)

    # ------------------------------------------------------------------ snapshots and checks

    def snapshot(self) -> dict[str, Any]:
        """Pool, tables and pinned prefixes as plain JSON-able data."""
        stats = self.prefix_stats
        return {
            "kind": "paged",
            "block_size": self.block_size,
            "pool": self.pool.snapshot(),
            "tables": dump_tables(self._tables),
            "swap_space": self.swap_space.snapshot(),
            "pins": [[name, list(blocks)] for name, blocks in self._pins.items()],
            "prefix_stats": [stats.queries, stats.query_tokens, stats.hits, stats.hit_tokens],
        }

    def restore(self, data: Any) -> None:
        """Takes over the state of a snapshot of the same block size and number of blocks.

        Raises:
            SnapshotError: if it is of another shape or makes no sense; nothing is changed then.
        """
        try:
            given = data["kind"], data["block_size"]
            if given != ("paged", self.block_size):
                raise SnapshotError(f"snapshot of {given}, but this allocator is {('paged', self.block_size)}")
            candidate = PagedAllocator(self._config)
            candidate.pool.restore(data["pool"])
            candidate._tables = load_tables(data["tables"], candidate.pool, self.block_size)
            candidate.swap_space.load(data["swap_space"])
            candidate._pins = {str(name): [int(block) for block in blocks] for name, blocks in data["pins"]}
            candidate.prefix_stats = PrefixStats(*(int(count) for count in data["prefix_stats"]))
            candidate.check_invariants()
        except SnapshotError:
            raise
        except (KeyError, TypeError, ValueError, InvariantError) as error:
            raise SnapshotError(f"not a snapshot of a paged allocator: {error!r}") from error
        vars(self).update(vars(candidate))

    def check_invariants(self) -> None:
        """Raises InvariantError unless every reference is a table's or a pin's, and tables just hold their tokens."""
        self.swap_space.check_invariants()
        for name, blocks in self._pins.items():
            for block in blocks:
                if self.pool.hash_of(block) is None:
                    raise InvariantError(f"prefix {name!r} pins block {block}, which is not sealed")
        check_tables(self._tables, self.pool, self.block_size, [b for blocks in self._pins.values() for b in blocks])


def _kinship(sequences: List[Sequence], size: int) -> list[_Kin]:
    """Walks down a tree of full blocks, in which each sequence adds what those before it do not have."""
    leaders: dict[tuple[int, ...], int] = {}
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}  # a node and the tokens of one block -> the next node
    owners = [-1]  # of each node: the sequence that added it
    found = []
    for sequence in sequences:
        tokens = tuple(sequence.token_ids)
        leader_id = leaders.setdefault(tokens, sequence.seq_id)
        if leader_id != sequence.seq_id:
            found.append(_Kin(leader_id))
            continue
        node, donor_id, common = 0, None, 0
        for index in range(len(tokens) // size):
            key = node, tokens[index * size : (index + 1) * size]
            node = nodes.setdefault(key, len(owners))
            if node == len(owners):
                owners.append(sequence.seq_id)
            elif (index + 1) * size < len(tokens):  # one token at least is left to compute
                donor_id, common = owners[node], index + 1
        found.append(_Kin(None, donor_id, common))
    return found
