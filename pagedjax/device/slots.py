"""The host's mirror of what the device keys by slot: block tables and sampling parameters, as numpy arrays.

A running sequence holds one slot (from 1; 0 is padding) from its admission to its end or preemption. Only what changed
travels in a plan, and a step's arrays are cut out of these by slot.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from pagedjax.device.batch import Batch, bucket_for, pad
from pagedjax.device.kv_pool import NULL_BLOCK
from pagedjax.device.sampler import PROMPT_FLAG, ROW_FIELDS, SampleRows
from pagedjax.host.plan import ScheduledChunk, StepPlan
from pagedjax.request import Sequence

MASKED_LOGIT = -1e30  # finite: a bias of -inf would turn an infinite logit into NaN
PER_STEP = ("row_ids", "slots", "positions")
FROM_PARAMS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "shapes_logits",
)


class SlotTable:
    """Arrays by slot, kept up to date from the plans."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        rows = max_num_seqs + 1
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.block_tables = np.zeros((rows, max_blocks_per_seq), np.int32)
        self.columns: dict[str, Any] = {
            name: np.zeros((rows, *shape), dtype) for name, (dtype, shape) in ROW_FIELDS.items() if name not in PER_STEP
        }
        # Row 0, for padding, is greedy and asks for nothing: no filter may run for its sake.
        self.columns["top_p"][0] = self.columns["repetition_penalty"][0] = 1.0

    def admit(self, slot: int, seq: Sequence) -> None:
        """Takes over a slot for a sequence that was just admitted."""
        params, columns = seq.request.params, self.columns
        for name in FROM_PARAMS:
            columns[name][slot] = getattr(params, name)
        columns["top_k"][slot] = min(params.top_k, np.iinfo(np.int32).max)
        columns["seeds"][slot] = seq.request.seed >> 32, seq.request.seed & 0xFFFFFFFF
        columns["sample_index"][slot] = seq.index
        columns["wants_logprobs"][slot] = params.logprobs is not None
        self.block_tables[slot] = 0

    def extend(self, chunk: ScheduledChunk) -> None:
        """Writes a chunk's new blocks into its row."""
        end = chunk.first_block + len(chunk.new_blocks)
        self.block_tables[chunk.slot, chunk.first_block : end] = chunk.new_blocks

    def build_batch(self, plan: StepPlan, buckets: tuple[int, ...]) -> Batch:
        """The backbone's arrays for one plan, padded to its bucket."""
        size = bucket_for(plan.num_tokens, buckets)
        num_seqs = min(size, self.max_num_seqs)
        chunks = [c for c in plan.chunks if c.num_tokens]  # the others only sample
        _, slots, starts, counts, *_ = map(np.asarray, zip(*(c[:4] for c in chunks), strict=True))
        query_start_loc = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        if plan.num_tokens == len(counts):
            positions, row_of_token = starts, slots
        else:
            positions = np.repeat(starts - query_start_loc[:-1], counts) + np.arange(plan.num_tokens)
            row_of_token = np.repeat(slots, counts)
        token_ids = -row_of_token
        blocks = self.block_tables[row_of_token, positions // self.block_size]
        for chunk, first in zip(chunks, query_start_loc.tolist(), strict=False):
            if chunk.token_ids:
                token_ids[first : first + chunk.num_tokens] = chunk.token_ids
            if not chunk.writes:
                blocks[first : first + chunk.num_tokens] = NULL_BLOCK
        return Batch(
            token_ids=pad(token_ids, size),
            positions=pad(positions, size),
            slot_mapping=pad(blocks * self.block_size + positions % self.block_size, size),
            block_tables=pad(self.block_tables[slots], num_seqs),
            seq_lens=pad(starts + counts, num_seqs),
            query_start_loc=pad(query_start_loc, num_seqs + 1, fill=plan.num_tokens),
            logit_rows=pad(_logit_rows(plan), self.max_num_seqs),
        )

    def build_rows(self, row_ids: np.ndarray, slots: np.ndarray, positions: np.ndarray, size: int) -> SampleRows:
        """The sampler's arrays for one slice of rows, padded to `size` with slot 0."""
        padded = pad(slots, size)
        columns = {name: column[padded] for name, column in self.columns.items()}
        return SampleRows(row_ids=pad(row_ids, size), slots=padded, positions=pad(positions, size), **columns)


def _logit_rows(plan: StepPlan) -> np.ndarray:
    """Index of each chunk's last token, for those that sample and then for beams."""
    last = np.cumsum([c.num_tokens for c in plan.chunks]) - 1
    beams = [range(search.first_chunk, search.first_chunk + search.num_chunks) for search in plan.beams]
    return last[[*(i for i, c in enumerate(plan.chunks) if c.samples), *chain.from_iterable(beams)]]


def count_row(seq: Sequence, vocab_size: int) -> np.ndarray:
    """A sequence's token counts as the sampler keeps them: output counts, plus a flag on prompt tokens."""
    counts = np.bincount(seq.token_ids[seq.prompt_len :], minlength=vocab_size).astype(np.int32)
    counts[list(set(seq.request.prompt_token_ids))] += PROMPT_FLAG
    return counts


def bias_row(seq: Sequence, vocab_size: int, *, ban_stops: bool) -> np.ndarray:
    """A sequence's logit bias; `ban_stops` while it has fewer than `min_tokens` output tokens."""
    bias = np.zeros(vocab_size, np.float32)
    for token, value in (seq.request.params.logit_bias or {}).items():
        bias[token] = value
    if ban_stops:
        bias[list(seq.request.stop_ids)] = MASKED_LOGIT
    return bias
