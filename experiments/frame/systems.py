"""The systems that the paper compares, as simulations, and what all their records say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.frame.lengths import REAL, STATISTICS, lengths, require_real
from experiments.frame.values import require_choice
from pagedjax.config import require
from pagedjax.scalars import is_number, plain
from pagedjax.sim import Simulation, SimulationConfig
from pagedjax.sim.config import LONGEST
from pagedjax.sim.hardware import model_names
from pagedjax.sim.knee import find_knee
from pagedjax.sim.simulation import MOST_IN_KNEE
from pagedjax.sim.traces import workload_names
from pagedjax.sim.workload import HIGHEST_RATE

SYSTEMS: dict[str, dict[str, Any]] = {
    "vllm": {"allocator": "paged"},
    "orca-oracle": {"allocator": "orca-oracle"},
    "orca-pow2": {"allocator": "orca-pow2"},
    "orca-max": {"allocator": "orca-max"},
    "ft": {"allocator": "orca-max", "batching": "static"},
}
ORCAS = ("orca-oracle", "orca-pow2", "orca-max")

FT_BATCH = {
    ("opt-13b", "sharegpt"): 5,
    ("opt-66b", "sharegpt"): 2,
    ("opt-175b", "sharegpt"): 24,
    ("opt-13b", "alpaca"): 14,
    ("opt-66b", "alpaca"): 8,
    ("opt-175b", "alpaca"): 80,
}
"""Requests of FasterTransformer's static batch, as the artifact sets them."""

BOUND = 0.5
"""Seconds a token of normalized latency: a system that stays below serves its requests; a rate above which none does is
its knee. The paper's plots end at one second."""

CUT = 1.0
"""Seconds a token above which a run is cut short."""


def check(config: Any) -> None:
    """For a configuration's `__post_init__`: refuses, by the field's own name, what a simulation would refuse later.

    Raises:
        ConfigError: a field of a known name has a value that is not allowed.
    """
    own = {field.name for field in dataclasses.fields(SimulationConfig)} - {"workload", "model", "rate", "duration"}
    for field in dataclasses.fields(config):
        name: str = field.name
        value: Any = plain(getattr(config, name))
        if name in _CHOICES:
            require_choice(name, value, _CHOICES[name]())
        elif name == "workload":
            if not (isinstance(value, str) and Path(value).is_file()):
                require_choice(name, value, workload_names())
        elif name == "rate":
            ok = value is None or (is_number(value) and 0 < value <= HIGHEST_RATE)
            require(ok, name, value, f"above 0 and at most {HIGHEST_RATE:,} requests a second")
        elif name == "duration":
            ok = is_number(value) and 0 < value <= LONGEST
            require(ok, name, value, f"above 0 and at most {LONGEST:,} seconds")
        elif name == "watermark":
            require(is_number(value) and 0 <= value < 1, name, value, "from 0 to less than 1")
        elif name in own:
            SimulationConfig(**{name: value})


_CHOICES: dict[str, Callable[[], Sequence[str]]] = {
    "system": lambda: tuple(SYSTEMS),
    "lengths": lambda: (REAL, STATISTICS),
    "model": model_names,
}


@contextmanager
def simulation(
    system: str, *, lengths_from: str, model: str = "opt-13b", workload: str = "sharegpt", **fields: Any
) -> Iterator[Simulation]:
    """A system of the paper on its server, with the lengths that are asked for.

    Args:
        system: one of `SYSTEMS`.
        lengths_from: "real" or "statistics", see `lengths`.
        fields: of `SimulationConfig`, beside and above those of the system.

    Raises:
        ConfigError: there is no such system, or a field is wrong.
    """
    require_choice("system", system, tuple(SYSTEMS))
    own = dict(SYSTEMS[system])
    if system == "ft":
        own["max_num_seqs"] = FT_BATCH.get((model, workload), 8)
    with lengths(lengths_from):
        made = Simulation(SimulationConfig(model=model, workload=workload, **{**own, **fields}))
        require_real(made.trace, lengths_from)
        yield made


def summary(made: Simulation, rate: float | None, **how: Any) -> dict[str, Any]:
    """The row of a run, and where its lengths came from."""
    return {**made.run(rate, **how), **source(made)}


def source(made: Simulation) -> dict[str, Any]:
    """Where the lengths came from."""
    return {"lengths_are_statistics": made.trace.is_statistics, "note": f"{made.trace.name}: {made.trace.description}"}


def sweep_rates(made: Simulation, fractions: tuple[float, ...] = (0.25, 0.5, 0.7, 0.85)) -> Iterator[dict[str, Any]]:
    """The mean normalized latency at rates up to and a little beyond the knee, and the knee itself.

    Every rate that the search for the knee tries is a record, and parts of the knee are too. `latency_s` is None where
    the run was cut short, since the mean is above a second a token.
    """
    latencies: dict[float, float | None] = {}

    def holds(rate: float) -> bool | None:
        latency = latencies[rate] = made.mean_latency(rate, CUT)
        return None if latency is None else latency <= BOUND

    knee = find_knee(
        holds, first=made.config.rate or 1.0, lowest=1 / made.duration, highest=MOST_IN_KNEE / made.duration
    )
    for part in fractions:
        latencies[part * knee] = made.mean_latency(part * knee, CUT)
    for rate, latency in sorted(latencies.items()):
        cut = latency is None or math.isinf(latency)
        yield {"rate": rate, "latency_s": None if cut else latency, "knee_rate": knee, **source(made)}
