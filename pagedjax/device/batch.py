"""One step's arrays, and the fixed set of shapes they come in (pure functions).

Two kinds of program are compiled: the backbone by number of tokens, the head by number of rows that need logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Int

from pagedjax.params import MAX_BEAM_WIDTH

LOGIT_BYTES = 8 << 20
"""Float32 logits of one head program at most (bytes), so that its temporaries stay small beside the pool."""

STAGING_BYTES = 128 << 20
"""Blocks that one call moves to the host or back at most (bytes): they are held once more meanwhile."""


class Batch(struct.PyTreeNode):
    """What the backbone reads of one step (design section 3). `tokens` and `seqs` are bucket sizes.

    Attributes:
        token_ids: flat over sequences; -s says "the token last sampled at slot s", which is on the device.
        positions: of each token in its sequence; padding 0.
        slot_mapping: block * block_size + offset that each token's K and V go to; padding goes to the null block.
        block_tables: physical block of each logical one; padded with 0.
        seq_lens: tokens in the cache, this step's included; 0 marks a padding row.
        query_start_loc: where each sequence's tokens begin in the flat axis; constant over padding rows.
        logit_rows: token index of each row that needs logits: those that sample, in plan order, then beams; padding 0.
    """

    token_ids: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    slot_mapping: Int[Array, " tokens"]
    block_tables: Int[Array, "seqs max_blocks_per_seq"]
    seq_lens: Int[Array, " seqs"]
    query_start_loc: Int[Array, " seqs_plus_1"]
    logit_rows: Int[Array, " max_num_seqs"]


def _sizes_up_to(limit: int, first: int = 1, base: int = 2) -> tuple[int, ...]:
    sizes = [min(first, limit)]
    while sizes[-1] < limit:
        sizes.append(min(base * sizes[-1], limit))
    return tuple(sizes)


def token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Token counts that the backbone is compiled for: powers of two, and the limit itself."""
    return _sizes_up_to(max_num_batched_tokens)


def row_buckets(max_num_seqs: int, vocab_size: int) -> tuple[int, ...]:
    """Row counts that the head is compiled for; a step with more rows calls the largest one several times."""
    cap = max(1, LOGIT_BYTES // (4 * vocab_size))
    return _sizes_up_to(min(max_num_seqs, 1 << (cap.bit_length() - 1)))


def beam_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Beam widths that the search is compiled for: few, since most of its time reads the head's weights."""
    return _sizes_up_to(min(max_num_seqs, MAX_BEAM_WIDTH), first=2, base=4)


def copy_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of blocks that one call copies: with paging, at most one for every sequence."""
    return _sizes_up_to(max_num_seqs, first=4, base=8)


def swap_buckets(num_blocks: int, bytes_per_block: int) -> tuple[int, ...]:
    """Numbers of blocks that one call moves to the host or back; a step that moves more makes several calls.

    Args:
        num_blocks: that there are to move.
    """
    return _sizes_up_to(min(num_blocks, max(1, STAGING_BYTES // bytes_per_block)), first=4, base=8)


def independent(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cuts (source, destination) pairs, which are in order, where a destination was used before in the same part."""
    parts: list[list[tuple[int, int]]] = []
    used: set[int] = set()
    for source, destination in copies:
        if not parts or destination in used:
            parts.append([])
            used = set()
        parts[-1].append((source, destination))
        used |= {source, destination}
    return parts


def bucket_for(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`."""
    return next(b for b in buckets if b >= size)


def row_slices(num_rows: int, buckets: tuple[int, ...]) -> list[tuple[int, int]]:
    """Cuts rows into (first, count) slices that each fit the largest bucket."""
    step = buckets[-1]
    return [(first, min(step, num_rows - first)) for first in range(0, num_rows, step)]


def pad(values: np.ndarray, size: int, fill: int = 0) -> Any:
    """`values` along its first axis, padded with `fill` to `size`, as int32.

    A numpy array, typed as what it is in the compiled program.
    """
    out = np.full((size, *values.shape[1:]), fill, np.int32)
    out[: len(values)] = values
    return out
