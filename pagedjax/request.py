"""Requests, sequences and what comes back. Standard library only: `pagedjax.host` imports this module."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pagedjax.params import MAX_LOGPROBS, BeamSearchParams, SamplingParams, check_text

if TYPE_CHECKING:
    from pagedjax.host.beam import BeamSearch
    from pagedjax.host.prefix import BlockHash

__all__ = [
    "MAX_LOGPROBS",
    "BeamSearchParams",
    "CompletionOutput",
    "Logprob",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "SequenceGroup",
    "SequenceStatus",
    "check_text",
]


class SequenceStatus(Enum):
    """Where a sequence is: one that is swapped has its blocks in the host's memory."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(slots=True)
class Request:
    """One request as the engine accepted it.

    Attributes:
        number: counts the engine's requests; the default seed's part. A fork has its parent's.
        params: how tokens are sampled; of a beam search all but its limits is neutral.
        stop_ids: tokens that end the output: the model's own unless `ignore_eos`, and `stop_token_ids`.
        max_len: tokens, prompt and output together, at which the request ends with "length".
        seed: of its random keys, resolved.
        beam: of a beam search.
        cache_salt: only requests of the same salt share cached blocks.
        registers_prefix: whether the full blocks of the prompt are kept, under the request's id, for all to share.
    """

    request_id: str
    number: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_len: int
    arrival_time: float = 0.0
    prompt: str | None = None
    beam: BeamSearchParams | None = None
    cache_salt: str | None = None
    registers_prefix: bool = False

    @property
    def width(self) -> int:
        """Sequences that it may have at the same time."""
        return self.params.n if self.beam is None else self.beam.beam_width


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens of a request: what it holds, and how far its keys and values have been computed.

    Attributes:
        seq_id: unique in the scheduler's life.
        index: which sample of its request.
        token_ids: prompt and confirmed output.
        num_pending: tokens that planned steps sample and that are not read back yet; at most one a step in flight.
        num_computed: tokens whose K and V are in the pool, or will be when the steps already planned have run.
        slot: row of the device's per-sequence state, 1 to max_num_seqs; 0 when not running.
        prefill_len: tokens known when it was last admitted. Computed in chunks, the last of which samples; every token
            from there on is a decode.
        capacity: tokens that its blocks can hold.
        decode_until: positions below it are decoded without deciding anything (no block to take or to copy, not the
            end). 0 during the prefill.
        check_len: tokens at which its end is looked for, and full blocks to seal.
        fresh: whether the device has not yet been told of it: its slot holds an earlier sequence's state.
        num_cached: tokens of the blocks that it found in the prefix cache when it was last admitted.
        leader_id: of the sequence that computes all of its tokens, while that is going on; see `Admission`.
        hashes: of its full blocks, as far as they were needed.
        num_sealed: blocks at its beginning that others can find, if anybody's of the same content.
        stop_reason: the stop string or stop token id that ended it.
        done: how it will have ended when its batch does; None while it goes on, and in continuous batching.
    """

    seq_id: int
    request: Request
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_pending: int = 0
    num_computed: int = 0
    slot: int = 0
    prefill_len: int = 0
    capacity: int = 0
    decode_until: int = 0
    check_len: int = 0
    fresh: bool = False
    num_cached: int = 0
    leader_id: int | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    num_sealed: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_preemptions: int = 0
    done: tuple[str, str | int | None] | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def output_len(self) -> int:
        """Confirmed output tokens."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request: scheduled and preempted together, all or nothing (paper section 4.5).

    Attributes:
        sequences: those of all samples, in their order, also when they have ended; of a beam search the beams, best
            first.
        arrival: its place in the order of arrival; forks have their parent's.
        only: the sequence, if it can have but one; None for several samples or beams.
        beam: state of a beam search.
        spare_slots: slots kept for beams that are not there yet.
    """

    request: Request
    sequences: list[Sequence]
    arrival: int = 0
    only: Sequence | None = None
    beam: BeamSearch | None = None
    spare_slots: list[int] = field(default_factory=list)

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [seq for seq in self.sequences if seq.status is not SequenceStatus.FINISHED]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one position, from the raw logits. `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample's output so far.

    Attributes:
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string or stop token id, if one ended it; the message when `finish_reason` is "error".
        cumulative_logprob: sum of the tokens' log-probabilities, when `logprobs` were asked for, and of beams.
        logprobs: one dictionary a token, when asked for.
        score: of a beam: `cumulative_logprob` / output tokens ** length_penalty.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    score: float | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Of one request; times in seconds on the engine's clock.

    Attributes:
        arrival_time: when it was added.
        first_token_time: when its first token was read back.
        finished_time: when it ended.
        num_preemptions: how often its sequences were preempted.
        num_cached_tokens: of the prompt, found in the prefix cache and not computed.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's state after a step: its samples in order, or its beams best first.

    `prompt_logprobs[0]` is None: nothing comes before the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
