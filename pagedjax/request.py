"""Requests, sequences and what comes back. Standard library only: `pagedjax.host` imports this module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pagedjax.errors import InvalidRequest
from pagedjax.scalars import is_int, is_text, make_plain, plain, shown

MAX_LOGPROBS = 20
LARGEST = 1e6  # of temperatures, penalties and biases, in absolute value


def _check(ok: bool, name: str, given: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name}={shown(given)} is not allowed: {name} must be {allowed}")


def _is_number(value: object) -> bool:
    """Whether it is a number with room to spare in float32, as which the device computes."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def check_text(name: str, text: object) -> None:
    """Raises InvalidRequest unless it is a string that can be written in UTF-8, as a tokenizer needs it."""
    _check(isinstance(text, str), name, text, "a string")
    _check(is_text(text), name, text, "text: its lone surrogates stand for bytes that are no UTF-8")


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    _check(isinstance(value, tuple | list | set | frozenset), name, value, "a list or tuple")
    return tuple(map(plain, value))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and meanings as in vLLM.

    Attributes:
        n: samples of one prompt. Only 1 so far: more arrive with block sharing.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all. Ties with the k-th are kept.
        top_p: keep the fewest most likely tokens that hold this much probability. Ties with the last are kept.
        min_p: keep tokens at least this likely, relative to the most likely one.
        max_tokens: output tokens at most. None: as many as model and pool allow.
        min_tokens: output tokens that come before anything may end the output: before them no end-of-sequence or stop
            token is chosen, and a stop string that they complete counts for nothing and stays in the text.
        stop: strings that end the output; the output is cut before them.
        stop_token_ids: tokens that end the output, kept in `token_ids`.
        ignore_eos: go on past the model's own end-of-sequence tokens.
        seed: of this request's random keys; None draws one from the engine's seed and the request's number.
        logprobs: alternatives to return for every output token, 0 to 20; None returns none.
        prompt_logprobs: the same for every prompt token but the first.
        presence_penalty: taken once from the logit of every token that was generated before.
        frequency_penalty: taken from it for every time it was generated.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        logit_bias: {token id: added to its logit}.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            allowed = "None or a dictionary {token id: bias}"
            _check(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, allowed)
            biases = {plain(token): plain(bias) for token, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", biases)
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        self._check_counts()
        self._check_filters()
        self._check_penalties()
        self._check_stops()

    def _check_counts(self) -> None:
        _check(is_int(self.n, 1), "n", self.n, "at least 1")
        _check(self.n == 1, "n", self.n, "1: parallel samples need block sharing, which is not there yet")
        _check(
            self.max_tokens is None or (is_int(self.max_tokens, 1)),
            "max_tokens",
            self.max_tokens,
            "None or an integer of at least 1",
        )
        limit = math.inf if self.max_tokens is None else self.max_tokens
        _check(
            is_int(self.min_tokens, 0) and self.min_tokens <= limit,
            "min_tokens",
            self.min_tokens,
            f"an integer from 0 to max_tokens={self.max_tokens}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(
                value is None or (is_int(value, 0) and value <= MAX_LOGPROBS),
                name,
                value,
                f"None or an integer from 0 to {MAX_LOGPROBS}",
            )
        _check(
            self.seed is None or (is_int(self.seed, 0) and self.seed < 2**63),
            "seed",
            self.seed,
            "None or an integer in [0, 2**63)",
        )

    def _check_filters(self) -> None:
        _check(
            _is_number(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            f"a number from 0 to {LARGEST:g}",
        )
        _check(is_int(self.top_k, 0), "top_k", self.top_k, "an integer of at least 0 (0 keeps all)")
        _check(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_is_number(value) and -2 <= value <= 2, name, value, "in [-2, 2]")
        _check(
            _is_number(self.repetition_penalty) and self.repetition_penalty >= 1 / LARGEST,
            "repetition_penalty",
            self.repetition_penalty,
            f"a number from {1 / LARGEST:g} to {LARGEST:g}",
        )
        for token, bias in (self.logit_bias or {}).items():
            _check(is_int(token, 0), "logit_bias key", token, "a token id, an integer of at least 0")
            _check(_is_number(bias), f"logit_bias[{token}]", bias, f"a number from {-LARGEST:g} to {LARGEST:g}")

    def _check_stops(self) -> None:
        for text in self.stop:
            _check(is_text(text) and text != "", "stop", text, "strings that are not empty and can be written in UTF-8")
        for token in self.stop_token_ids:
            _check(is_int(token, 0), "stop_token_ids", token, "token ids, integers of at least 0")

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed by what was generated before, or by a bias (penalties, bias, min_tokens)."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_tokens
        )


class SequenceStatus(Enum):
    """Where a sequence is. Swapped-out sequences will be a further state beside these."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Request:
    """One request as the engine accepted it.

    Attributes:
        number: counts the engine's requests; order of arrival, and the default seed's part.
        stop_ids: tokens that end the output: the model's own unless `ignore_eos`, and `stop_token_ids`.
        max_len: tokens, prompt and output together, at which the request ends with "length".
        seed: of its random keys, resolved.
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
        decode_until: positions below it are decoded without deciding anything (no block to take, not the end). 0 during
            the prefill.
        stop_reason: the stop string or stop token id that ended it.
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
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_preemptions: int = 0

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
    """The sequences of one request: scheduled and preempted together, all or nothing (paper section 4.5)."""

    request: Request
    sequences: list[Sequence]


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
        logprobs: one dictionary a token, when asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Of one request; times in seconds on the engine's clock.

    Attributes:
        arrival_time: when it was added.
        first_token_time: when its first token was read back.
        finished_time: when it ended.
        num_preemptions: how often it was preempted.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's state after a step. `prompt_logprobs[0]` is None: nothing comes before the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
