"""The trackers of all unfinished requests: from what a step gave to the outputs that tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pagedjax.device.runner import InFlight, PromptRows, StepOutput
from pagedjax.host.plan import SequenceUpdate, StepPlan
from pagedjax.host.scheduler import Scheduler
from pagedjax.output import RequestTracker
from pagedjax.request import RequestOutput, Sequence, SequenceGroup
from pagedjax.stats import Counters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Trackers:
    """One tracker for each unfinished request of a scheduler.

    Attributes:
        by_request: by its id, in order of arrival.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.by_request: dict[str, RequestTracker] = {}
        self._by_seq: dict[int, RequestTracker] = {}  # of samples; beams come and go
        self._scheduler = scheduler
        self._tokenizer = tokenizer

    def add(self, group: SequenceGroup) -> RequestTracker:
        """Tracks a request that was added to the scheduler."""
        return self._add(RequestTracker(group, self._tokenizer))

    def fork(self, parent: RequestTracker, group: SequenceGroup) -> RequestTracker:
        """Tracks a request that goes on from where its parent is."""
        return self._add(parent.fork(group))

    def _add(self, tracker: RequestTracker) -> RequestTracker:
        self.by_request[tracker.request.request_id] = tracker
        self._by_seq |= dict.fromkeys(tracker.samples, tracker)
        return tracker

    def close(self, tracker: RequestTracker) -> RequestOutput:
        """Forgets a request that has ended; its last output."""
        tracker.finish()
        del self.by_request[tracker.request.request_id]
        for seq_id in tracker.samples:
            del self._by_seq[seq_id]
        return tracker.output()

    def close_ended(self) -> list[RequestOutput]:
        """Closes all whose request has ended without a token to tell of it."""
        return [self.close(tracker) for tracker in list(self.by_request.values()) if tracker.finished]

    # ------------------------------------------------------------------ before a step

    def note_cached(self, fresh: Mapping[int, Sequence]) -> None:
        """Notes what requests found in the prefix cache when they were admitted for the first time."""
        for seq in fresh.values():
            if seq.num_cached and not seq.num_preemptions and not seq.output_len:
                metrics = self.by_request[seq.request.request_id].metrics
                metrics.num_cached_tokens = max(metrics.num_cached_tokens, min(seq.num_cached, seq.prompt_len - 1))

    def prompt_rows(self, plan: StepPlan) -> list[PromptRows]:
        """Which logprobs of prompts a plan can give that are wanted."""
        rows, first = [], 0
        for chunk in plan.chunks:
            tracker = self._by_seq.get(chunk.seq_id)
            if chunk.token_ids and tracker is not None:
                wanted = tracker.wanted_prompt_rows(chunk, first)
                if wanted:
                    rows.append(wanted)
            first += chunk.num_tokens
        return rows

    # ------------------------------------------------------------------ after a step

    def complete(
        self, step: InFlight, results: StepOutput, updates: list[SequenceUpdate], counters: Counters
    ) -> list[RequestOutput]:
        """What a step's results say, after the scheduler has taken them: the state of every request concerned."""
        self._add_prompt_logprobs(step, results)
        changed: dict[str, RequestTracker] = {}
        for update in updates:
            tracker = self._by_seq[update.seq_id]
            changed[tracker.request.request_id] = tracker
            if update.token_id is not None:
                counters.output_tokens += 1
                logprobs = results.logprobs.get(update.seq_id)
                stop = tracker.add_token(update.seq_id, update.token_id, logprobs)
                if stop is not None and update.finish_reason != "stop":
                    self._stop(tracker.samples[update.seq_id].sequence, stop)
        outputs = [self.close(tracker) if tracker.finished else tracker.output() for tracker in changed.values()]
        return outputs + self._complete_searches(step.plan, counters)

    def _complete_searches(self, plan: StepPlan, counters: Counters) -> list[RequestOutput]:
        """What the searches that ended in a step found; of the others nothing is said until then."""
        outputs = []
        for search in plan.beams:
            tracker = self.by_request.get(search.request_id)
            if tracker is None or tracker.group.beam is None:
                continue
            tracker.note_token()
            counters.output_tokens += len(tracker.group.sequences)
            if tracker.finished:
                outputs.append(self.close(tracker))
        return outputs

    def _stop(self, sequence: Sequence, stop: str) -> None:
        """Ends a sample at a stop string; one that its last allowed token completes still ends by "stop"."""
        if sequence.finish_reason is None:
            self._scheduler.finish_sequence(sequence.seq_id, "stop", stop)
        else:
            sequence.finish_reason, sequence.stop_reason = "stop", stop

    def _add_prompt_logprobs(self, step: InFlight, results: StepOutput) -> None:
        for wanted, rows in zip(step.prompt_rows, results.prompt_logprobs, strict=True):
            tracker = self._by_seq.get(wanted.seq_id)
            if tracker is not None:
                tracker.add_prompt_logprobs(wanted.begin, rows)
