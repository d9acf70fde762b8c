"""`pagedjax bench --step-times FILE` and `--against simulator`: the engine's steps measured, and foretold."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pagedjax.cli.flags import engine_config
from pagedjax.cli.loading import llm_class
from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.provenance import engine_provenance
from pagedjax.tables import write_json

CALIBRATION_REQUESTS = 32
COMPARISON_REQUESTS = 100

Rows = list[dict[str, object]]


def simulator_rows(args: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    """Measures step times, then, if asked for, serves requests at some rates and simulates the same ones.

    Returns:
        The table's rows, and their provenance.
    """
    from pagedjax.bench.fidelity import CALIBRATION_RATES, COMPARED_RATES, Fidelity

    with tempfile.TemporaryDirectory() as folder:
        given = engine_config(args)
        _check(given, args)
        config = dataclasses.replace(given, event_log=given.event_log or str(Path(folder) / "log"))
        engine = llm_class()(args.model, config).engine
        engine.warmup()
        compares = args.against == "simulator"
        number = args.num_requests or COMPARISON_REQUESTS
        rates = args.rates if compares else ()
        num_rates = len(COMPARED_RATES if rates is None else rates)
        with _bar(2 + (1 + len(CALIBRATION_RATES)) * CALIBRATION_REQUESTS + num_rates * number) as progress:
            fidelity = Fidelity(engine, args.seed, progress)
            phases = fidelity.run(rates, number, CALIBRATION_REQUESTS)
        fidelity.read()
        cost = fidelity.fit()
        rows = cost.rows(step for phase in fidelity.calibration for step in phase.steps)
        how = {"workload": {"num_requests": number, "rates": [rate for rate, _ in phases]}}
        record = engine_provenance(engine, how, {"workload": args.seed})
        record["configuration"]["engine"]["event_log"] = given.event_log  # not the one that is gone
        if args.step_times:
            step_times = {"step_times": dataclasses.asdict(cost), "sizes": rows}
            write_json(args.step_times, [{**step_times, "provenance": record}])
        if compares:
            rows = [row for rate, phase in phases for row in fidelity.compare(rate, phase, cost)]
    return rows, record


def _check(config: EngineConfig, args: argparse.Namespace) -> None:
    if args.rates and args.against != "simulator":
        raise ConfigError("--rates are those of --against simulator")
    if args.sampled:
        raise ConfigError("--sampled has no use here: step times are those of greedy requests")
    if config.batching != "continuous" or config.allocator != "paged":
        raise ConfigError(
            "step times are measured with continuous batching and paged memory, which can make every step"
        )


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    with tqdm(total=total, desc="serving", unit="request", disable=None, leave=False) as bar:

        def tell(name: str, ended: int) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update(ended)

        yield tell
