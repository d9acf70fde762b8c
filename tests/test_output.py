"""From tokens to outputs, without a model: what `min_tokens` means for stop strings."""

from __future__ import annotations

from typing import Any

import pytest

from pagedjax.output import SampleTracker
from pagedjax.request import Request, SamplingParams, Sequence


def stopped(tokenizer: Any, pieces: list[str], **params: Any) -> tuple[str, int | None]:
    """The text of an output that was to be `pieces`, a token each, and after how many of them it was stopped."""
    request = Request("r", 0, (5,), SamplingParams(max_tokens=99, **params), 1, frozenset(), 100)
    sequence = Sequence(0, request, token_ids=[5])
    tracker = SampleTracker(sequence, tokenizer)
    for count, piece in enumerate(pieces, 1):
        (token,) = tokenizer(piece).input_ids
        sequence.token_ids.append(token)
        if (stop := tracker.add_token(token, None)) is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", stop
            return tracker.completion().text, count
    sequence.finish_reason = "length"
    tracker.finish()
    return tracker.completion().text, None


@pytest.mark.parametrize(
    ("stop", "min_tokens", "text", "count"),
    [
        (" b", 0, " a", 2),
        (" b", 1, " a", 2),
        (" b", 2, " a b c", 4),  # the first is completed by the second token, which min_tokens still covers
        (" b", 4, " a b c b", None),
        (" b c", 2, " a", 3),  # begun before, completed after
        (" b c", 3, " a b c b", None),
    ],
)
def test_stop_strings_count_once_min_tokens_are_there(
    smollm2_tokenizer: Any, stop: str, min_tokens: int, text: str, count: int | None
) -> None:
    assert stopped(smollm2_tokenizer, [" a", " b", " c", " b"], stop=stop, min_tokens=min_tokens) == (text, count)
