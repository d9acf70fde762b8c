"""`pagedjax simulate`: the project's own scheduler and allocators on a chip that need not be there."""

from __future__ import annotations

import argparse
import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path
from typing import IO

from tqdm import tqdm

from pagedjax.cli.flags import add_json_flag, add_simulation_flags, simulation_config, writable_file
from pagedjax.cli.record_file import RecordWriter, record_file
from pagedjax.config import require
from pagedjax.errors import ConfigError
from pagedjax.provenance import provenance
from pagedjax.scalars import is_number
from pagedjax.sim.config import OWN, SimulationConfig
from pagedjax.sim.knee import Probe
from pagedjax.sim.simulation import Simulation
from pagedjax.tables import format_table, write_json

RECORDS = "simulated.jsonl.gz"

_FOUND = {True: "fast enough", False: "too slow", None: "nobody comes"}

Row = dict[str, object]


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `simulate`."""
    parser = commands.add_parser(
        "simulate", help="serve a workload on a chip that need not be there", allow_abbrev=False
    )
    parser.add_argument(
        "--find-knee",
        type=float,
        metavar="SECONDS",
        help="find the highest rate whose mean normalized latency stays within so many seconds a token; the summary is "
        "of that rate unless --rate is given",
    )
    parser.add_argument(
        "--records",
        type=writable_file,
        default=RECORDS,
        metavar="FILE",
        help="where a line of JSON for each step and each request goes, gzipped if its name ends with .gz "
        f"(default: {RECORDS})",
    )
    parser.add_argument("--no-records", action="store_true", help="write none")
    add_json_flag(parser)
    add_simulation_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints one record, and says where the lengths come from and what of them was left out."""
    config, bound = simulation_config(args), args.find_knee
    if bound is not None:
        require(is_number(bound) and bound > 0, "find_knee", bound, "a finite number of seconds a token above 0")
    elif config.rate is None and config.arrivals != OWN:
        require(False, "rate", None, "given, unless --find-knee is, or --arrivals trace")
    _require_apart(args, config)
    simulation = Simulation(config)
    print(f"lengths: {simulation.trace.description}")
    knee = None if bound is None else _find_knee(simulation, bound)
    rate = config.rate if config.rate is not None else knee
    with nullcontext() if args.no_records else record_file(args.records) as file:
        summary = _run(simulation, rate, file)
    row = _row(simulation, rate, knee) | summary
    print(format_table([row]))
    for line in simulation.notes:
        print(f"note: {line}")
    if file is not None:
        print(f"records: {args.records}")
    if args.json:
        write_json(args.json, [{**row, **_origin(simulation, bound)}])
    return 0


def _require_apart(args: argparse.Namespace, config: SimulationConfig) -> None:
    """Raises ConfigError where one file would be written over another."""
    records = None if args.no_records else args.records
    files = {
        "--records": records,
        "--json": args.json,
        "--workload": config.workload,
        "--cost-model": config.cost_model,
    }
    seen: dict[Path, str] = {}
    for flag, name in files.items():
        if name is not None and (other := seen.setdefault(Path(name).resolve(), flag)) != flag:
            raise ConfigError(f"{other} and {flag} are the same file, {name}: give one of them another name")


def _row(simulation: Simulation, rate: float | None, knee: float | None) -> Row:
    """What was simulated, in short."""
    config, server = simulation.config, simulation.server
    chips = f"{server.num_chips} x {server.chip.name}" if server is not None else f"measured: {config.cost_model}"
    row: Row = {
        "model": config.model,
        "chips": chips,
        "allocator": config.allocator,
        "batching": config.batching,
        "workload": config.workload,
        "rate": rate,
        "num_blocks": simulation.cache.num_blocks,
    }
    return row if knee is None else {**row, "knee_rate": knee}


def _origin(simulation: Simulation, bound: float | None) -> Row:
    config = simulation.config
    configuration = {
        **dataclasses.asdict(config),
        "find_knee": bound,
        "cache": dataclasses.asdict(simulation.cache),
        "scheduler": dataclasses.asdict(simulation.scheduler),
        "model_spec": dataclasses.asdict(simulation.model),
        "cost": dataclasses.asdict(simulation.cost),  # type: ignore[call-overload]
    }
    return {
        "lengths": simulation.trace.description,
        "lengths_are_statistics": simulation.trace.is_statistics,
        "notes": simulation.notes,
        "configuration": configuration,
        "provenance": provenance(configuration, {"simulation": config.seed}),
    }


def _find_knee(simulation: Simulation, bound: float) -> float:
    with tqdm(desc="finding the knee", unit="rate", disable=None, leave=False) as bar:

        def tell(probe: Probe) -> None:
            bar.set_postfix_str(f"{probe.rate:.4g} a second: {_FOUND[probe.holds]}")
            bar.update()

        return simulation.knee(bound, tell)


def _run(simulation: Simulation, rate: float | None, file: IO[str] | None) -> Row:
    duration = simulation.duration
    total = None if math.isinf(duration) else round(duration)
    with tqdm(total=total, desc="simulating", unit="s", disable=None, leave=False) as bar:

        def tell(now: float) -> None:
            done = int(min(now, duration))
            if done > bar.n:
                bar.update(done - bar.n)
            elif now > duration:
                bar.set_postfix_str(f"{now - duration:.0f} s until the last have ended", refresh=False)

        if file is None:
            return simulation.run(rate, progress=tell)
        writer = RecordWriter(file)
        return simulation.run(rate, on_step=writer.step, on_request=writer.request, progress=tell)
