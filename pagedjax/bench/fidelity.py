"""Step times of the engine on this machine, and how well a simulation with them tells what the engine does."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

from pagedjax.baselines import make_allocator
from pagedjax.bench.serve import serve
from pagedjax.device.batch import token_buckets
from pagedjax.errors import PagedJaxError
from pagedjax.host.protocol import KVUsage
from pagedjax.host.scheduler import Scheduler
from pagedjax.log_reader import Event
from pagedjax.replay import replay
from pagedjax.sim.from_log import LogRecords
from pagedjax.sim.measured import MeasuredCost, fit
from pagedjax.sim.metrics import Summary
from pagedjax.sim.records import RequestRecord, StepRecord
from pagedjax.sim.simulator import Simulator
from pagedjax.sim.traces.rows import TraceRow
from pagedjax.sim.workload import TimedRequest, poisson, timed

if TYPE_CHECKING:
    from pagedjax.engine import Engine

CALIBRATION_RATES = (0.3, 0.6, 0.9)
"""Of the requests a second that the engine ends when all come at once: steps with few and with many sequences."""

COMPARED_RATES = (0.3, 0.45, 0.6)
"""Likewise; the knee is above."""

COMPARED = (
    "token_states",
    "reserved",
    "internal_fragmentation",
    "free",
    "mean_batched_requests",
    "normalized_latency_s",
    "time_to_first_token_s",
    "time_between_tokens_s",
    "output_tokens_per_s",
    "seconds",
)


@dataclass(slots=True)
class Phase:
    """Requests that were served together, in so many seconds, and the records of it."""

    name: str
    trace: list[TimedRequest]
    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    seconds: float = 0.0


def random_phase(name: str, number: int, rate: float, seed: int, max_len: int) -> Phase:
    """Prompts of 16 to 255 and outputs of 16 to 127 tokens, as workload W has; Poisson arrivals, the first at 0.

    Args:
        number: of requests.
        rate: requests a second; infinite lets all come at once.
        max_len: tokens that a request may reach; where that is little, prompts and outputs are shorter.
    """
    rng, drawn = random.Random(f"{name} {seed}"), poisson(rate, seed)
    prompt, output = min(255, max_len // 2), min(127, max_len // 4)
    rows = [TraceRow(rng.randint(min(16, prompt), prompt), rng.randint(min(16, output), output)) for _ in range(number)]
    times = list(islice(drawn, number))
    arrivals = zip([time - times[0] for time in times], rows, strict=True)
    named = [
        TimedRequest(time, replace(request, request_id=f"{name}-{request.request_id}"))
        for time, request in timed(arrivals, math.inf)
    ]
    return Phase(name, named)


class Fidelity:
    """Serves phases on one engine that logs its events, and reads their records from the log.

    Args:
        engine: warm, with an event log, and with no requests.
        seed: of lengths, arrivals and tokens.
    """

    def __init__(self, engine: Engine, seed: int, progress: Callable[[str, int], object]) -> None:
        assert engine.config.event_log is not None
        self.engine = engine
        self.calibration: list[Phase] = []
        self._seed = seed
        self._progress = progress
        self._phases: dict[str, Phase] = {}

    def serve(self, name: str, number: int, rate: float) -> Phase:
        """Serves random requests, as many a second; its records come with `read`."""
        max_len = min(self.engine.max_model_len, self.engine.pool_info.num_slots)
        phase = random_phase(name, number, rate, self._seed, max_len)
        self._phases[name] = phase
        began = time.perf_counter()
        serve(self.engine, phase.trace, self._seed, lambda ended: self._progress(name, ended))
        phase.seconds = time.perf_counter() - began
        return phase

    def calibrate(self, name: str, number: int, rate: float) -> Phase:
        """Serves random requests likewise, whose steps are those that `fit` takes."""
        self.calibration.append(self.serve(name, number, rate))
        return self.calibration[-1]

    def run(self, rates: Sequence[float] | None, number: int, calibration_number: int) -> list[tuple[float, Phase]]:
        """Serves what is compared, with the calibration before and between it, so that both share the machine's moods.

        Args:
            rates: requests a second; None takes COMPARED_RATES, of what the engine ends when all come at once.
            number: of requests at each.
            calibration_number: of requests at each rate of the calibration.
        """
        self.serve("to warm up", 2, math.inf)
        full = calibration_number / self.calibrate("at once", calibration_number, math.inf).seconds
        rates = [part * full for part in COMPARED_RATES] if rates is None else rates
        found: list[tuple[float, Phase]] = []
        for place, (part, rate) in enumerate(zip_longest(CALIBRATION_RATES, rates)):
            if part is not None:
                self.calibrate(f"calibration {place}", calibration_number, part * full)
            if rate is not None:
                found.append((rate, self.serve(f"rate {place}", number, rate)))
        return found

    def read(self) -> None:
        """Takes the records of all phases from the log. What was served before is left out."""
        run: LogRecords | None = None
        start: Event = {}

        def observe(event: Event, scheduler: Scheduler) -> None:
            nonlocal run, start
            if event["event"] == "start":
                start = event
            elif event["event"] == "add":
                request_id = event["request"]["request_id"]
                phase = self._phases.get(request_id.rpartition("-")[0])
                if phase is not None and request_id == phase.trace[0].request.request_id:
                    run = LogRecords(phase.steps.append, phase.requests.append)
                    run.observe(start, scheduler)
            if run is not None:
                run.observe(event, scheduler)

        for phase in self._phases.values():
            phase.steps.clear()
            phase.requests.clear()
        path = self.engine.config.event_log
        assert path is not None
        report = replay(path, observer=observe)
        if report.first_difference is not None:
            raise PagedJaxError(f"the log of the run does not replay: {report.first_difference}")

    def fit(self) -> MeasuredCost:
        """The step times of the calibration, which must have been read."""
        engine = self.engine
        config = {
            **asdict(engine.config),
            "num_blocks": engine.pool_info.num_blocks,
            "max_model_len": engine.max_model_len,
        }
        steps = [step for phase in self.calibration for step in phase.steps]
        return fit(str(engine.source["name"]), steps, token_buckets(engine.config.max_num_batched_tokens), config)

    def compare(self, rate: float, phase: Phase, cost: MeasuredCost) -> list[dict[str, object]]:
        """What the engine did in a phase beside what a simulation makes of its requests.

        The last column is a difference in points for what is a part of the pool, else the ratio less 1.
        """
        real, simulated = self.summarize(phase), self.simulate(phase, cost)
        return [
            {
                "requests_per_s": rate,
                "measure": name,
                "engine": real[name],
                "simulator": simulated[name],
                "difference": _difference(name, real[name], simulated[name]),
            }
            for name in COMPARED
        ]

    def simulate(self, phase: Phase, cost: MeasuredCost) -> dict[str, Any]:
        """What a simulation makes of a phase's requests; a summary."""
        engine = self.engine
        scheduler = Scheduler(engine.scheduler.config, make_allocator(engine.cache_config, engine.max_model_len))
        summary = Summary(engine.cache_config.num_slots)
        overlap = engine.config.overlap
        Simulator(scheduler, cost, phase.trace, summary.on_step, summary.on_request, overlap=overlap).run()
        return summary.row()

    def summarize(self, phase: Phase) -> dict[str, Any]:
        """What the engine did, as a summary."""
        summary = Summary(self.engine.cache_config.num_slots)
        for step in phase.steps:
            summary.on_step(step)
        for request in phase.requests:
            summary.on_request(request)
        return summary.row()


def _difference(name: str, real: float | None, simulated: float | None) -> str | None:
    if real is None or simulated is None:  # of outputs of one token there is no time between tokens
        return None
    if name in KVUsage._fields:
        return f"{100 * (simulated - real):+.2f} points"
    return f"{100 * (simulated / real - 1):+.1f} %" if real else None
