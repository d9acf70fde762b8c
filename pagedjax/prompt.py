"""What users give as a prompt, as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedjax.errors import InvalidRequest
from pagedjax.request import SamplingParams, check_text
from pagedjax.scalars import shown

Prompt = str | Mapping[str, Any]
"""Text, or {"prompt_token_ids": [...]} with an optional "prompt", the text they came from."""


def read_prompt(prompt: Prompt, tokenizer: Any) -> tuple[str | None, tuple[int, ...]]:
    """Text (if there is one) and token ids of a prompt; `tokenizer` may be None.

    Raises:
        InvalidRequest: it is of neither form, or text and no tokenizer is there.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest('this model came without a tokenizer: give {"prompt_token_ids": [...]}')
        check_text("prompt", prompt)
        return prompt, tuple(tokenizer(prompt)["input_ids"])
    if not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
        raise InvalidRequest(f'prompt={shown(prompt)} must be a string or {{"prompt_token_ids": [...]}}')
    unknown = set(prompt) - {"prompt_token_ids", "prompt"}
    if unknown:
        raise InvalidRequest(
            f"prompt has unknown keys {sorted(map(str, unknown))}: allowed are prompt_token_ids and prompt"
        )
    text, token_ids = prompt.get("prompt"), prompt["prompt_token_ids"]
    if text is not None:
        check_text("prompt", text)
    try:
        return text, tuple(map(_as_token_id, token_ids))
    except TypeError as error:
        raise InvalidRequest(f"prompt_token_ids={shown(token_ids)} must be a list of integers: {error}") from None


def check_tokens(token_ids: tuple[int, ...], params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest unless there is a token, and every one that a request names is in the vocabulary."""
    if not token_ids:
        raise InvalidRequest("the prompt is empty: it must have at least one token")
    for name, ids in (
        ("prompt", token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(params.logit_bias or ())),
    ):
        wrong = [token for token in ids if not 0 <= token < vocab_size]
        if wrong:
            raise InvalidRequest(f"{name} holds token id {wrong[0]}: ids must be in [0, {vocab_size}), the vocabulary")


def _as_token_id(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{shown(value)} is not one")
    return value.__index__()
