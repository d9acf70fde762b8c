"""Logprobs for people: a line a token, with what else was likely there."""

from __future__ import annotations

from collections.abc import Sequence

from pagedjax.request import Logprob, RequestOutput

Entry = dict[int, Logprob]


def format_logprobs(output: RequestOutput) -> str:
    """The logprobs that a request asked for, of prompt and output; "" if it asked for none."""
    parts = []
    if output.prompt_logprobs is not None:
        parts += ["prompt token", *_lines(output.prompt_token_ids, output.prompt_logprobs)]
    for completion in output.outputs:
        if completion.logprobs is not None:
            of_sample = f" of sample {completion.index + 1}" if len(output.outputs) > 1 else ""
            parts += [f"output token{of_sample}", *_lines(completion.token_ids, completion.logprobs)]
    return "\n".join(parts)


def _lines(token_ids: Sequence[int], entries: Sequence[Entry | None]) -> list[str]:
    """Token, logprob, rank, and the most likely tokens with theirs."""
    rows = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:  # nothing comes before the first token of a prompt
            continue
        own = entry[token_id]
        top = sorted((value.rank, name, value) for name, value in entry.items() if value is not own or own.rank == 1)
        likely = ", ".join(f"{_text(name, value)} {value.logprob:.3f}" for _, name, value in top)
        rows.append((_text(token_id, own), f"{own.logprob:.3f}", f"#{own.rank}", likely))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return [
        f"  {row[0].ljust(widths[0])}  {row[1].rjust(widths[1])}  {row[2].rjust(widths[2])}  {row[3]}".rstrip()
        for row in rows
    ]


def _text(token_id: int, value: Logprob) -> str:
    return f"token {token_id}" if value.decoded_token is None else repr(value.decoded_token)
