"""A simulation from one configuration: what `pagedjax simulate`, notebooks and experiments call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count, cycle, islice

from pagedjax.baselines import PAGED, make_allocator
from pagedjax.config import CacheConfig, SchedulerConfig, require
from pagedjax.errors import ConfigError
from pagedjax.host.scheduler import Scheduler
from pagedjax.sim.config import OWN, PAPER, SimulationConfig
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
        left_out: requests of the last run that were not served, by what is wrong with them.

    Raises:
        ConfigError: a model, chip, workload or file is not known, a model does not fit its chips (it says by how
            much), or numbers contradict each other.
    """

    def __init__(self, config: SimulationConfig) -> None:
        self.config = config
        self.model = find_model(config.model)
        self.server: Server | None = None
        self.cost: CostModel
        if config.cost_model is not None:
            self.cost = MeasuredCost.load(config.cost_model, config.model)
            require(config.num_blocks is not None, "num_blocks", None, "given where there is a cost_model")
        else:
            self.server = make_server(self.model, config.chip, config.num_chips)
            self.cost = Roofline(self.model, self.server, config.block_size)
        self.cache = self._cache_config()
        self.scheduler = self._scheduler_config()
        self.trace = open_trace(config.workload, format=config.workload_format, tokenizer=config.tokenizer)
        self.left_out = Counter[str]()
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
        self._maker = RequestMaker(config.n, config.beam_width, tokens, shrink)

    def _cache_config(self) -> CacheConfig:
        config, kv_bytes = self.config, self.config.block_size * self.model.kv_bytes_per_token
        num_blocks, swap_space = config.num_blocks, config.swap_space
        if num_blocks is None and self.server is not None:
            num_blocks = self.server.num_blocks(self.model, config.block_size)
        if swap_space is None:
            chips = self.server.num_chips if self.server is not None else 0
            swap_space = SWAP_BYTES_PER_CHIP * chips if config.allocator == PAGED else 0
        return CacheConfig(
            config.block_size,
            num_blocks or 0,
            config.watermark,
            config.enable_prefix_caching,
            num_host_blocks=swap_space // kv_bytes,
            allocator=config.allocator,
        )

    def _scheduler_config(self) -> SchedulerConfig:
        config, limit = self.config, self.model.max_position_embeddings
        max_len = limit if config.max_model_len is None else config.max_model_len
        require(max_len <= limit, "max_model_len", max_len, f"at most {limit}, which {config.model} allows")
        # A static batch computes all of its prompts at once.
        prompts = config.max_num_seqs if config.batching == "static" else 1
        return SchedulerConfig(
            config.max_num_seqs,
            config.max_num_batched_tokens or max(STEP_TOKENS, prompts * max_len),
            max_len,
            config.enable_chunked_prefill,
            config.preemption,
            config.batching,
        )

    # ------------------------------------------------------------------ requests

    def requests(self, rate: float | None) -> Iterator[TimedRequest]:
        """The requests that come, at so many a second or at their own times."""
        self.left_out.clear()
        self._num_repeated = 0
        return timed(self._arrivals(rate), self.config.duration, self._maker)

    def _arrivals(self, rate: float | None) -> Iterable[tuple[float, TraceRow]]:
        config, limit = self.config, self.scheduler.max_model_len
        if config.arrivals == OWN:
            return ((row.time or 0.0, row) for row in self._servable(limit))
        require_rate(rate)
        assert rate is not None
        if config.arrivals == PAPER:
            times = paper_arrivals(rate, config.duration, config.seed)
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
            reasons = ", ".join(self.left_out) or "it has no rows"
            raise ConfigError(f"no request of the workload {self.config.workload} can be served: {reasons}")
        self._num_repeated = max(0, number - len(rows))
        return list(islice(cycle(rows), max(number, len(rows))))

    def notes(self) -> list[str]:
        """What is to be said of the last run's requests: a sentence for all that is not as the workload has it."""
        left_out = [f"{number:,} requests left out: {reason}" for reason, number in self.left_out.items()]
        repeated = [f"{self._num_repeated:,} requests repeat earlier ones: the workload has no more"]
        return [*self.trace.problems.lines(), *left_out, *(repeated if self._num_repeated else [])]

    def _servable(self, limit: int) -> Iterator[TraceRow]:
        return keep_servable(self.trace.rows(self.config.seed), self._maker, limit, self._leave_out)

    def _leave_out(self, reason: str) -> None:
        self.left_out[reason] += 1

    # ------------------------------------------------------------------ running

    def run(
        self,
        rate: float | None,
        *,
        on_step: OnStep | None = None,
        on_request: OnRequest | None = None,
        progress: Progress | None = None,
    ) -> dict[str, object]:
        """Runs until all requests have ended; a summary, see `metrics.Summary`.

        Beside it, `prefix_hit_rate`: of the prompts' tokens that were looked for in the prefix cache, the part found.
        """
        config = self.config
        warmup = config.duration / 3 if config.warmup is None else config.warmup
        summary = Summary(self.cache.num_slots, warmup, config.duration)

        def take_step(step: StepRecord) -> None:
            summary.on_step(step)
            if on_step is not None:
                on_step(step)
            if progress is not None:
                progress(step.end)

        def take_request(request: RequestRecord) -> None:
            summary.on_request(request)
            if on_request is not None:
                on_request(request)

        simulator = self.simulator(self.requests(rate), take_step, take_request)
        simulator.run()
        self.left_out.update(simulator.refused)
        found = simulator.scheduler.allocator.prefix_stats
        return {**summary.row(), "prefix_hit_rate": found.hit_tokens / max(1, found.query_tokens)}

    def simulator(self, trace: Iterable[TimedRequest], on_step: OnStep, on_request: OnRequest) -> Simulator:
        """A simulator of the configuration's system, with nobody in it yet."""
        scheduler = Scheduler(self.scheduler, make_allocator(self.cache, self.scheduler.max_model_len))
        return Simulator(
            scheduler,
            self.cost,
            trace,
            on_step,
            on_request,
            overlap=self.config.overlap,
            pad_batches=self.config.batching == "static" and self.server is not None,
            seed=self.config.seed,
        )

    def knee(self, bound: float, progress: Callable[[Probe], None] | None = None) -> float:
        """The highest rate, in requests a second, whose mean normalized latency stays within `bound` seconds a token.

        To one per cent, by bisection, every rate with arrivals and lengths of the same seed.
        """
        require(self.config.arrivals != OWN, "arrivals", OWN, f"{PAPER} or one of {', '.join(ARRIVALS)} to find a knee")
        first = self.config.rate or 1.0
        return find_knee(
            lambda rate: self.holds(rate, bound), first=first, lowest=1 / self.config.duration, progress=progress
        )

    def holds(self, rate: float, bound: float) -> bool:
        """Whether the mean normalized latency at a rate stays within `bound` seconds a token; not if nobody is served.

        A run ends as soon as those who have ended, and the time that the others have spent already, decide it.
        """
        trace, total, num_served = list(self.requests(rate)), 0.0, 0
        allowed = bound * len(trace)

        def add(request: RequestRecord) -> None:
            nonlocal total, num_served
            if request.output_len:
                total += request.normalized_latency
                num_served += 1

        simulator = self.simulator(trace, lambda step: None, add)
        for number in count():
            if not simulator.advance():
                break
            if number % 256 == 0:
                now, unfinished = simulator.now, simulator.recorder.unfinished()
                spent = sum((now - entry.arrival) / _output_len(entry) for entry in unfinished)
                if total + spent > allowed:
                    return False
        return num_served > 0 and total <= bound * num_served


def _output_len(entry: Open) -> int:
    """Tokens that a request will have put out."""
    request = entry.group.request
    return request.max_len - len(request.prompt_token_ids)
