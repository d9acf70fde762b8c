"""What the scheduler tells the device to do in one step, and what comes back."""

from __future__ import annotations

from typing import NamedTuple

from pagedjax.host.beam import BeamCandidate
from pagedjax.request import Sequence, SequenceGroup


class ScheduledChunk(NamedTuple):
    """One sequence's part of a step. A tuple, since hundreds are made each step.

    Attributes:
        seq_id: the sequence.
        slot: its row of the device's per-sequence state and block table, from 1.
        start: position of the chunk's first token.
        num_tokens: tokens computed. 0 for a sample that has all its tokens in common with the chunk before it: it only
            samples, from that chunk's last row.
        token_ids: the chunk's tokens; empty for a decode whose one token is the last one sampled at `slot`, which never
            left the device.
        first_block: index in the sequence's table of the first block that is new to the device; 0 if none is.
        new_blocks: physical blocks from that index on; empty for most decodes.
        samples: whether a next token is sampled: the chunk reaches the sequence's last known token.
        fresh: whether the device hears of the sequence for the first time: `slot` still holds an earlier one's state.
        writes: whether its keys and values are stored. Not those of a last token that is cached already.
    """

    seq_id: int
    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    first_block: int
    new_blocks: tuple[int, ...]
    samples: bool
    fresh: bool
    writes: bool = True


class ScheduledBeams(NamedTuple):
    """The beams of one request, whose best continuations are asked for.

    Attributes:
        first_chunk: index in the plan of the first beam's chunk; the others follow it. None of them samples.
        num_chunks: beams.
        width: beams that there may be.
        logprobs: of each beam so far.
        num_candidates: continuations wanted.
    """

    request_id: str
    first_chunk: int
    num_chunks: int
    width: int
    logprobs: tuple[float, ...]
    num_candidates: int


class StepPlan(NamedTuple):
    """One step. Without chunks there is no result to give: it reports `preempted` and `failed`, and may swap blocks.

    Blocks are moved before anything else happens, the ones swapped out first; then `copies` are made, in their order;
    then chunks are written and read.

    Attributes:
        step: counts the plans made, from 0.
        chunks: at most `max_num_seqs`, of `num_tokens` tokens together.
        copies: (source, destination) blocks of copy-on-write. A destination may have been the source of one before.
        beams: requests that search with beams in this step.
        swap_outs: (device block, host block).
        swap_ins: (host block, device block); never in a step with `swap_outs`.
        preempted: sequences that lost their blocks in this step: swapped out, or to be computed again.
        failed: sequences that ended in this step because they outgrew the whole pool.
        ended: sequences that had been done before, and whose batch ended with this step.
    """

    step: int
    chunks: tuple[ScheduledChunk, ...]
    num_tokens: int
    preempted: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    beams: tuple[ScheduledBeams, ...] = ()
    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()
    ended: tuple[int, ...] = ()


class StepResult(NamedTuple):
    """What one step sampled.

    Attributes:
        step: of the plan this answers.
        token_ids: one for every chunk of the plan that samples, in the plan's order.
        errors: {seq_id: message} of sequences whose logits were not finite; their token is ignored.
        beams: for each of the plan's `beams` its best continuations, best first; as many as were wanted, or all.
    """

    step: int
    token_ids: list[int]
    errors: dict[int, str] | None = None
    beams: list[list[BeamCandidate]] | None = None


class SequenceUpdate(NamedTuple):
    """What `Scheduler.update` did with one sampled token.

    Attributes:
        token_id: appended to the sequence; None when it ended with an error instead.
        finish_reason: "stop", "length" or "error" when this token ended it.
    """

    seq_id: int
    token_id: int | None
    finish_reason: str | None


class InFlight(NamedTuple):
    """A plan whose result has not come: who samples in it, and who searches with beams."""

    step: int
    sampling: list[Sequence]
    searching: list[SequenceGroup]
