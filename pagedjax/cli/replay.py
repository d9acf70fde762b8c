"""`pagedjax replay LOG`: plans all steps of an engine's log again, and says whether they are the same."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from pagedjax.cli.flags import add_json_flag, writable_file
from pagedjax.cli.record_file import RecordWriter, record_file
from pagedjax.errors import LogError
from pagedjax.host.scheduler import Scheduler
from pagedjax.log_reader import Event
from pagedjax.replay import Observer, replay
from pagedjax.sim.from_log import LogMetrics, LogRecords
from pagedjax.tables import format_table, write_json
from pagedjax.trace import Trace


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `replay`."""
    parser = commands.add_parser("replay", help="plan the steps of an engine's event log again", allow_abbrev=False)
    parser.add_argument("log", metavar="LOG", help="what an engine with event_log=LOG wrote")
    parser.add_argument(
        "--trace", metavar="FILE", type=writable_file, help="write a trace to FILE, for https://ui.perfetto.dev"
    )
    parser.add_argument(
        "--metrics",
        action="store_true",
        help="add what `pagedjax simulate` tells: how memory was used, batched requests, latencies; of several runs in "
        "one log the latest",
    )
    parser.add_argument(
        "--records",
        metavar="FILE",
        type=writable_file,
        help="write a line of JSON for each step and each request to FILE, gzipped if its name ends with .gz",
    )
    parser.add_argument(
        "--check-invariants", action="store_true", help="check the scheduler's state after every event (slow)"
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints one record. Exit status: 1 if a plan differs, else 0."""
    for file in filter(None, (args.trace, args.json, args.records)):
        if Path(file).resolve() == Path(args.log).resolve():
            raise LogError(f"{file} is the log itself, which would be lost: give another file")
    trace = Trace() if args.trace else None
    metrics = LogMetrics() if args.metrics else None
    with nullcontext() if args.records is None else record_file(args.records) as file:
        writer = None if file is None else RecordWriter(file)
        records = writer and LogRecords(writer.step, writer.request)
        observers = [one.observe for one in (trace, metrics, records) if one is not None]
        report = replay(args.log, check_invariants=args.check_invariants, observer=_all(observers))
    row = (metrics.row() if metrics is not None else {}) | report.row()
    print(format_table([row]))
    if args.json:
        write_json(args.json, [row])
    if trace is not None:
        trace.write(args.trace)
    if report.first_difference is None:
        return 0
    print(f"pagedjax: the replay differs at {report.first_difference}", file=sys.stderr)
    return 1


def _all(observers: list[Observer]) -> Observer | None:
    if not observers:
        return None

    def observe(event: Event, scheduler: Scheduler) -> None:
        for observer in observers:
            observer(event, scheduler)

    return observe
