"""Names of full blocks by what they hold and by all that comes before, so that equal prefixes find each other's blocks.

A block's hash is chained: SHA-256 over its parent's digest and its own tokens. The root of a chain stands for whatever
else changes keys and values (a salt), and for a seed that makes digests reproducible or unpredictable. A digest is only
a short cut all the same: two hashes are equal when their tokens are, back to the root.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

_TOKEN = "i"
_TOKEN_BYTES = array(_TOKEN).itemsize


class BlockHash:
    """Stands for the content of one full block: its tokens, and all tokens before it.

    Attributes:
        digest: 32 bytes.
        tokens: of the block, packed as native 32-bit integers; of a root, the salt.
        parent: of the block before; None for a root.
    """

    __slots__ = ("digest", "parent", "tokens")

    def __init__(self, digest: bytes, tokens: bytes, parent: BlockHash | None) -> None:
        self.digest = digest
        self.tokens = tokens
        self.parent = parent

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        """Whether both stand for the same tokens: walks back until the chains meet, mostly at once."""
        if not isinstance(other, BlockHash):
            return NotImplemented
        a: BlockHash | None = self
        b: BlockHash | None = other
        while a is not b:
            if a is None or b is None or a.tokens != b.tokens or a.digest != b.digest:
                return False
            a, b = a.parent, b.parent
        return True

    def __repr__(self) -> str:
        return f"BlockHash({self.digest.hex()[:8]})"


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """SHA-256 over the parent's digest and a block's packed tokens."""
    return hashlib.sha256(parent + tokens).digest()


def root_hash(seed: int, salt: str | None) -> BlockHash:
    """Where the chains of one salt begin; no salt and an empty one differ."""
    tokens = b"" if salt is None else b"s" + salt.encode()
    return BlockHash(block_digest(hashlib.sha256(str(seed).encode()).digest(), tokens), tokens, None)


def extend_chain(
    chain: list[BlockHash], root: BlockHash, token_ids: Sequence[int], num_blocks: int, block_size: int
) -> None:
    """Appends to a sequence's chain until it covers its first `num_blocks` blocks."""
    done = len(chain)
    packed = array(_TOKEN, token_ids[done * block_size : num_blocks * block_size]).tobytes()
    parent, step = chain[-1] if chain else root, block_size * _TOKEN_BYTES
    for begin in range(0, len(packed), step):
        tokens = packed[begin : begin + step]
        parent = BlockHash(block_digest(parent.digest, tokens), tokens, parent)
        chain.append(parent)


def unpack_tokens(hash_: BlockHash) -> list[int]:
    """A block's token ids."""
    return array(_TOKEN, hash_.tokens).tolist()


def dump_hashes(hashes: Iterable[BlockHash]) -> tuple[list[list[Any]], list[int]]:
    """Hashes as plain data: a table of [number of the parent or -1, digest, tokens], and the row of each."""
    numbers: dict[int, int] = {}
    rows: list[list[Any]] = []

    def number_of(hash_: BlockHash | None) -> int:
        missing: list[BlockHash] = []
        while hash_ is not None and id(hash_) not in numbers:
            missing.append(hash_)
            hash_ = hash_.parent
        number = -1 if hash_ is None else numbers[id(hash_)]
        for item in reversed(missing):
            rows.append([number, item.digest.hex(), item.tokens.hex()])
            number = numbers[id(item)] = len(rows) - 1
        return number

    kept = list(hashes)  # alive, so that an id stands for one object
    return rows, [number_of(hash_) for hash_ in kept]


def load_hashes(rows: list[list[Any]]) -> list[BlockHash]:
    """The hashes of a table that `dump_hashes` made."""
    loaded: list[BlockHash] = []
    for parent, digest, tokens in rows:
        if not -1 <= parent < len(loaded):
            raise ValueError(f"hash {len(loaded)} names {parent} as its parent")
        loaded.append(BlockHash(bytes.fromhex(digest), bytes.fromhex(tokens), loaded[parent] if parent >= 0 else None))
    return loaded
