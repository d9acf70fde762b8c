"""What users ask for, read and checked, as a `Request`."""

from __future__ import annotations

import time
from typing import Any

from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.errors import ConfigError, InvalidRequest
from pagedjax.params import BeamSearchParams, SamplingParams
from pagedjax.prompt import Prompt, check_tokens, read_prompt
from pagedjax.request import Request, check_text
from pagedjax.scalars import is_number, plain, shown

_SEED_STRIDE = 0x9E3779B97F4A7C15  # spreads the requests' default seeds (Weyl sequence with the golden ratio)


def check_config(config: Any) -> EngineConfig:
    """The configuration, or the default one for None. Raises ConfigError for anything else."""
    if config is not None and not isinstance(config, EngineConfig):
        raise ConfigError(f"config={shown(config)} must be an EngineConfig, or None")
    return config or EngineConfig()


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens a sequence may reach: what was asked for, or the model's own limit.

    Raises:
        ConfigError: more was asked for than the model can.
    """
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len={config.max_model_len} is more than the model's {limit} positions")
    return config.max_model_len or limit


def check_id(request_id: Any) -> None:
    """Raises InvalidRequest unless it is a string."""
    if not isinstance(request_id, str):
        raise InvalidRequest(f"request_id={shown(request_id)} must be a string")


class Intake:
    """Reads requests for one engine.

    Args:
        num_slots: tokens that the pool can hold.
    """

    def __init__(
        self, config: EngineConfig, model: ModelConfig, tokenizer: Any, max_model_len: int, num_slots: int
    ) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._num_slots = num_slots

    def read(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """What `Engine.add_request` was given, as a request that has no id and no number yet.

        Raises:
            InvalidRequest: something is not of its type, or a token id lies outside the vocabulary.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise InvalidRequest(f"params={shown(params)} must be SamplingParams or BeamSearchParams")
        if arrival_time is not None and not is_number(plain(arrival_time)):
            raise InvalidRequest(f"arrival_time={shown(arrival_time)} must be a number of seconds, or None")
        if cache_salt is not None:
            check_text("cache_salt", cache_salt)
        beam = params if isinstance(params, BeamSearchParams) else None
        sampling = params if isinstance(params, SamplingParams) else _neutral(params)
        text, token_ids = read_prompt(prompt, self._tokenizer)
        check_tokens(token_ids, sampling, self._model.vocab_size)
        if sampling.stop and self._tokenizer is None:
            raise InvalidRequest(f"stop={sampling.stop!r} needs a tokenizer, and this model came without one")
        ends = () if sampling.ignore_eos else self._model.eos_token_ids
        return Request(
            request_id="",
            number=-1,
            prompt_token_ids=token_ids,
            params=sampling,
            seed=-1,
            stop_ids=frozenset(sampling.stop_token_ids).union(ends),
            max_len=self._max_len(len(token_ids), sampling),
            arrival_time=time.monotonic() if arrival_time is None else float(arrival_time),
            prompt=text,
            beam=beam,
            cache_salt=cache_salt,
        )

    def name(self, request: Request, request_id: str, number: int) -> None:
        """Gives a request its id, its number and, if it brought none of its own, its seed."""
        given = request.params.seed
        seed = (self._config.seed + (number + 1) * _SEED_STRIDE) % 2**63 if given is None else given
        request.request_id, request.number, request.seed = request_id, number, seed

    def _max_len(self, prompt_len: int, params: SamplingParams) -> int:
        if params.max_tokens is not None:
            return min(self._max_model_len, prompt_len + params.max_tokens)
        # The last token of a sequence is never computed, so it needs no slot.
        return min(self._max_model_len, max(self._num_slots, prompt_len) + 1)


def _neutral(beam: BeamSearchParams) -> SamplingParams:
    """A beam search samples nothing: what is asked of sampling for it only limits it."""
    return SamplingParams(temperature=0.0, max_tokens=beam.max_tokens, ignore_eos=beam.ignore_eos)
