"""From sampled token ids to `RequestOutput`: text, stop strings, logprobs, metrics. One tracker per request."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pagedjax.detokenizer import Detokenizer, cut_at_stop, num_held_chars
from pagedjax.device.runner import PromptRows, RowLogprobs
from pagedjax.host.beam import Hypothesis
from pagedjax.host.plan import ScheduledChunk
from pagedjax.output_data import dump_logprobs, load_logprobs, load_metrics
from pagedjax.request import (
    CompletionOutput,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    Sequence,
    SequenceGroup,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SampleTracker:
    """What one sample of a request has put out so far.

    Attributes:
        sequence: the scheduler's, whose tokens are reported.
    """

    def __init__(self, sequence: Sequence, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.sequence = sequence
        self._tokenizer = tokenizer
        request = sequence.request
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids) if tokenizer else None
        self._text = ""
        wanted = request.params.logprobs is not None
        self._logprobs: list[dict[int, Logprob]] | None = [] if wanted else None
        self._cumulative: float | None = 0.0 if wanted else None

    def fork(self, sequence: Sequence) -> SampleTracker:
        """A tracker for a sequence that goes on from this one's tokens."""
        child = SampleTracker(sequence, self._tokenizer)
        child._replay_tokens()
        child._text, child._cumulative = self._text, self._cumulative
        child._logprobs = None if self._logprobs is None else list(self._logprobs)
        return child

    def snapshot(self) -> dict[str, Any]:
        """As plain data, but for the tokens, which the sequence has."""
        logprobs = None if self._logprobs is None else [dump_logprobs(entry) for entry in self._logprobs]
        return {"text": self._text, "logprobs": logprobs, "cumulative": self._cumulative}

    def restore(self, data: dict[str, Any]) -> None:
        """Takes over a snapshot of a tracker of the same sequence."""
        self._replay_tokens()
        logprobs = data["logprobs"]
        self._text, self._cumulative = data["text"], data["cumulative"]
        self._logprobs = None if logprobs is None else [load_logprobs(entry) for entry in logprobs]

    def _replay_tokens(self) -> None:
        if self._detokenizer is not None:
            for token_id in self.sequence.token_ids[self.sequence.prompt_len :]:
                self._detokenizer.append(token_id)

    def add_token(self, token_id: int, logprobs: RowLogprobs | None) -> str | None:
        """Takes a sampled token; returns the stop string that it completed, if any."""
        params = self.sequence.request.params
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprob_entry(token_id, logprobs, params.logprobs or 0, self._tokenizer))
            self._cumulative = (self._cumulative or 0.0) + logprobs.logprob
        if self._detokenizer is None:
            return None
        before, added = self._text, self._detokenizer.append(token_id)
        if not params.stop or self.sequence.output_len <= params.min_tokens:
            self._text = self._detokenizer.text
            return None
        self._text, stop = cut_at_stop(params.stop, before, added)
        return stop

    def finish(self) -> None:
        """Ends the text: what a stop string could have begun, or half a character, comes out now."""
        if self._detokenizer is not None and not isinstance(self.sequence.stop_reason, str):
            self._detokenizer.flush()
            self._text = self._detokenizer.text

    def completion(self) -> CompletionOutput:
        """The output now. While it runs, text that may be the beginning of a stop string is held back."""
        seq, text = self.sequence, self._text
        stops = seq.request.params.stop
        if seq.finish_reason is None and stops:
            text = text[: len(text) - num_held_chars(stops, text)]
        return CompletionOutput(
            index=seq.index,
            text=text,
            token_ids=seq.token_ids[seq.prompt_len :],
            cumulative_logprob=self._cumulative,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )


class RequestTracker:
    """What one request has put out so far.

    Attributes:
        group: the scheduler's.
        metrics: times of its life so far.
        samples: by sequence id; none for a beam search, whose outputs are there at its end.
    """

    def __init__(self, group: SequenceGroup, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.group = group
        self.metrics = RequestMetrics(self.request.arrival_time)
        self.samples: dict[int, SampleTracker] = {}
        if group.beam is None:
            self.samples = {seq.seq_id: SampleTracker(seq, tokenizer) for seq in group.sequences}
        self._tokenizer = tokenizer
        wanted = self.request.params.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if wanted else None

    @property
    def request(self) -> Request:
        """The request."""
        return self.group.request

    @property
    def finished(self) -> bool:
        """Whether all its sequences have ended."""
        return not self.group.unfinished

    def fork(self, group: SequenceGroup) -> RequestTracker:
        """A tracker for a request that was forked from this one."""
        child = RequestTracker(group, self._tokenizer)
        (sample,), (sequence,) = self.samples.values(), group.sequences
        child.samples = {sequence.seq_id: sample.fork(sequence)}
        child.metrics.num_cached_tokens = self.metrics.num_cached_tokens
        child._prompt_logprobs = None if self._prompt_logprobs is None else list(self._prompt_logprobs)
        return child

    def snapshot(self) -> dict[str, Any]:
        """As plain data, but for what the scheduler knows of the request."""
        logprobs = self._prompt_logprobs
        return {
            "metrics": asdict(self.metrics),
            "samples": [[seq_id, sample.snapshot()] for seq_id, sample in self.samples.items()],
            "prompt_logprobs": None if logprobs is None else [entry and dump_logprobs(entry) for entry in logprobs],
        }

    def restore(self, data: dict[str, Any], seconds: float) -> None:
        """Takes over a snapshot of a tracker of the same request, on a clock that is so many seconds ahead."""
        self.metrics = load_metrics(data["metrics"], seconds)
        self.request.arrival_time += seconds
        for seq_id, sample in data["samples"]:
            self.samples[seq_id].restore(sample)
        logprobs = data["prompt_logprobs"]
        self._prompt_logprobs = None if logprobs is None else [entry and load_logprobs(entry) for entry in logprobs]

    def add_token(self, seq_id: int, token_id: int, logprobs: RowLogprobs | None) -> str | None:
        """Takes a sampled token; returns the stop string that it completed, if any."""
        self.note_token()
        return self.samples[seq_id].add_token(token_id, logprobs)

    def note_token(self) -> None:
        """Notes the time of the first token, if this is it."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()

    def wanted_prompt_rows(self, chunk: ScheduledChunk, first: int) -> PromptRows | None:
        """Which logprobs of prompt tokens a chunk, whose tokens begin at `first` in the step, can give.

        Those given before a preemption are not asked for again, nor those that another sample's chunk gives.
        """
        if self._prompt_logprobs is None:
            return None
        begin = max(chunk.start, len(self._prompt_logprobs) - 1)
        end = min(chunk.start + chunk.num_tokens, len(self.request.prompt_token_ids) - 1)
        if begin >= end:
            return None
        targets = list(self.request.prompt_token_ids[begin + 1 : end + 1])
        return PromptRows(chunk.seq_id, first + begin - chunk.start, targets, begin)

    def add_prompt_logprobs(self, begin: int, rows: list[RowLogprobs]) -> None:
        """Takes logprobs of the prompt tokens that follow position `begin`."""
        assert self._prompt_logprobs is not None and len(self._prompt_logprobs) > begin
        limit, known = self.request.params.prompt_logprobs or 0, len(self._prompt_logprobs)
        # Those known already were computed twice, around a preemption.
        for token_id, row in zip(self.request.prompt_token_ids[known:], rows[known - begin - 1 :], strict=False):
            self._prompt_logprobs.append(logprob_entry(token_id, row, limit, self._tokenizer))

    def finish(self) -> None:
        """Ends all texts."""
        self.metrics.finished_time = time.monotonic()
        for sample in self.samples.values():
            sample.finish()

    def output(self) -> RequestOutput:
        """The request's state now."""
        group, request = self.group, self.request
        if group.beam is None:
            outputs = [sample.completion() for sample in self.samples.values()]
        else:
            outputs = self._beams(group.beam.hypotheses)
        self.metrics.num_preemptions = sum(seq.num_preemptions for seq in group.sequences)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            metrics=replace(self.metrics),
        )

    def _beams(self, hypotheses: list[Hypothesis]) -> list[CompletionOutput]:
        """The finished outputs of a search; of one that was cut short, also the beams as far as they got."""
        found = [
            self._beam(list(h.token_ids), h.logprob, h.finish_reason, None, index, h.score)
            for index, h in enumerate(hypotheses)
        ]
        beam, beams = self.group.beam, self.group.sequences
        if beam is not None and beams[0].finish_reason not in ("stop", "length"):
            for logprob, seq in zip(beam.logprobs, beams, strict=True):
                tokens, ended = seq.token_ids[seq.prompt_len :], seq.finish_reason
                found.append(self._beam(tokens, logprob, ended, seq.stop_reason, len(found), None))
        return found

    def _beam(
        self,
        token_ids: list[int],
        logprob: float,
        finish_reason: str | None,
        stop_reason: str | int | None,
        index: int,
        score: float | None,
    ) -> CompletionOutput:
        text = ""
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, self.request.prompt_token_ids)
            for token_id in token_ids:
                detokenizer.append(token_id)
            detokenizer.flush()
            text = detokenizer.text
        return CompletionOutput(index, text, token_ids, logprob, None, finish_reason, stop_reason, score)


def logprob_entry(
    token_id: int, row: RowLogprobs, limit: int, tokenizer: PreTrainedTokenizerBase | None
) -> dict[int, Logprob]:
    """Logprobs of one position: of the `limit` most likely tokens, and of the one that stands there."""

    def decode(token: int) -> str | None:
        return None if tokenizer is None else str(tokenizer.decode([token]))

    entry = {
        top: Logprob(value, rank, decode(top))
        for rank, (top, value) in enumerate(zip(row.top_ids[:limit], row.top_logprobs[:limit], strict=True), start=1)
    }
    if token_id not in entry:
        entry[token_id] = Logprob(row.logprob, row.rank, decode(token_id))
    return entry
