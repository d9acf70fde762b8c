"""`pagedjax bench --step-times FILE` and `--against simulator`: the engine's steps measured, and foretold."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pagedjax.cli.flags import engine_config
from pagedjax.cli.loading import llm_class
from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.provenance import engine_provenance
from pagedjax.tables import write_json

if TYPE_CHECKING:
    from pagedjax.bench.fidelity import Fidelity
    from pagedjax.engine import Engine
    from pagedjax.sim.measured import MeasuredCost

CALIBRATION_REQUESTS = 32
COMPARISON_REQUESTS = 100

Rows = list[dict[str, object]]


def simulator_rows(args: argparse.Namespace) -> tuple[Rows, Engine]:
    """Measures step times, then, if asked for, serves requests at some rates and simulates the same ones."""
    from pagedjax.bench.engine import warm_up
    from pagedjax.bench.fidelity import CALIBRATION_RATES, COMPARED_RATES, Fidelity
    from pagedjax.bench.workload import random_workload

    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(args)
        config = dataclasses.replace(config, event_log=config.event_log or str(Path(folder) / "log"))
        _check(config, args)
        engine = llm_class()(args.model, config).engine
        warm_up(engine, random_workload(2, args.seed, engine.model_config.vocab_size), temperature=0.0)
        compares = args.against == "simulator"
        number = args.num_requests or COMPARISON_REQUESTS
        rates = args.rates if compares else ()
        num_rates = len(COMPARED_RATES if rates is None else rates)
        with _bar((1 + len(CALIBRATION_RATES)) * CALIBRATION_REQUESTS + num_rates * number) as progress:
            fidelity = Fidelity(engine, args.seed, progress)
            phases = fidelity.run(rates, number, CALIBRATION_REQUESTS)
        fidelity.read()
        cost = fidelity.fit()
        rows = _step_rows(fidelity, cost)
        if args.step_times:
            _write(args.step_times, cost, rows, engine, args.seed)
        if compares:
            rows = [row for rate, phase in phases for row in fidelity.compare(rate, phase, cost)]
    return rows, engine


def _check(config: EngineConfig, args: argparse.Namespace) -> None:
    if args.rates and args.against != "simulator":
        raise ConfigError("--rates are those of --against simulator")
    if args.sampled:
        raise ConfigError("--sampled has no use here: step times are those of greedy requests")
    if config.batching != "continuous" or config.allocator != "paged":
        raise ConfigError(
            "step times are measured with continuous batching and paged memory, which can make every step"
        )


def _step_rows(fidelity: Fidelity, cost: MeasuredCost) -> Rows:
    return cost.rows(step for phase in fidelity.calibration for step in phase.steps)


def _write(path: str, cost: MeasuredCost, rows: Rows, engine: Engine, seed: int) -> None:
    record: dict[str, Any] = {"step_times": dataclasses.asdict(cost), "sizes": rows}
    write_json(path, [{**record, "provenance": engine_provenance(engine, {}, {"workload": seed})}])


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    with tqdm(total=total, desc="serving", unit="request", disable=None, leave=False) as bar:

        def tell(name: str, ended: int) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update(ended)

        yield tell
