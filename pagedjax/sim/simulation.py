"""A simulation from one configuration: what `pagedjax simulate`, notebooks and experiments call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, cycle, islice
from typing import Any

from pagedjax.baselines import PAGED, make_allocator
from pagedjax.config import CacheConfig, SchedulerConfig, require
from pagedjax.errors import ConfigError
from pagedjax.host.scheduler import Scheduler
from pagedjax.sim.config import MOST_BLOCKS, OWN, PAPER, SimulationConfig, resolved_duration
from pagedjax.sim.cost import CostModel, Roofline
from pagedjax.sim.hardware import Server, find_model, make_server
from pagedjax.sim.knee import Probe, find_knee
from pagedjax.sim.measured import MeasuredCost
from pagedjax.sim.metrics import Summary
from pagedjax.sim.records import OnRequest, OnStep, Open, RequestRecord, StepRecord
from pagedjax.sim.simulator import Simulator
from pagedjax.sim.traces import open_trace
from pagedjax.sim.traces.rows import TraceRow
from pagedjax.sim.workload import (
    ARRIVALS,
    HIGHEST_RATE,
    RequestMaker,
    TimedRequest,
    at_random,
    keep_servable,
    paper_arrivals,
    paper_order,
    require_rate,
    timed,
)

SWAP_BYTES_PER_CHIP = 20 << 30
"""Of the host's memory, as in the paper's artifact."""

MOST_IN_KNEE = 300_000
"""Requests at the highest rate that is tried for a knee."""

STEP_TOKENS = 2560
"""The artifact's limit."""

Progress = Callable[[float], None]
"""Told of the simulated time, in seconds, after each step."""


class Simulation:
    """A configuration, and all that it names: to be run at one rate, or at many.

    Attributes:
        model, server, cost: what computes; the server is None where times were measured.
        cache, scheduler: configurations of the host's part.
        trace: where lengths come from.
        duration, warmup: seconds, resolved.
        notes: of the last run: a sentence for all that is not as the workload has it, and for what went wrong.

    Raises:
        ConfigError: a model, chip, workload or file is not known, a model does not fit its chips (it says by how
            much), or numbers contradict each other.
    """

    def __init__(self, config: SimulationConfig) -> None:
        self.config = config
        self.model = find_model(config.model)
        self.server: Server | None = None
        self._measured: MeasuredCost | None = None
        if config.cost_model is not None:
            self._measured = MeasuredCost.load(config.cost_model, config.model)
        else:
            self.server = make_server(self.model, config.chip, config.num_chips)
        self.cache = self._cache_config()
        self.scheduler = self._scheduler_config()
        self.overlap = self._resolved("overlap", False)
        self.cost = self._cost(self.server, self._measured)
        self.trace = open_trace(config.workload, format=config.workload_format, tokenizer=config.tokenizer)
        self.duration = resolved_duration(config)
        whole = math.isinf(self.duration)
        self.warmup = config.warmup if config.warmup is not None else 0.0 if whole else self.duration / 3
        self.notes: list[str] = []
        self._left_out = Counter[str]()
        self._num_repeated = 0
        known = f"{PAPER} or one of {', '.join(ARRIVALS)}"
        require(
            self.trace.has_times or config.arrivals != OWN,
            "arrivals",
            OWN,
            f"{known} for {config.workload}, which has no times",
        )
        shrink, tokens = config.shrink_prompts, self.trace.block_tokens
        require(tokens % shrink == 0, "shrink_prompts", shrink, f"a divisor of the {tokens} tokens of a hashed block")
        self._maker = RequestMaker(
            config.n,
            config.beam_width,
            tokens,
            shrink,
            config.cut_prompts,
            config.cut_outputs,
            config.shared_prefix,
        )

    def _resolved(self, name: str, default: Any) -> Any:
        """What was given, else what the measured engine had, else the paper's."""
        given = getattr(self.config, name)
        if given is not None:
            return given
        return default if self._measured is None else self._measured.engine[name]

    def _cost(self, server: Server | None, measured: MeasuredCost | None) -> CostModel:
        if server is not None:
            return Roofline(
                self.model,
                server,
                self.cache.block_size,
                seconds_per_swap_copy=self.config.swap_copy_seconds,
                reuses_shared=self.config.reuse_shared,
                hides_host=self.overlap,
            )
        assert measured is not None
        tokens, most = self.scheduler.max_num_batched_tokens, measured.token_sizes[-1]
        allowed = f"at most {most}, of which step times were measured"
        require(tokens <= most, "max_num_batched_tokens", tokens, allowed)
        return measured

    def _cache_config(self) -> CacheConfig:
        config, block_size = self.config, self._resolved("block_size", 16)
        room = self.server.num_blocks(self.model, block_size) if self.server is not None else 0
        num_blocks, swap_space = self._resolved("num_blocks", room), config.swap_space
        if self.server is not None:
            tokens = self.server.kv_bytes // self.model.kv_bytes_per_token
            allowed = f"at most the {tokens:,} tokens that the memory for the KV cache holds"
            require(num_blocks > 0, "block_size", block_size, allowed)
        if swap_space is None:
            chips = self.server.num_chips if self.server is not None else 0
            swap_space = SWAP_BYTES_PER_CHIP * chips if config.allocator == PAGED else 0
        num_host_blocks = swap_space // (block_size * self.model.kv_bytes_per_token)
        require(num_host_blocks <= MOST_BLOCKS, "swap_space", swap_space, f"memory for at most {MOST_BLOCKS:,} blocks")
        return CacheConfig(
            block_size,
            num_blocks,
            config.watermark,
            config.enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            allocator=config.allocator,
        )

    def _scheduler_config(self) -> SchedulerConfig:
        config, limit = self.config, self.model.max_position_embeddings
        max_len, max_num_seqs = self._resolved("max_model_len", limit), self._resolved("max_num_seqs", 256)
        require(max_len <= limit, "max_model_len", max_len, f"at most {limit}, which {config.model} allows")
        # A static batch computes all of its prompts at once.
        prompts = max_num_seqs if config.batching == "static" else 1
        return SchedulerConfig(
            max_num_seqs,
            self._resolved("max_num_batched_tokens", max(STEP_TOKENS, prompts * max_len)),
            max_len,
            self._resolved("enable_chunked_prefill", False),
            config.preemption,
            config.batching,
        )

    # ------------------------------------------------------------------ requests

    def requests(self, rate: float | None) -> Iterator[TimedRequest]:
        """The requests that come, at so many a second or at their own times."""
        self._left_out.clear()
        self._num_repeated = 0
        own = self.config.arrivals == OWN
        late = f"a time at or after the {self.duration:g} seconds of the duration"
        return timed(self._arrivals(rate), self.duration, self._maker, partial(self._leave_out, late) if own else None)

    def _arrivals(self, rate: float | None) -> Iterable[tuple[float, TraceRow]]:
        config, limit = self.config, self.scheduler.max_model_len
        if config.arrivals == OWN:
            return ((row.time or 0.0, row) for row in self._servable(limit))
        require_rate(rate)
        assert rate is not None
        if config.arrivals == PAPER:
            times = paper_arrivals(rate, self.duration, config.seed)
            # Below the limit, not at it: the paper's filter.
            rows = list(islice(self._servable(limit - 1), len(times)))
            return zip(times, paper_order(self._enough(rows, len(times)), config.seed), strict=True)
        drawn = self._servable(limit)
        if not self.trace.is_statistics:
            drawn = at_random(self._enough(list(drawn), 1), config.seed)
        return zip(ARRIVALS[config.arrivals](rate, config.seed), drawn, strict=False)

    def _enough(self, rows: list[TraceRow], number: int) -> list[TraceRow]:
        """The rows, and where they are fewer than that many, again from their start."""
        if not rows and number:
            reasons = "; ".join(self._row_notes()) or "it has none"
            raise ConfigError(f"no row of the workload {self.config.workload} can be served: {reasons}")
        self._num_repeated = max(0, number - len(rows))
        return list(islice(cycle(rows), max(number, len(rows))))

    def _row_notes(self) -> list[str]:
        left_out = [f"{number:,} rows have {reason}, left out" for reason, number in self._left_out.items()]
        repeated = [f"{self._num_repeated:,} rows come again: the workload has no more"] if self._num_repeated else []
        return [*self.trace.problems.lines(), *left_out, *repeated]

    def _servable(self, limit: int) -> Iterator[TraceRow]:
        return keep_servable(self.trace.rows(self.config.seed), self._maker, limit, self._leave_out)

    def _leave_out(self, reason: str) -> None:
        self._left_out[reason] += 1

    # ------------------------------------------------------------------ running

    def run(
        self,
        rate: float | None,
        *,
        until: float | None = None,
        on_step: OnStep | None = None,
        on_request: OnRequest | None = None,
        progress: Progress | None = None,
    ) -> dict[str, object]:
        """Runs until all requests have ended, or until a time in seconds; a summary, see `metrics.Summary`.

        Beside it, `prefix_hit_rate`: of the prompts' tokens that were looked for in the prefix cache, the part found.
        """
        summary = Summary(self.cache.num_slots, self.warmup, self.duration)
        failed: list[RequestRecord] = []  # the first

        def take_step(step: StepRecord) -> None:
            summary.on_step(step)
            if on_step is not None:
                on_step(step)
            if progress is not None:
                progress(step.end)

        def take_request(request: RequestRecord) -> None:
            summary.on_request(request)
            if not request.is_served and not failed:
                failed.append(request)
            if on_request is not None:
                on_request(request)

        simulator = self.simulator(self.requests(rate), take_step, take_request)
        simulator.run(until)
        found = simulator.scheduler.allocator.prefix_stats
        row = {**summary.row(), "prefix_hit_rate": found.hit_tokens / max(1, found.query_tokens)}
        self.notes = [*self._row_notes(), *self._run_notes(row, simulator, failed)]
        return row

    def _run_notes(self, row: dict[str, Any], simulator: Simulator, failed: list[RequestRecord]) -> list[str]:
        notes = []
        if simulator.num_refused:
            notes.append(f"{simulator.num_refused:,} requests can never run (first: {simulator.refusal}), left out")
        if failed:
            first = f"request {failed[0].request_id!r}: {failed[0].stop_reason}"
            notes.append(f"{row['failed_requests']:,} requests failed (first: {first})")
        if not row["requests"]:
            notes.append("no request came")
        elif row["mean_batched_requests"] is None:
            window = f"from {self.warmup:g} to {self.duration:g} seconds"
            notes.append(f"no step ended {window}, so there is nothing to average of memory and batches")
        if self._measured is not None and row["swapped_blocks"] and not self._measured.seconds_per_swapped_block:
            notes.append("swapping took no time: none was measured")
        return notes

    def simulator(self, trace: Iterable[TimedRequest], on_step: OnStep, on_request: OnRequest) -> Simulator:
        """A simulator of the configuration's system, with nobody in it yet."""
        scheduler = Scheduler(self.scheduler, make_allocator(self.cache, self.scheduler.max_model_len))
        return Simulator(
            scheduler,
            self.cost,
            trace,
            on_step,
            on_request,
            overlap=self.overlap,
            pad_batches=self.config.batching == "static" and self.server is not None,
            seed=self.config.seed,
        )

    def knee(self, bound: float, progress: Callable[[Probe], None] | None = None) -> float:
        """The highest rate, in requests a second, whose mean normalized latency stays within `bound` seconds a token.

        By bisection, to one per cent. Arrivals and lengths are drawn anew for every rate, by the same seed, so that the
        border is not sharp: a few per cent beside it, a rate may be on the other side.

        Raises:
            ConfigError: there is no such rate, or requests can never be served, at whatever rate.
        """
        require(self.config.arrivals != OWN, "arrivals", OWN, f"{PAPER} or one of {', '.join(ARRIVALS)} to find a knee")
        lowest, highest = 1 / self.duration, min(HIGHEST_RATE, MOST_IN_KNEE / self.duration)
        first = min(max(self.config.rate or 1.0, lowest), highest)
        return find_knee(
            lambda rate: self.holds(rate, bound), first=first, lowest=lowest, highest=highest, progress=progress
        )

    def holds(self, rate: float, bound: float) -> bool | None:
        """Whether the mean normalized latency at a rate stays within `bound` seconds a token; None if nobody comes.

        Raises:
            ConfigError: a request cannot be served, however long it waits.
        """
        latency = self.mean_latency(rate, bound)
        return None if latency is None else latency <= bound

    def mean_latency(self, rate: float, bound: float) -> float | None:
        """The mean normalized latency at a rate, in seconds a token; infinity if it is above `bound`, None of nobody.

        A run ends as soon as those who have ended, and the time that the others have spent already, decide that.

        Raises:
            ConfigError: a request cannot be served, however long it waits.
        """
        trace, total = list(self.requests(rate)), 0.0
        allowed = bound * len(trace)

        def add(request: RequestRecord) -> None:
            nonlocal total
            if not request.is_served:
                raise ConfigError(f"request {request.request_id!r} cannot be served: {request.stop_reason}")
            total += request.normalized_latency

        simulator = self.simulator(trace, lambda step: None, add)
        for number in count():
            if not simulator.advance():
                break
            if simulator.num_refused:
                raise ConfigError(f"a request can never run: {simulator.refusal}")
            if number % 256 == 0:
                now, unfinished = simulator.now, simulator.recorder.unfinished()
                spent = sum((now - entry.arrival) / _output_len(entry) for entry in unfinished)
                if total + spent > allowed:
                    return math.inf
        if not trace:
            return None
        return total / len(trace) if total <= allowed else math.inf


def _output_len(entry: Open) -> int:
    """Tokens that a request will have put out."""
    request = entry.group.request
    return request.max_len - len(request.prompt_token_ids)
