"""`RequestOutput` and its parts as plain JSON-able data, and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pagedjax.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def dump_logprobs(entry: dict[int, Logprob]) -> list[list[Any]]:
    """Logprobs of one position: JSON knows no integer keys."""
    return [[token_id, logprob.logprob, logprob.rank, logprob.decoded_token] for token_id, logprob in entry.items()]


def load_logprobs(data: list[list[Any]]) -> dict[int, Logprob]:
    """Inverse of `dump_logprobs`."""
    return {token_id: Logprob(*values) for token_id, *values in data}


def load_metrics(data: dict[str, Any], seconds: float) -> RequestMetrics:
    """Metrics that were taken on a clock that is so many seconds behind."""
    times = ("arrival_time", "first_token_time", "finished_time")
    shifted = {name: None if data[name] is None else data[name] + seconds for name in times}
    return RequestMetrics(**{**data, **shifted})


def dump_output(output: RequestOutput) -> dict[str, Any]:
    """A request's state as data."""
    completions = [{**asdict(completion), "logprobs": _dump_all(completion.logprobs)} for completion in output.outputs]
    return {**asdict(output), "outputs": completions, "prompt_logprobs": _dump_all(output.prompt_logprobs)}


def load_output(data: dict[str, Any], seconds: float) -> RequestOutput:
    """Inverse of `dump_output`, on a clock that is so many seconds ahead."""
    return RequestOutput(
        **{
            **data,
            "outputs": [
                CompletionOutput(**{**completion, "logprobs": _load_all(completion["logprobs"])})
                for completion in data["outputs"]
            ],
            "prompt_logprobs": _load_all(data["prompt_logprobs"]),
            "metrics": data["metrics"] and load_metrics(data["metrics"], seconds),
        }
    )


def _dump_all(entries: Any) -> list[Any] | None:
    return None if entries is None else [entry and dump_logprobs(entry) for entry in entries]


def _load_all(entries: list[Any] | None) -> Any:
    return None if entries is None else [entry and load_logprobs(entry) for entry in entries]
