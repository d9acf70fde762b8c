"""`pagedjax bench`: speed and memory use on one workload, in one run, beside a peer if asked."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pagedjax.cli.bench_simulator import simulator_rows
from pagedjax.cli.flags import (
    add_json_flag,
    add_model_flags,
    add_sampling_flags,
    engine_config,
    natural_int,
    positive_int,
    sampling_fields,
    writable_file,
)
from pagedjax.cli.loading import llm_class
from pagedjax.provenance import engine_provenance, provenance
from pagedjax.tables import format_table, write_json

if TYPE_CHECKING:
    from pagedjax.bench.engine import Run
    from pagedjax.bench.workload import Workload
    from pagedjax.engine import Engine

NUM_REQUESTS = 32
OURS, OURS_ALONE, SAMPLED = "pagedjax", "pagedjax alone", "pagedjax sampled"
BATCHED, IN_TURN, PEER_ALONE = "transformers batch 8", "transformers in turn", "transformers alone"
COUNTERPART = {SAMPLED: OURS, BATCHED: OURS, IN_TURN: OURS, PEER_ALONE: OURS_ALONE}
ONCE = {IN_TURN}  # by far the slowest, and nobody's yardstick

Rows = list[dict[str, object]]
Systems = dict[str, Callable[[], "Run"]]


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `bench`."""
    parser = commands.add_parser("bench", help="measure speed and memory use", allow_abbrev=False)
    parser.add_argument(
        "--num-requests",
        type=positive_int,
        metavar="INT",
        help="in the workload (default: 32; against the simulator 100 at each rate)",
    )
    parser.add_argument(
        "--seed", type=natural_int, default=0, metavar="INT", help="of the workload's lengths and tokens (default: 0)"
    )
    parser.add_argument(
        "--repeats", type=positive_int, default=3, metavar="INT", help="passes; the median is shown (default: 3)"
    )
    parser.add_argument(
        "--against",
        choices=["transformers", "simulator"],
        help="transformers: run the same requests and weights through it too (needs torch). simulator: measure step "
        "times, serve requests as they come at some rates, and simulate the same",
    )
    parser.add_argument(
        "--rates",
        type=rates,
        metavar="RATE,...",
        help="requests a second against the simulator (default: 30, 45 and 60 %% of what the engine ends at most)",
    )
    parser.add_argument(
        "--step-times",
        type=writable_file,
        metavar="FILE",
        help="measure how long steps take, and write FILE for `pagedjax simulate --cost-model FILE`",
    )
    parser.add_argument("--sampled", action="store_true", help="add a pass with temperature 1 and top-p 0.9")
    parser.add_argument(
        "--host",
        action="store_true",
        help="only the host's own time, for planning, prefix hits and allocations; no model",
    )
    add_json_flag(parser)
    add_model_flags(parser)
    add_sampling_flags(parser, only=("temperature", "top_k", "top_p", "min_p"), temperature=0.0)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints one table: a column a system, in the order they took turns."""
    if args.host:
        rows, record = _host_rows(args)
    elif args.step_times or args.rates or args.against == "simulator":
        rows, record = simulator_rows(args)
    else:
        rows, record = _system_rows(args)
    print(format_table(rows))
    if args.json:
        write_json(args.json, [{**row, "provenance": record} for row in rows])
    return 0


def rates(text: str) -> tuple[float, ...]:
    """Numbers of requests a second, for argparse."""
    found = tuple(float(part) for part in text.split(","))
    if not all(0 < rate < float("inf") for rate in found):
        raise argparse.ArgumentTypeError(f"{text} has a rate that is not above 0")
    return found


def _host_rows(args: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    from pagedjax.bench.host import host_rows

    return host_rows(args.repeats), provenance({"repeats": args.repeats}, {})


def _system_rows(args: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    from pagedjax.bench.engine import warm_up
    from pagedjax.bench.peer import require_torch
    from pagedjax.bench.workload import random_workload

    config, sampling = engine_config(args), sampling_fields(args)
    if args.against:
        require_torch()
    engine = llm_class()(args.model, config).engine
    workload = random_workload(args.num_requests or NUM_REQUESTS, args.seed, engine.model_config.vocab_size)
    warm_up(engine, workload, **sampling)
    systems = _systems(args, engine, workload, sampling)
    runs = _take_turns(systems, args.repeats)
    median = {name: _median(passes) for name, passes in runs.items()}
    how = {name: getattr(args, name) for name in ("repeats", "against", "sampled")}
    how["num_requests"] = len(workload.prompts)
    record = engine_provenance(engine, {"sampling": sampling, "workload": how}, {"workload": args.seed})
    return [_row(name, median, len(runs[name])) for name in systems], record


def _systems(args: argparse.Namespace, engine: Engine, workload: Workload, sampling: dict[str, Any]) -> Systems:
    """What to measure, each as a function that makes one pass."""
    from pagedjax.bench.engine import run_engine
    from pagedjax.bench.peer import TransformersPeer

    alone = workload.one_request()
    systems: Systems = {OURS: partial(run_engine, engine, workload, **sampling)}
    if args.sampled:
        systems[SAMPLED] = partial(run_engine, engine, workload, temperature=1.0, top_p=0.9)
    if args.against:
        peer = TransformersPeer(engine.params, engine.model_config, engine.config.dtype)
        same = {"do_sample": True, "top_k": 0, "top_p": 1.0, **sampling} if sampling["temperature"] > 0 else {}
        systems[BATCHED] = partial(peer.run, workload, 8, **same)
        systems[IN_TURN] = partial(peer.run, workload, 1, **same)
        systems[OURS_ALONE] = partial(run_engine, engine, alone, **sampling)
        systems[PEER_ALONE] = partial(peer.run, alone, 1, **same)
    return systems


def _take_turns(systems: Systems, repeats: int) -> dict[str, list[Run]]:
    """Passes of all systems in turn, so that a slow minute of the machine hits them all."""
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    turns = [name for turn in range(repeats) for name in systems if turn == 0 or name not in ONCE]
    with tqdm(turns, desc="measuring", unit="pass", disable=None, leave=False) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            runs[name].append(systems[name]())
    return runs


def _median(runs: list[Run]) -> Run:
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def _row(name: str, runs: dict[str, Run], passes: int) -> dict[str, object]:
    from pagedjax.bench.engine import latency_columns, step_columns

    run = runs[name]
    row: dict[str, object] = {
        "system": name,
        "passes": passes,
        "output_tokens": run.num_output_tokens,
        "seconds": run.seconds,
        "output_tokens_per_s": run.tokens_per_s,
        "pagedjax_speedup": runs[COUNTERPART[name]].tokens_per_s / run.tokens_per_s if name in COUNTERPART else None,
    }
    if run.stats is not None:
        row |= latency_columns(run) | step_columns(run.stats)
    return row
