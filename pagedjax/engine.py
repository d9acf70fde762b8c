"""The engine: requests in, outputs out, one step at a time.

Host and device overlap: a step is planned and dispatched while the one before it still computes, and its tokens are
read back one step late. Sampled tokens do not leave the device to become the next step's input.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import jax

from pagedjax import __version__
from pagedjax.baselines import make_allocator
from pagedjax.config import EngineConfig, require
from pagedjax.device.backend import choose_backend
from pagedjax.device.kv_pool import PoolInfo, plan_pool
from pagedjax.device.memory import free_memory
from pagedjax.device.programs import num_compilations
from pagedjax.device.runner import InFlight, Runner
from pagedjax.errors import ConfigError, EngineDead, SnapshotError, UnknownRequest
from pagedjax.event_log import EventLog
from pagedjax.exclusive import Exclusive
from pagedjax.host.block_map import block_map
from pagedjax.host.plan import StepPlan
from pagedjax.host.protocol import KVAllocator
from pagedjax.host.scheduler import Scheduler
from pagedjax.intake import Intake, check_config, check_id, resolve_max_model_len
from pagedjax.interrupt import interrupts_deferred
from pagedjax.mailbox import Mailboxes
from pagedjax.models.loader import LoadedModel
from pagedjax.prefixes import Prefixes, RegisteredPrefix
from pagedjax.prompt import Prompt
from pagedjax.recorder import RecordingScheduler
from pagedjax.request import BeamSearchParams, Request, RequestOutput, SamplingParams
from pagedjax.scalars import shown
from pagedjax.snapshots.files import snapshot_root, write_snapshot
from pagedjax.snapshots.periodic import PeriodicSnapshots
from pagedjax.snapshots.restore import restore_engine
from pagedjax.snapshots.state import engine_state
from pagedjax.stats import Counters, EngineStats
from pagedjax.tracking import Trackers

_LOG = logging.getLogger("pagedjax")


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
        self.cache_config = self.config.cache_config(self.pool_info.num_blocks, self.pool_info.num_host_blocks)
        self.allocator = make_allocator(self.cache_config, self.max_model_len)
        self.scheduler = self._make_scheduler()
        self.runner = Runner(model.config, self.config, self.params, self.pool_info, self.max_model_len, backend)
        self.runner.programs.progress = progress
        self._trackers = Trackers(self.scheduler, self.tokenizer)
        self._intake = Intake(self.config, model.config, model.tokenizer, self.max_model_len, self.pool_info.num_slots)
        self._prefixes = Prefixes(self)
        self._in_flight: InFlight | None = None
        self._mail = Mailboxes()
        self._snapshots = PeriodicSnapshots.of(self.config, self.save)
        self._failed_at: dict[str, int] = {}  # of each request: tokens known in the last step of its that failed
        self._fingerprint: str | None = None
        self._device_lost = False
        self._lock = Exclusive()
        self._stepping = False
        self._num_requests = 0
        self.reset_stats()

    def _make_scheduler(self) -> Scheduler:
        """The scheduler; with an event log, one that writes down what it is told and what it plans."""
        config = self.config.scheduler_config(self.max_model_len)
        if self.config.event_log is None:
            return Scheduler(config, self.allocator)
        header = {
            "config": {"cache": asdict(self.cache_config), "scheduler": asdict(config)},
            "engine": {"config": asdict(self.config), "model": self.source, "pagedjax": __version__},
        }
        return RecordingScheduler(config, self.allocator, EventLog(self.config.event_log, header))

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
        self._trackers.add(self.scheduler.add(request))
        self._num_requests += 1
        return request.request_id

    def _new_id(self) -> str:
        """The next number that no user has taken as an id."""
        return next(name for name in map(str, count(self._num_requests)) if not self.is_unfinished(name))

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
            parent = self._trackers.by_request.get(request_id)
            if parent is None:
                raise UnknownRequest(f"request {request_id!r} has finished or never was: only unfinished ones can fork")
            request = replace(
                parent.request,
                request_id=self._new_id() if new_request_id is None else new_request_id,
                arrival_time=time.monotonic(),
                registers_prefix=False,
            )
            self._trackers.fork(parent, self.scheduler.fork(request_id, request))
            self._num_requests += 1
            return request.request_id

    def _settle(self) -> None:
        """Takes the results of the step in flight, so that all tokens are known."""
        with self._uninterrupted():
            self._guarded(lambda: self._complete(self._take_in_flight()))

    def _take_in_flight(self) -> InFlight | None:
        step, self._in_flight = self._in_flight, None
        return step

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request at once and frees its blocks; returns what it had put out.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        check_id(request_id)
        with self._lock:
            late = self._mail.undelivered.pop(request_id, None)
            if request_id in self._trackers.by_request:
                self.scheduler.abort(request_id)
                return self._trackers.close(self._trackers.by_request[request_id])
        if late is not None:  # it had ended, but nobody had been told
            return late
        known = ", ".join(list(self._trackers.by_request)[:8]) or "none"
        raise UnknownRequest(f"request {request_id!r} is not running or waiting; unfinished requests: {known}")

    def is_unfinished(self, request_id: str) -> bool:
        """Whether this request waits or runs, or its end has not been delivered."""
        check_id(request_id)
        return request_id in self._trackers.by_request or request_id in self._mail.undelivered

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step's outputs have not been delivered."""
        return bool(self._trackers.by_request or self._mail.undelivered)

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
            return self._mail.take()

    def open_mailbox(self, request_id: str, every: bool) -> None:
        """Keeps this request's outputs for `receive`, whoever makes the steps: many may wait for their own at a time.

        Args:
            request_id: of an unfinished request.
            every: keep each of its outputs, or only the latest.
        """
        check_id(request_id)
        with self._lock:
            self._mail.open(request_id, every)

    def receive(self, request_id: str) -> RequestOutput:
        """The next output in a request's mailbox; makes steps until there is one. Raises EngineDead, UnknownRequest."""
        check_id(request_id)
        while True:
            with self._lock:
                mailbox = self._mail.get(request_id)
                if mailbox:
                    return mailbox.popleft()
                if mailbox is None or request_id not in self._trackers.by_request:
                    raise UnknownRequest(f"request {request_id!r} has ended, and its last output was received")
                self._advance()

    def close_mailbox(self, request_id: str) -> None:
        """Forgets a mailbox, and ends its request if it has not ended.

        Called while the same thread is inside of the engine, as garbage collection may, it waits until that is done.
        """
        check_id(request_id)
        self._lock.when_free(lambda: self._close_mailbox(request_id))

    def _close_mailbox(self, request_id: str) -> None:
        if self._mail.close(request_id) and request_id in self._trackers.by_request and not self._stepping:
            self.abort(request_id)

    def _advance(self) -> None:
        with self._uninterrupted():
            self._guarded(self._step)
        if self._snapshots is not None:
            self._snapshots.save_if_due(self.scheduler.num_steps)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Makes a step; after an error, which is logged, the engine goes on with what it can save."""
        try:
            step()
        except Exception as error:
            self._recover(error)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """At once, so that nothing is lost when what comes next fails; of prefixes computed again nobody is told."""
        self._mail.deliver(output for output in outputs if output.request_id not in self._prefixes.by_name)

    def _recover(self, error: Exception) -> None:
        """After a step that failed: all is computed again, but who got no further since its last failure is ended.

        Nothing on the device can be relied on: it may have failed with the pool in its hands.
        """
        self._counters.num_failed_steps += 1
        known = self.scheduler.step_requests()
        stuck = [request_id for request_id, tokens in known.items() if self._failed_at.get(request_id) == tokens]
        self._failed_at = {name: n for name, n in self._failed_at.items() if name in self._trackers.by_request} | known
        self._in_flight = None
        self._device_lost = True
        self.scheduler.recover()
        self._prefixes.compute_again()
        ended = f"; {len(stuck)} end with this error, which is their second" if stuck else ""
        # As text: a record that holds the exception keeps alive all that it passed, such as streams that are dropped.
        shown_error = "".join(traceback.format_exception(error)).rstrip()
        message = "a step with %s request(s) failed%s; all others are computed again\n%s"
        _LOG.error(message, len(known), ended, shown_error)
        for request_id in stuck:
            self.scheduler.finish(request_id, "error", f"the step failed: {type(error).__name__}: {error}")
        self._deliver(self._trackers.close_ended())

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """What is done inside is done wholly, or the engine says from then on that it was not."""
        if self._stepping:
            raise EngineDead("a step of this engine was cut short, so host and device disagree: make a new engine")
        with interrupts_deferred():
            self._stepping = True
            yield
            self._stepping = False

    def _step(self) -> None:
        if self._device_lost:
            self.runner.recover()
            self._device_lost = False
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        self._counters.host_seconds += time.perf_counter() - began
        if plan and (plan.failed or plan.ended):
            self._deliver(self._trackers.close_ended())
        if plan:
            self.runner.swap(plan)
            self._counters.swapped_out_blocks += len(plan.swap_outs)
            self._counters.swapped_in_blocks += len(plan.swap_ins)
        dispatched = self._dispatch(plan) if plan and plan.chunks else None
        finished, self._in_flight = self._in_flight, dispatched
        self._complete(finished)
        if not self.config.overlap:
            self._complete(self._take_in_flight())

    def _dispatch(self, plan: StepPlan) -> InFlight:
        began, compiled = time.perf_counter(), self.runner.programs.compile_seconds
        sequences = {c.seq_id: self.scheduler.roster.sequences[c.seq_id] for c in plan.chunks if c.fresh}
        self._trackers.note_cached(sequences)
        step = self.runner.execute(plan, sequences, self._trackers.prompt_rows(plan))
        counters = self._counters
        counters.num_steps += 1
        counters.prompt_tokens += sum(c.num_tokens for c in plan.chunks if c.token_ids)
        counters.copied_blocks += len(plan.copies)
        counters.count_usage(self.scheduler.usage(), self.allocator)
        compiling = self.runner.programs.compile_seconds - compiled
        counters.prepare_seconds += time.perf_counter() - began - compiling
        return step

    def _complete(self, step: InFlight | None) -> None:
        """Waits for a step, if there is one, and delivers what it gives."""
        if step is None:
            return
        began = time.perf_counter()
        results = self.runner.collect(step)
        collected = time.perf_counter()
        updates = self.scheduler.update(results.result)
        updated = time.perf_counter()
        counters = self._counters
        self._deliver(self._trackers.complete(step, results, updates, counters))
        counters.device_wait_seconds += collected - began
        counters.host_seconds += updated - collected
        counters.output_seconds += time.perf_counter() - updated

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
        return self._prefixes.register(prefix, cache_salt)

    def unregister_prefix(self, prefix: RegisteredPrefix) -> None:
        """Lets go of a registered prefix; running requests that share its blocks keep them.

        Raises:
            InvalidRequest: it is not registered, or no longer.
        """
        self._prefixes.unregister(prefix)

    def reset_prefix_cache(self) -> None:
        """Forgets the content of all cached blocks.

        Raises:
            BlocksInUse: requests run, or prefixes are registered; nothing is changed then.
        """
        with self._lock:
            self.scheduler.reset_prefix_cache()

    @property
    def prefixes(self) -> list[RegisteredPrefix]:
        """The registered prefixes."""
        return list(self._prefixes.by_name.values())

    # ------------------------------------------------------------------ snapshots

    def save(self, path: str | Path, keep_kv: bool = True) -> Path:
        """Writes a snapshot of all requests, so that `restore` goes on with the tokens they would have got.

        The step in flight, if there is one, is waited for. The snapshot is there wholly or not at all; it is checked
        when it is read. The last two of a folder are kept.

        Args:
            path: folder for snapshots, of this engine alone.
            keep_kv: False saves requests and tokens only, and has K and V computed again: small, and slower to resume.

        Returns:
            The snapshot's own folder, below `path`.

        Raises:
            SnapshotError: it could not be written; the engine is as it was.
        """
        require(isinstance(keep_kv, bool), "keep_kv", keep_kv, "True or False")
        root = snapshot_root(path)
        with self._lock:
            self._settle()
            state, arrays = engine_state(self, keep_kv)
            try:
                return write_snapshot(root, state, arrays)
            except OSError as error:
                raise SnapshotError(f"no snapshot was written to {path}: {error.strerror or error}") from error

    @classmethod
    def restore(
        cls,
        path: str | Path,
        model: LoadedModel | None = None,
        config: EngineConfig | None = None,
        progress: bool = True,
    ) -> Engine:
        """An engine that goes on where a saved one was. Outputs that nobody had received come with its first step.

        Args:
            path: what `save` was given, of which the newest whole snapshot is taken, or what it returned.
            model: the model, where the snapshot's record of its source does not do to load it.
            config: None is the one recorded; another one must agree with it in all that requests depend on.
            progress: as in `Engine`.

        Raises:
            SnapshotError: there is no whole snapshot, or it is of another version, model or configuration.
        """
        return restore_engine(cls, snapshot_root(path), model, config, progress)

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

    def _counted(self) -> tuple[int, float, Scheduler, KVAllocator]:
        return num_compilations(), self.runner.programs.compile_seconds, self.scheduler, self.allocator
