"""The engine: requests in, outputs out, one step at a time.

Host and device overlap: a step is planned and dispatched while the one before it still computes, and its tokens are
read back one step late. Sampled tokens do not leave the device to become the next step's input.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax

from pagedjax.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagedjax.device.backend import choose_backend
from pagedjax.device.kv_pool import PoolInfo, plan_pool
from pagedjax.device.memory import free_memory
from pagedjax.device.programs import num_compilations
from pagedjax.device.runner import InFlight, PromptRows, Runner, StepOutput
from pagedjax.errors import ConfigError, EngineDead, InvalidRequest, UnknownRequest
from pagedjax.host.allocator import KVUsage, PagedAllocator
from pagedjax.host.plan import StepPlan
from pagedjax.host.scheduler import Scheduler
from pagedjax.interrupt import interrupts_deferred
from pagedjax.models.loader import LoadedModel
from pagedjax.models.progress import bar
from pagedjax.output import RequestTracker
from pagedjax.prompt import Prompt, check_tokens, read_prompt
from pagedjax.request import Request, RequestOutput, SamplingParams
from pagedjax.scalars import is_number, plain, shown

_SEED_STRIDE = 0x9E3779B97F4A7C15  # spreads the requests' default seeds (Weyl sequence with the golden ratio)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was made, or since `reset_stats()`. Times in seconds of wall clock.

    Attributes:
        num_steps: steps dispatched.
        prompt_tokens: prompt tokens computed, again after a preemption.
        output_tokens: tokens given to requests.
        host_seconds: in the scheduler, planning and updating.
        prepare_seconds: making arrays and dispatching programs.
        device_wait_seconds: waiting for results.
        output_seconds: detokenising and making outputs.
        compile_seconds: compiling programs in steps and `warmup()`; in none of the other times.
        num_compilations: programs compiled (or taken from the persistent cache).
        usage: of the pool's slots now.
        peak_blocks: blocks held at most at the same time.
        kv_utilisation: mean over steps of slots holding a token's K and V / slots held; 0 before the first step.
    """

    num_waiting: int
    num_running: int
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    num_preemptions: int
    host_seconds: float
    prepare_seconds: float
    device_wait_seconds: float
    output_seconds: float
    compile_seconds: float
    num_compilations: int
    usage: KVUsage
    num_blocks: int
    peak_blocks: int
    kv_utilisation: float


@dataclass(slots=True)
class _Counters:
    num_compilations: int
    compile_seconds: float
    num_preemptions: int
    num_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    host_seconds: float = 0.0
    prepare_seconds: float = 0.0
    device_wait_seconds: float = 0.0
    output_seconds: float = 0.0
    peak_slots: int = 0
    utilisation_sum: float = 0.0


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
        scheduler_config = SchedulerConfig(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_chunked_prefill=self.config.enable_chunked_prefill,
        )
        device = next(iter(jax.tree.leaves(self.params)[0].devices()))
        backend, _ = choose_backend(self.config, model.config)
        self.pool_info: PoolInfo = plan_pool(
            self.config, model.config, self.max_model_len, free_memory(device), backend.name
        )
        cache = CacheConfig(self.config.block_size, self.pool_info.num_blocks, self.config.watermark)
        self.scheduler = Scheduler(scheduler_config, PagedAllocator(cache))
        self.runner = Runner(model.config, self.config, self.params, self.pool_info, self.max_model_len, backend)
        self.runner.programs.progress = progress
        self._trackers: dict[str, RequestTracker] = {}
        self._by_seq: dict[int, RequestTracker] = {}
        self._in_flight: InFlight | None = None
        self._undelivered: dict[str, RequestOutput] = {}  # the latest state of each request
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        self._lock = threading.RLock()
        self._stepping = False
        self._num_requests = 0
        self.reset_stats()

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        arrival_time: float | None = None,
    ) -> str:
        """Puts a request at the end of the queue.

        Args:
            prompt: text, or {"prompt_token_ids": [...]} (with an optional "prompt", the text they came from).
            params: how to choose its tokens.
            request_id: any string that no unfinished request has; None counts up.
            arrival_time: in seconds, for metrics; None is now, on `time.monotonic`'s clock.

        Returns:
            The request's id.

        Raises:
            InvalidRequest: the prompt is empty, has ids outside the vocabulary, or the id is taken.
            RequestTooLong: the prompt is longer than the model or the whole pool allows.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params={shown(params)} must be SamplingParams")
        if request_id is not None:
            _check_id(request_id)
        if arrival_time is not None and not is_number(plain(arrival_time)):
            raise InvalidRequest(f"arrival_time={shown(arrival_time)} must be a number of seconds, or None")
        text, token_ids = read_prompt(prompt, self.tokenizer)
        check_tokens(token_ids, params, self.model_config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(f"stop={params.stop!r} needs a tokenizer, and this model came without one")
        with self._lock:
            return self._add(text, token_ids, params, request_id, arrival_time)

    def _add(
        self,
        text: str | None,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        request_id: str | None,
        arrival_time: float | None,
    ) -> str:
        number = self._num_requests
        if request_id is None:  # a user may have taken any number
            request_id = next(name for name in map(str, count(number)) if not self.is_unfinished(name))
        request = Request(
            request_id=request_id,
            number=number,
            prompt_token_ids=token_ids,
            params=params,
            seed=self._request_seed(params, number),
            stop_ids=frozenset(params.stop_token_ids).union(
                () if params.ignore_eos else self.model_config.eos_token_ids
            ),
            max_len=self._max_len(len(token_ids), params),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            prompt=text,
        )
        sequence = self.scheduler.add(request).sequences[0]
        self._num_requests += 1
        tracker = RequestTracker(sequence, self.tokenizer)
        self._trackers[request.request_id] = self._by_seq[sequence.seq_id] = tracker
        return request.request_id

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request at once and frees its blocks; returns what it had put out.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        _check_id(request_id)
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
        _check_id(request_id)
        return request_id in self._trackers or request_id in self._undelivered

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step's outputs have not been delivered."""
        return bool(self._trackers or self._undelivered)

    def _max_len(self, prompt_len: int, params: SamplingParams) -> int:
        if params.max_tokens is not None:
            return min(self.max_model_len, prompt_len + params.max_tokens)
        # The last token of a sequence is never computed, so it needs no slot.
        return min(self.max_model_len, max(self.pool_info.num_slots, prompt_len) + 1)

    def _request_seed(self, params: SamplingParams, number: int) -> int:
        if params.seed is not None:
            return params.seed
        return (self.config.seed + (number + 1) * _SEED_STRIDE) % 2**63

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
        _check_id(request_id)
        with self._lock:
            early = self._undelivered.pop(request_id, None)
            self._mailboxes[request_id] = deque(() if early is None else (early,), None if every else 1)

    def receive(self, request_id: str) -> RequestOutput:
        """The next output in a request's mailbox; makes steps until there is one. Raises EngineDead, UnknownRequest."""
        _check_id(request_id)
        while True:
            with self._lock:
                mailbox = self._mailboxes.get(request_id)
                if mailbox:
                    return mailbox.popleft()
                if mailbox is None or request_id not in self._trackers:
                    raise UnknownRequest(f"request {request_id!r} has ended, and its last output was received")
                self._advance()

    def close_mailbox(self, request_id: str) -> None:
        """Forgets a mailbox, and ends its request if it has not ended."""
        _check_id(request_id)
        with self._lock:
            if self._mailboxes.pop(request_id, None) is not None and request_id in self._trackers:
                self.abort(request_id)

    def _advance(self) -> None:
        if self._stepping:
            raise EngineDead("a step of this engine was cut short, so host and device disagree: make a new engine")
        with interrupts_deferred():
            self._stepping = True
            for output in self._step():
                mailbox = self._mailboxes.get(output.request_id)
                if mailbox is None:
                    self._undelivered[output.request_id] = output
                else:
                    mailbox.append(output)
            self._stepping = False

    def _step(self) -> list[RequestOutput]:
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        self._counters.host_seconds += time.perf_counter() - began
        failed = [self._close(self._by_seq[seq_id]) for seq_id in plan.failed] if plan else []
        dispatched = self._dispatch(plan) if plan and plan.chunks else None
        finished, self._in_flight = self._in_flight, dispatched
        outputs = failed + (self._complete(finished) if finished else [])
        if dispatched and not self.config.overlap:
            self._in_flight = None
            outputs += self._complete(dispatched)
        return outputs

    def _dispatch(self, plan: StepPlan) -> InFlight:
        began, compiled = time.perf_counter(), self.runner.programs.compile_seconds
        sequences = {c.seq_id: self._by_seq[c.seq_id].sequence for c in plan.chunks if c.fresh}
        step = self.runner.execute(plan, sequences, self._prompt_rows(plan))
        counters = self._counters
        counters.num_steps += 1
        counters.prompt_tokens += sum(c.num_tokens for c in plan.chunks if c.token_ids)
        self._count_usage(self.scheduler.usage())
        compiling = self.runner.programs.compile_seconds - compiled
        counters.prepare_seconds += time.perf_counter() - began - compiling
        return step

    def _prompt_rows(self, plan: StepPlan) -> list[PromptRows]:
        rows, first = [], 0
        for chunk in plan.chunks:
            if chunk.token_ids:
                wanted = self._by_seq[chunk.seq_id].wanted_prompt_rows(chunk, first)
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
        outputs = []
        for update in updates:
            tracker = self._by_seq[update.seq_id]
            if update.token_id is not None:
                self._counters.output_tokens += 1
                stop = tracker.add_token(update.token_id, results.logprobs.get(update.seq_id))
                if stop is not None and update.finish_reason != "stop":
                    self._stop(tracker, stop)
            ended = tracker.sequence.finish_reason is not None
            outputs.append(self._close(tracker) if ended else tracker.output())
        counters = self._counters
        counters.device_wait_seconds += collected - began
        counters.host_seconds += updated - collected
        counters.output_seconds += time.perf_counter() - updated
        return outputs

    def _stop(self, tracker: RequestTracker, stop: str) -> None:
        """Ends a request at a stop string; one that its last allowed token completes still ends by "stop"."""
        sequence = tracker.sequence
        if sequence.finish_reason is None:
            self.scheduler.finish(tracker.request.request_id, "stop", stop)
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
        del self._by_seq[tracker.sequence.seq_id]
        return tracker.output()

    # ------------------------------------------------------------------ looking inside

    def warmup(self, progress: bool = True) -> dict[str, float]:
        """Compiles every program that any step could need, largest first, and says on stderr what it compiled.

        Args:
            progress: False says nothing.

        Returns:
            {program: seconds} of what was compiled now; what was there already is not in it.
        """
        programs, calls = self.runner.programs, self.runner.program_calls()
        before, announced = set(programs.seconds), programs.progress
        programs.progress = progress and not sys.stderr.isatty()  # there, the bar says it
        try:
            for compile_one in bar(calls, "compiling", progress, unit="program"):
                compile_one()
        finally:
            programs.progress = announced
        compiled = {name: seconds for name, seconds in programs.seconds.items() if name not in before}
        if progress and compiled:
            listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in compiled.items())
            print(f"compiled {len(compiled)} programs in {sum(compiled.values()):.0f} s: {listed}", file=sys.stderr)
        return compiled

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """The compiled programs by name, for `memory_analysis()` and the like."""
        return self.runner.programs.compiled()

    def reset_stats(self) -> None:
        """Begins the counters of `stats()` anew."""
        compiled = self.runner.programs.compile_seconds
        self._counters = _Counters(num_compilations(), compiled, self.scheduler.num_preemptions)

    def stats(self) -> EngineStats:
        """Counters and the pool's state now."""
        c = self._counters
        return EngineStats(
            num_waiting=self.scheduler.num_waiting,
            num_running=self.scheduler.num_running,
            num_steps=c.num_steps,
            prompt_tokens=c.prompt_tokens,
            output_tokens=c.output_tokens,
            num_preemptions=self.scheduler.num_preemptions - c.num_preemptions,
            host_seconds=c.host_seconds,
            prepare_seconds=c.prepare_seconds,
            device_wait_seconds=c.device_wait_seconds,
            output_seconds=c.output_seconds,
            compile_seconds=self.runner.programs.compile_seconds - c.compile_seconds,
            num_compilations=num_compilations() - c.num_compilations,
            usage=self.scheduler.usage(),
            num_blocks=self.pool_info.num_blocks,
            peak_blocks=c.peak_slots // self.config.block_size,
            kv_utilisation=c.utilisation_sum / c.num_steps if c.num_steps else 0.0,
        )

    def _count_usage(self, usage: KVUsage) -> None:
        held = usage.token_states + usage.reserved + usage.internal_fragmentation
        self._counters.peak_slots = max(self._counters.peak_slots, held)
        self._counters.utilisation_sum += usage.token_states / held if held else 0.0


def _check_id(request_id: Any) -> None:
    if not isinstance(request_id, str):
        raise InvalidRequest(f"request_id={shown(request_id)} must be a string")
