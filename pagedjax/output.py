"""From sampled token ids to `RequestOutput`: text, stop strings, logprobs, metrics. One tracker per request."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedjax.detokenizer import Detokenizer, cut_at_stop, num_held_chars
from pagedjax.device.runner import PromptRows, RowLogprobs
from pagedjax.host.plan import ScheduledChunk
from pagedjax.request import (
    CompletionOutput,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    Sequence,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RequestTracker:
    """What one request has put out so far.

    Attributes:
        sequence: the scheduler's, whose tokens are reported.
        metrics: times of its life so far.
    """

    def __init__(self, sequence: Sequence, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.sequence = sequence
        self.metrics = RequestMetrics(sequence.request.arrival_time)
        self._tokenizer = tokenizer
        params = self.request.params
        self._detokenizer = Detokenizer(tokenizer, self.request.prompt_token_ids) if tokenizer else None
        self._text = ""
        self._logprobs: list[dict[int, Logprob]] | None = [] if params.logprobs is not None else None
        self._cumulative: float | None = 0.0 if params.logprobs is not None else None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            [None] if params.prompt_logprobs is not None else None
        )

    @property
    def request(self) -> Request:
        """The request."""
        return self.sequence.request

    def add_token(self, token_id: int, logprobs: RowLogprobs | None) -> str | None:
        """Takes a sampled token; returns the stop string that it completed, if any."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(self._entry(token_id, logprobs, self.request.params.logprobs or 0))
            self._cumulative = (self._cumulative or 0.0) + logprobs.logprob
        if self._detokenizer is None:
            return None
        before, added = self._text, self._detokenizer.append(token_id)
        params = self.request.params
        if not params.stop or self.sequence.output_len <= params.min_tokens:
            self._text = self._detokenizer.text
            return None
        self._text, stop = cut_at_stop(params.stop, before, added)
        return stop

    def wanted_prompt_rows(self, chunk: ScheduledChunk, first: int) -> PromptRows | None:
        """Which logprobs of prompt tokens a chunk, whose tokens begin at `first` in the step, can give.

        Those given before a preemption are not asked for again.
        """
        if self._prompt_logprobs is None:
            return None
        begin = max(chunk.start, len(self._prompt_logprobs) - 1)
        end = min(chunk.start + chunk.num_tokens, self.sequence.prompt_len - 1)
        if begin >= end:
            return None
        targets = list(self.request.prompt_token_ids[begin + 1 : end + 1])
        return PromptRows(chunk.seq_id, first + begin - chunk.start, targets, begin)

    def add_prompt_logprobs(self, begin: int, rows: list[RowLogprobs]) -> None:
        """Takes logprobs of the prompt tokens that follow position `begin`."""
        assert self._prompt_logprobs is not None and len(self._prompt_logprobs) == begin + 1
        limit = self.request.params.prompt_logprobs or 0
        for token_id, row in zip(self.request.prompt_token_ids[begin + 1 :], rows, strict=False):
            self._prompt_logprobs.append(self._entry(token_id, row, limit))

    def finish(self) -> None:
        """Ends the text: what a stop string could have begun, or half a character, comes out now."""
        self.metrics.finished_time = time.monotonic()
        if self._detokenizer is not None and not isinstance(self.sequence.stop_reason, str):
            self._detokenizer.flush()
            self._text = self._detokenizer.text

    def output(self) -> RequestOutput:
        """The request's state now. While it runs, text that may be the beginning of a stop string is held back."""
        seq, request = self.sequence, self.request
        finished = seq.finish_reason is not None
        text = self._text
        if not finished and request.params.stop:
            text = text[: len(text) - num_held_chars(request.params.stop, text)]
        self.metrics.num_preemptions = seq.num_preemptions
        completion = CompletionOutput(
            index=seq.index,
            text=text,
            token_ids=seq.token_ids[seq.prompt_len :],
            cumulative_logprob=self._cumulative,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[completion],
            finished=finished,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            metrics=replace(self.metrics),
        )

    def _entry(self, token_id: int, row: RowLogprobs, limit: int) -> dict[int, Logprob]:
        entry = {
            top: Logprob(value, rank, self._decode(top))
            for rank, (top, value) in enumerate(
                zip(row.top_ids[:limit], row.top_logprobs[:limit], strict=True), start=1
            )
        }
        if token_id not in entry:
            entry[token_id] = Logprob(row.logprob, row.rank, self._decode(token_id))
        return entry

    def _decode(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else str(self._tokenizer.decode([token_id]))
