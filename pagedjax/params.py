"""How a request's tokens are chosen: sampling and beam search. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pagedjax.errors import InvalidRequest
from pagedjax.scalars import is_int, is_text, make_plain, plain, shown

MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 32
"""The largest that the programs which choose continuations are compiled for."""
MAX_LENGTH_PENALTY = 10  # lengths to a higher power leave nothing of a score
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
        n: samples of one prompt, which is computed and stored once. Sample i is what `index` i of the same seed gives.
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
        _check(is_int(self.n, 1), "n", self.n, "an integer of at least 1")
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


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam search over one prompt (paper section 4.4), as `transformers` defines it.

    Attributes:
        beam_width: beams kept, and outputs returned. 1 is greedy decoding with a score.
        max_tokens: output tokens at most.
        length_penalty: an output's score is its summed log-probability / its length ** this; the length counts output
            tokens, the end-of-sequence token among them. Above 0 favours long outputs, below 0 short ones.
        early_stopping: when to end once `beam_width` outputs are finished. True: at once. False: when the best beam, at
            its present length, scores no better than the worst of them. "never": when no beam could, at any length.
        ignore_eos: go on past the model's end-of-sequence tokens.
    """

    beam_width: int = 4
    max_tokens: int = 32
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        _check(
            is_int(self.beam_width, 1) and self.beam_width <= MAX_BEAM_WIDTH,
            "beam_width",
            self.beam_width,
            f"an integer from 1 to {MAX_BEAM_WIDTH}",
        )
        _check(is_int(self.max_tokens, 1), "max_tokens", self.max_tokens, "an integer of at least 1")
        penalty = self.length_penalty
        ok = _is_number(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY
        _check(ok, "length_penalty", penalty, f"a number from -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}")
        stopping = self.early_stopping
        _check(isinstance(stopping, bool) or stopping == "never", "early_stopping", stopping, 'True, False or "never"')
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
