"""Contiguous KV memory, reserved whole when a request is admitted: what serving systems did before paging.

The paper's stand-in for Orca (section 6.1): each sequence gets one chunk of a buddy allocator, for its prompt and an
estimate of its output. A chunk is a block table with consecutive entries, so scheduler, model and kernels are the same.
Nothing is shared, and nobody is preempted, since nobody outgrows what was reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from itertools import repeat
from typing import Any, NamedTuple

from pagedjax.baselines.buddy import BuddyAllocator
from pagedjax.config import CacheConfig
from pagedjax.errors import InvariantError, OutOfBlocks, SnapshotError
from pagedjax.host.block_table import Growth, num_blocks_for
from pagedjax.host.prefix import BlockHash
from pagedjax.host.protocol import Admission, KVUsage, Occupancy, PrefixStats
from pagedjax.host.swap_space import Moves
from pagedjax.request import Request, Sequence

Estimate = Callable[[Request, int], int]
"""Output tokens to reserve memory for, given the request and the tokens that a sequence may reach."""


class _Chunk(NamedTuple):
    """Consecutive blocks, the tokens that they were reserved for, and those that their owner may reach."""

    first_block: int
    num_blocks: int
    tokens: int
    end: int
    request_id: str


class ContiguousAllocator:
    """One chunk of consecutive blocks for each sequence, from its admission to its end.

    Args:
        config: block size and number of blocks.
        max_model_len: tokens that a sequence may reach, and a chunk holds at most.
        estimate: of the output's length.
    """

    caches_prefixes = False

    def __init__(self, config: CacheConfig, max_model_len: int, estimate: Estimate) -> None:
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.prefix_stats = PrefixStats()  # of a cache that is not there
        self._config = config
        self._max_model_len = max_model_len
        self._estimate = estimate
        max_order = max(0, num_blocks_for(max_model_len, self.block_size) - 1).bit_length()
        self.buddies = BuddyAllocator(config.num_blocks, max_order)
        self._chunks: dict[int, _Chunk] = {}  # by sequence
        self._spare: dict[str, list[_Chunk]] = {}  # of running beam searches, for beams to come
        self._copies: dict[int, list[tuple[int, int]]] = {}  # by forked sequence: what its chunk is to begin with
        self._refused = 0  # order of the chunk that could not be had last

    # ------------------------------------------------------------------ coming and going

    def admit(self, sequences: List[Sequence], *, alone: bool) -> list[Admission]:
        """Takes a chunk for each sequence, and for each beam that may come.

        Raises:
            OutOfBlocks: if one of them cannot be had; none is taken then.
        """
        request = sequences[0].request
        num_spare = request.width - len(sequences) if request.beam else 0
        chunks: list[_Chunk] = []
        try:
            for sequence in (*sequences, *repeat(sequences[0], num_spare)):
                chunks.append(self._take(sequence))
        except OutOfBlocks:
            for chunk in chunks:
                self.buddies.free(chunk.first_block)
            raise
        self._refused = 0
        self._chunks |= {seq.seq_id: chunk for seq, chunk in zip(sequences, chunks, strict=False)}
        if request.beam:
            self._spare[request.request_id] = chunks[len(sequences) :]
        return [Admission() for _ in sequences]

    def _take(self, sequence: Sequence) -> _Chunk:
        """A chunk for prompt and estimated output: at least for what there is, at most for what there may be."""
        request = sequence.request
        wanted = len(request.prompt_token_ids) + self._estimate(request, self._max_model_len)
        tokens = min(max(wanted, len(sequence.token_ids) + 1), self._max_model_len)
        self._refused = self.buddies.order_for(num_blocks_for(tokens, self.block_size))
        blocks = self.buddies.allocate(self._refused)
        return _Chunk(blocks[0], len(blocks), tokens, request.max_len, request.request_id)

    def can_grow(self, sequences: List[Sequence]) -> bool:
        """Whether what is reserved is enough, as it is unless an estimate was too low."""
        size = self.block_size
        return all(seq.num_computed < self._chunks[seq.seq_id].num_blocks * size for seq in sequences)

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth:
        """Of a fork, what is to be copied into its chunk; else nothing to do.

        Raises:
            OutOfBlocks: if a sequence outgrows its chunk.
        """
        chunk = self._chunks[sequence.seq_id]
        if num_tokens > chunk.num_blocks * self.block_size:
            raise OutOfBlocks(f"{num_tokens} tokens do not fit into the {chunk.num_blocks} blocks that were reserved")
        copies = self._copies.pop(sequence.seq_id, [])
        return Growth(0, [target for _, target in copies], copies)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child` a chunk of its own, into which the parent's content is copied before anything is written."""
        spare = self._spare.get(parent.request.request_id)
        chunk = spare.pop() if spare else self._take(child)
        self._chunks[child.seq_id] = chunk
        source = self._chunks[parent.seq_id].first_block
        origin = dict((target, block) for block, target in self._copies.get(parent.seq_id, ()))  # not copied yet itself
        self._copies[child.seq_id] = [
            (origin.get(source + index, source + index), chunk.first_block + index)
            for index in range(num_blocks_for(parent.num_computed, self.block_size))
        ]

    def free(self, sequence: Sequence) -> None:
        """Gives a sequence's chunk back; a search keeps it for other beams, until it has none."""
        chunk = self._chunks.pop(sequence.seq_id)
        self._copies.pop(sequence.seq_id, None)
        spare = self._spare.get(chunk.request_id)
        if spare is None:
            self.buddies.free(chunk.first_block)
            return
        spare.append(chunk)
        if all(other.request_id != chunk.request_id for other in self._chunks.values()):
            for one in self._spare.pop(chunk.request_id):
                self.buddies.free(one.first_block)

    def reset(self) -> None:
        """Forgets who holds what."""
        vars(self).update(vars(ContiguousAllocator(self._config, self._max_model_len, self._estimate)))

    # ------------------------------------------------------------------ what contiguous memory cannot do

    def swap_out(self, sequences: List[Sequence]) -> Moves:
        """Raises OutOfBlocks: there is no swap space."""
        raise OutOfBlocks("contiguous memory is not swapped")

    def swap_in(self, sequences: List[Sequence], *, alone: bool) -> Moves:
        """Never called: nobody is swapped out."""
        raise AssertionError("nobody is swapped out")

    def swapped_ids(self) -> list[int]:
        """Nobody."""
        return []

    def seal(self, sequence: Sequence) -> None:
        """Nothing: nothing is shared."""

    def pin(self, name: str, sequence: Sequence) -> None:
        """Nothing: nothing is shared."""

    def unpin(self, name: str) -> None:
        """Nothing: nothing is shared."""

    def reset_prefix_cache(self) -> None:
        """Nothing: there is none."""

    # ------------------------------------------------------------------ looking inside

    def block_table(self, seq_id: int) -> list[int]:
        """The chunk's blocks."""
        chunk = self._chunks[seq_id]
        return list(range(chunk.first_block, chunk.first_block + chunk.num_blocks))

    def num_blocks_of(self, seq_id: int) -> int:
        """Blocks of the chunk."""
        return self._chunks[seq_id].num_blocks

    def seq_ids(self) -> list[int]:
        """Sequences that hold a chunk."""
        return list(self._chunks)

    def pins(self) -> dict[str, list[int]]:
        """None."""
        return {}

    def occupancy(self) -> Occupancy:
        """How the blocks are used."""
        used = self.num_blocks - self.buddies.num_free
        return Occupancy(used, used, used, 0, 0, 0, 0)

    def content(self, block: int) -> tuple[int, BlockHash | None]:
        """1 if the block is in a chunk that was handed out, else 0."""
        chunks = (range(offset + 1, offset + 1 + (1 << order)) for offset, order in self.buddies.taken())
        return int(any(block in chunk for chunk in chunks)), None

    def held_blocks(self) -> tuple[list[int], list[int]]:
        """Blocks of the chunks that were handed out."""
        taken = self.buddies.taken()
        return sorted(offset + 1 + index for offset, order in taken for index in range(1 << order)), []

    def usage(self, num_computed: Mapping[int, int]) -> KVUsage:
        """The memory's split as in the paper's Fig. 2.

        Reserved is what will be used; internal fragmentation what was reserved beyond a sequence's end; external what
        rounding up to a power of two adds, and free chunks that are too small for who was refused last.
        """
        states = reserved = internal = held = 0
        for seq_id, chunk in self._chunks.items():
            computed = num_computed[seq_id]
            states += computed
            reserved += max(0, chunk.end - computed)
            internal += max(0, chunk.tokens - max(chunk.end, computed))
            held += chunk.num_blocks
        for chunk in (chunk for chunks in self._spare.values() for chunk in chunks):
            internal += chunk.tokens
            held += chunk.num_blocks
        size = self.block_size
        useless = self.buddies.num_free_below(self._refused) * size
        rounding = held * size - states - reserved - internal
        return KVUsage(states, reserved, internal, rounding + useless, self.buddies.num_free * size - useless)

    # ------------------------------------------------------------------ snapshots and checks

    def snapshot(self) -> dict[str, Any]:
        """Chunks and their owners as plain JSON-able data."""
        return {
            "kind": "contiguous",
            "block_size": self.block_size,
            "buddies": self.buddies.snapshot(),
            "chunks": [[seq_id, *chunk] for seq_id, chunk in self._chunks.items()],
            "spare": [[name, [list(chunk) for chunk in chunks]] for name, chunks in self._spare.items()],
            "copies": [[seq_id, [list(pair) for pair in copies]] for seq_id, copies in self._copies.items()],
            "refused": self._refused,
        }

    def restore(self, data: Any) -> None:
        """Takes over a snapshot's state, or raises SnapshotError and changes nothing."""
        try:
            given = data["kind"], data["block_size"]
            if given != ("contiguous", self.block_size):
                raise SnapshotError(f"snapshot of {given}, but this allocator is {('contiguous', self.block_size)}")
            candidate = ContiguousAllocator(self._config, self._max_model_len, self._estimate)
            candidate.buddies.restore(data["buddies"])
            candidate._chunks = {int(seq_id): _Chunk(*chunk) for seq_id, *chunk in data["chunks"]}
            candidate._spare = {name: [_Chunk(*chunk) for chunk in chunks] for name, chunks in data["spare"]}
            candidate._copies = {int(seq_id): [(a, b) for a, b in copies] for seq_id, copies in data["copies"]}
            candidate._refused = int(data["refused"])
            candidate.check_invariants()
        except SnapshotError:
            raise
        except (KeyError, TypeError, ValueError, InvariantError) as error:
            raise SnapshotError(f"not a snapshot of a contiguous allocator: {error!r}") from error
        vars(self).update(vars(candidate))

    def check_invariants(self) -> None:
        """Raises InvariantError unless every chunk that was handed out has one owner."""
        self.buddies.check_invariants()
        spare = [chunk for chunks in self._spare.values() for chunk in chunks]
        owned = sorted((chunk.first_block, chunk.num_blocks) for chunk in [*self._chunks.values(), *spare])
        taken = sorted((offset + 1, 1 << order) for offset, order in self.buddies.taken())
        if owned != taken:
            raise InvariantError(f"chunks {owned} have owners, but {taken} were handed out")
        if not self._copies.keys() <= self._chunks.keys():
            raise InvariantError("a sequence that holds no chunk waits for copies")
