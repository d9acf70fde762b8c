"""The engine: requests in, outputs out, one step at a time.

Host and device overlap: a step is planned and dispatched while the one before it still computes, and its tokens are
read back one step late. Sampled tokens do not leave the device to become the next step's input.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import jax

from pagedjax.config import EngineConfig
from pagedjax.device.backend import choose_backend
from pagedjax.device.kv_pool import PoolInfo, plan_pool
from pagedjax.device.memory import free_memory
from pagedjax.device.programs import num_compilations
from pagedjax.device.runner import InFlight, PromptRows, Runner, StepOutput
from pagedjax.errors import ConfigError, EngineDead, InvalidRequest, PagedJaxError, UnknownRequest
from pagedjax.host.allocator import PagedAllocator
from pagedjax.host.block_map import block_map
from pagedjax.host.plan import StepPlan
from pagedjax.host.scheduler import Scheduler
from pagedjax.intake import Intake, check_config, check_id, resolve_max_model_len
from pagedjax.interrupt import interrupts_deferred
from pagedjax.models.loader import LoadedModel
from pagedjax.output import RequestTracker
from pagedjax.prefixes import PREFIX_PARAMS, RegisteredPrefix, check_prefix_len, warn_shares_nothing
from pagedjax.prompt import Prompt
from pagedjax.request import BeamSearchParams, Request, RequestOutput, SamplingParams, Sequence
from pagedjax.scalars import shown
from pagedjax.stats import Counters, EngineStats


class Engine:
    """Serves requests for one model out of one paged KV pool.

    Args:
        model: from `pagedjax.models.loader.load_model`.
        config: what the user set.
        progress: say on stderr what is compiled, where that takes longer than a second.

    Raises:
        ConfigError: the pool leaves no block or does not fit into memory, or lengths contradict the model.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig | None = None, progress: bool = True) -> None:
        if not isinstance(model, LoadedModel):
            raise ConfigError(f"model={shown(model)} must be a LoadedModel, which load_model() gives")
        self.config = check_config(config)
        self.model_config = model.config
        self.params = model.params
        self.tokenizer = model.tokenizer
        self.source = model.source
        self.max_model_len = resolve_max_model_len(self.config, model.config)
        device = next(iter(jax.tree.leaves(self.params)[0].devices()))
        backend, _ = choose_backend(self.config, model.config)
        self.pool_info: PoolInfo = plan_pool(
            self.config, model.config, self.max_model_len, free_memory(device), backend.name
        )
        self.allocator = PagedAllocator(self.config.cache_config(self.pool_info.num_blocks))
        self.scheduler = Scheduler(self.config.scheduler_config(self.max_model_len), self.allocator)
        self.runner = Runner(model.config, self.config, self.params, self.pool_info, self.max_model_len, backend)
        self.runner.programs.progress = progress
        self._trackers: dict[str, RequestTracker] = {}
        self._intake = Intake(self.config, model.config, model.tokenizer, self.max_model_len, self.pool_info.num_slots)
        self._by_seq: dict[int, RequestTracker] = {}  # of samples; beams come and go
        self._prefixes: dict[str, RegisteredPrefix] = {}
        self._in_flight: InFlight | None = None
        self._undelivered: dict[str, RequestOutput] = {}  # the latest state of each request
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        self._closing: list[str] = []
        self._lock = threading.RLock()
        self._stepping = False
        self._num_requests = 0
        self.reset_stats()

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Puts a request at the end of the queue.

        Args:
            prompt: text, or {"prompt_token_ids": [...]} (with an optional "prompt", the text they came from).
            params: how to choose its tokens.
            request_id: any string that no unfinished request has; None counts up.
            arrival_time: in seconds, for metrics; None is now, on `time.monotonic`'s clock.
            cache_salt: only requests of the same salt share cached blocks.

        Returns:
            The request's id.

        Raises:
            InvalidRequest: the prompt is empty, has ids outside the vocabulary, wants more samples or beams than may
                run at the same time, or the id is taken.
            RequestTooLong: the prompt is longer than the model or the whole pool allows.
        """
        if request_id is not None:
            check_id(request_id)
        request = self._intake.read(prompt, params, arrival_time, cache_salt)
        with self._lock:
            return self._add(request, request_id)

    def _add(self, request: Request, request_id: str | None) -> str:
        self._intake.name(request, self._new_id() if request_id is None else request_id, self._num_requests)
        self._track(RequestTracker(self.scheduler.add(request), self.tokenizer))
        return request.request_id

    def _new_id(self) -> str:
        """The next number that no user has taken as an id."""
        return next(name for name in map(str, count(self._num_requests)) if not self.is_unfinished(name))

    def _track(self, tracker: RequestTracker) -> None:
        self._num_requests += 1
        self._trackers[tracker.request.request_id] = tracker
        self._by_seq |= dict.fromkeys(tracker.samples, tracker)

    def fork(self, request_id: str, new_request_id: str | None = None) -> str:
        """Adds a request that goes on from where another one is now, as the next sample of the same prompt.

        Both share all blocks, and the first to write to the last one copies it (paper section 4.4). What the fork
        draws is what sample 1, 2, ... of the same seed would, had it come the same way.

        Args:
            request_id: of an unfinished request with one sample.
            new_request_id: as in `add_request`.

        Returns:
            The new request's id.

        Raises:
            UnknownRequest: no such request, or it has finished.
            InvalidRequest: it has several samples or beams, or the new id is taken.
            OutOfSlots: `max_num_seqs` sequences run already; nothing is changed then.
        """
        check_id(request_id)
        if new_request_id is not None:
            check_id(new_request_id)
        with self._lock:
            self._settle()
            parent = self._trackers.get(request_id)
            if parent is None:
                raise UnknownRequest(f"request {request_id!r} has finished or never was: only unfinished ones can fork")
            request = replace(
                parent.request,
                request_id=self._new_id() if new_request_id is None else new_request_id,
                arrival_time=time.monotonic(),
                registers_prefix=False,
            )
            self._track(parent.fork(self.scheduler.fork(request_id, request)))
            return request.request_id

    def _settle(self) -> None:
        """Takes the results of the step in flight, so that all tokens are known."""
        with self._uninterrupted():
            finished, self._in_flight = self._in_flight, None
            self._deliver(self._complete(finished) if finished else [])

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request at once and frees its blocks; returns what it had put out.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        check_id(request_id)
        with self._lock:
            late = self._undelivered.pop(request_id, None)
            if request_id in self._trackers:
                self.scheduler.abort(request_id)
                return self._close(self._trackers[request_id])
        if late is not None:  # it had ended, but nobody had been told
            return late
        known = ", ".join(list(self._trackers)[:8]) or "none"
        raise UnknownRequest(f"request {request_id!r} is not running or waiting; unfinished requests: {known}")

    def is_unfinished(self, request_id: str) -> bool:
        """Whether this request waits or runs, or its end has not been delivered."""
        check_id(request_id)
        return request_id in self._trackers or request_id in self._undelivered

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step's outputs have not been delivered."""
        return bool(self._trackers or self._undelivered)

    # ------------------------------------------------------------------ steps

    def step(self) -> list[RequestOutput]:
        """Plans and dispatches one step, and takes the results of the one before it (with overlap off, its own).

        Ctrl-C inside is delivered at the end; outputs that could then not be returned come with the next call.

        Returns:
            The state of every request that has a new token or has ended, but for those that `open_mailbox` was called
            for; may be empty.

        Raises:
            EngineDead: a step before was cut short.
        """
        with self._lock:
            self._advance()
            outputs, self._undelivered = list(self._undelivered.values()), {}
        return outputs

    def open_mailbox(self, request_id: str, every: bool) -> None:
        """Keeps this request's outputs for `receive`, whoever makes the steps: many may wait for their own at a time.

        Args:
            request_id: of an unfinished request.
            every: keep each of its outputs, or only the latest.
        """
        check_id(request_id)
        with self._lock:
            early = self._undelivered.pop(request_id, None)
            self._mailboxes[request_id] = deque(() if early is None else (early,), None if every else 1)

    def receive(self, request_id: str) -> RequestOutput:
        """The next output in a request's mailbox; makes steps until there is one. Raises EngineDead, UnknownRequest."""
        check_id(request_id)
        while True:
            with self._lock:
                mailbox = self._mailboxes.get(request_id)
                if mailbox:
                    return mailbox.popleft()
                if mailbox is None or request_id not in self._trackers:
                    raise UnknownRequest(f"request {request_id!r} has ended, and its last output was received")
                self._advance()

    def close_mailbox(self, request_id: str) -> None:
        """Forgets a mailbox, and ends its request if it has not ended.

        Called while the same thread makes a step, as garbage collection may, it waits until the step is done.
        """
        check_id(request_id)
        with self._lock:
            if self._stepping:
                self._closing.append(request_id)
                return
            if self._mailboxes.pop(request_id, None) is not None and request_id in self._trackers:
                self.abort(request_id)

    def _advance(self) -> None:
        with self._uninterrupted():
            self._deliver(self._step())

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """What is done inside is done wholly, or the engine says from then on that it was not."""
        if self._stepping:
            raise EngineDead("a step of this engine was cut short, so host and device disagree: make a new engine")
        with interrupts_deferred():
            self._stepping = True
            yield
            self._stepping = False
            while self._closing:
                self.close_mailbox(self._closing.pop())

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                self._undelivered[output.request_id] = output
            else:
                mailbox.append(output)

    def _step(self) -> list[RequestOutput]:
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        self._counters.host_seconds += time.perf_counter() - began
        ended = [tracker for tracker in self._trackers.values() if tracker.finished] if plan and plan.failed else []
        failed = [self._close(tracker) for tracker in ended]
        dispatched = self._dispatch(plan) if plan and plan.chunks else None
        finished, self._in_flight = self._in_flight, dispatched
        outputs = failed + (self._complete(finished) if finished else [])
        if dispatched and not self.config.overlap:
            self._in_flight = None
            outputs += self._complete(dispatched)
        return outputs

    def _dispatch(self, plan: StepPlan) -> InFlight:
        began, compiled = time.perf_counter(), self.runner.programs.compile_seconds
        sequences = {c.seq_id: self.scheduler.roster.sequences[c.seq_id] for c in plan.chunks if c.fresh}
        self._note_cached(sequences)
        step = self.runner.execute(plan, sequences, self._prompt_rows(plan))
        counters = self._counters
        counters.num_steps += 1
        counters.prompt_tokens += sum(c.num_tokens for c in plan.chunks if c.token_ids)
        counters.copied_blocks += len(plan.copies)
        counters.count_usage(self.scheduler.usage(), self.allocator)
        compiling = self.runner.programs.compile_seconds - compiled
        counters.prepare_seconds += time.perf_counter() - began - compiling
        return step

    def _note_cached(self, fresh: Mapping[int, Sequence]) -> None:
        """Notes what requests found in the prefix cache when they were admitted for the first time."""
        for seq in fresh.values():
            if seq.num_cached and not seq.num_preemptions and not seq.output_len:
                metrics = self._trackers[seq.request.request_id].metrics
                metrics.num_cached_tokens = max(metrics.num_cached_tokens, min(seq.num_cached, seq.prompt_len - 1))

    def _prompt_rows(self, plan: StepPlan) -> list[PromptRows]:
        rows, first = [], 0
        for chunk in plan.chunks:
            tracker = self._by_seq.get(chunk.seq_id)
            if chunk.token_ids and tracker is not None:
                wanted = tracker.wanted_prompt_rows(chunk, first)
                if wanted:
                    rows.append(wanted)
            first += chunk.num_tokens
        return rows

    def _complete(self, step: InFlight) -> list[RequestOutput]:
        began = time.perf_counter()
        results = self.runner.collect(step)
        collected = time.perf_counter()
        updates = self.scheduler.update(results.result)
        updated = time.perf_counter()
        self._add_prompt_logprobs(step, results)
        changed: dict[str, RequestTracker] = {}
        for update in updates:
            tracker = self._by_seq[update.seq_id]
            changed[tracker.request.request_id] = tracker
            if update.token_id is not None:
                self._counters.output_tokens += 1
                logprobs = results.logprobs.get(update.seq_id)
                stop = tracker.add_token(update.seq_id, update.token_id, logprobs)
                if stop is not None and update.finish_reason != "stop":
                    self._stop(tracker.samples[update.seq_id].sequence, stop)
        outputs = [self._close(tracker) if tracker.finished else tracker.output() for tracker in changed.values()]
        outputs += self._complete_searches(step.plan)
        counters = self._counters
        counters.device_wait_seconds += collected - began
        counters.host_seconds += updated - collected
        counters.output_seconds += time.perf_counter() - updated
        return outputs

    def _complete_searches(self, plan: StepPlan) -> list[RequestOutput]:
        """What the searches that ended in a step found; of the others nothing is said until then."""
        outputs = []
        for search in plan.beams:
            tracker = self._trackers.get(search.request_id)
            if tracker is None or tracker.group.beam is None:
                continue
            tracker.note_token()
            self._counters.output_tokens += len(tracker.group.sequences)
            if tracker.finished:
                outputs.append(self._close(tracker))
        return outputs

    def _stop(self, sequence: Sequence, stop: str) -> None:
        """Ends a sample at a stop string; one that its last allowed token completes still ends by "stop"."""
        if sequence.finish_reason is None:
            self.scheduler.finish_sequence(sequence.seq_id, "stop", stop)
        else:
            sequence.finish_reason, sequence.stop_reason = "stop", stop

    def _add_prompt_logprobs(self, step: InFlight, results: StepOutput) -> None:
        for wanted, rows in zip(step.prompt_rows, results.prompt_logprobs, strict=True):
            tracker = self._by_seq.get(wanted.seq_id)
            if tracker is not None:
                tracker.add_prompt_logprobs(wanted.begin, rows)

    def _close(self, tracker: RequestTracker) -> RequestOutput:
        tracker.finish()
        del self._trackers[tracker.request.request_id]
        for seq_id in tracker.samples:
            del self._by_seq[seq_id]
        return tracker.output()

    # ------------------------------------------------------------------ prefixes

    def register_prefix(self, prefix: Prompt, cache_salt: str | None = None) -> RegisteredPrefix:
        """Computes the beginning of prompts to come and keeps its full blocks, with prefix caching on or off.

        Prompts that begin with the same tokens share the blocks (paper section 4.4, shared prefix). Warns if the
        prefix is shorter than a block: then there is nothing to share.

        Args:
            prefix: as a prompt. A tokenizer may join its last characters with what follows them in a prompt, so end it
                where the text has a natural break.
            cache_salt: only requests of the same salt share it.

        Raises:
            InvalidRequest: it is empty, or has ids outside the vocabulary.
            RequestTooLong: it is longer than the model or the whole pool allows.
            PagedJaxError: it could not be computed.
        """
        request = self._intake.read(prefix, PREFIX_PARAMS, None, cache_salt)
        size, token_ids = self.config.block_size, request.prompt_token_ids
        check_prefix_len(len(token_ids), self.max_model_len, self.pool_info)
        num_blocks = len(token_ids) // size
        with self._lock:
            numbers = count(self._num_requests)
            names = (f"prefix-{number}" for number in numbers)
            name = next(name for name in names if not (self.is_unfinished(name) or name in self._prefixes))
            if num_blocks:
                request.prompt_token_ids = token_ids[: num_blocks * size]
                request.max_len, request.registers_prefix = num_blocks * size + 1, True
                self._add(request, name)
                self.open_mailbox(name, every=False)
            else:
                self._num_requests += 1
        if num_blocks:
            self._await_prefix(name)
        else:
            warn_shares_nothing(len(token_ids), size)
        registered = RegisteredPrefix(name, token_ids, num_blocks * size, num_blocks, cache_salt)
        self._prefixes[name] = registered
        return registered

    def _await_prefix(self, name: str) -> None:
        """Makes steps until a prefix is computed; one that is not leaves nothing pinned."""
        reason: object = None
        try:
            while not (output := self.receive(name)).finished:
                pass
            reason = output.outputs[0].stop_reason or output.outputs[0].finish_reason
        finally:
            self.close_mailbox(name)
            with self._lock:
                if reason != "length" and name in self.allocator.pins():
                    self.allocator.unpin(name)
        if reason != "length":
            raise PagedJaxError(f"the prefix could not be computed: {reason}")

    def unregister_prefix(self, prefix: RegisteredPrefix) -> None:
        """Lets go of a registered prefix; running requests that share its blocks keep them.

        Raises:
            InvalidRequest: it is not registered, or no longer.
        """
        with self._lock:
            if not isinstance(prefix, RegisteredPrefix) or self._prefixes.get(prefix.name) is not prefix:
                raise InvalidRequest(
                    f"prefix={shown(prefix)} is not one that register_prefix gave and that is registered"
                )
            del self._prefixes[prefix.name]
            if prefix.num_blocks:
                self.allocator.unpin(prefix.name)

    def reset_prefix_cache(self) -> None:
        """Forgets the content of all cached blocks.

        Raises:
            BlocksInUse: requests run, or prefixes are registered; nothing is changed then.
        """
        with self._lock:
            self.allocator.reset_prefix_cache()

    # ------------------------------------------------------------------ looking inside

    def warmup(self, progress: bool = True) -> dict[str, float]:
        """Compiles every program that any step could need, largest first, and says on stderr what it compiled.

        Args:
            progress: False says nothing.

        Returns:
            {program: seconds} of what was compiled now; what was there already is not in it.
        """
        return self.runner.warmup(progress)

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """The compiled programs by name, for `memory_analysis()` and the like."""
        return self.runner.programs.compiled()

    def block_map(self) -> list[dict[str, Any]]:
        """Which physical block holds which tokens of which sequences, as plain data; see `host.block_map`."""
        with self._lock:
            return block_map(self.scheduler, self.allocator)

    def reset_stats(self) -> None:
        """Begins the counters of `stats()` anew."""
        with self._lock:
            self._counters = Counters.begin(*self._counted())

    def stats(self) -> EngineStats:
        """Counters and the pool's state now."""
        with self._lock:
            return self._counters.stats(*self._counted())

    def _counted(self) -> tuple[int, float, Scheduler, PagedAllocator]:
        return num_compilations(), self.runner.programs.compile_seconds, self.scheduler, self.allocator
