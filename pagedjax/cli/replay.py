"""`pagedjax replay LOG`: plans all steps of an engine's log again, and says whether they are the same."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pagedjax.cli.flags import add_json_flag, writable_file
from pagedjax.errors import LogError
from pagedjax.replay import replay
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
        "--check-invariants", action="store_true", help="check the scheduler's state after every event (slow)"
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints one record. Exit status: 1 if a plan differs, else 0."""
    for file in filter(None, (args.trace, args.json)):
        if Path(file).resolve() == Path(args.log).resolve():
            raise LogError(f"{file} is the log itself, which would be lost: give another file")
    trace = Trace() if args.trace else None
    report = replay(args.log, check_invariants=args.check_invariants, observer=trace and trace.observe)
    print(format_table([report.row()]))
    if args.json:
        write_json(args.json, [report.row()])
    if trace is not None:
        trace.write(args.trace)
    if report.first_difference is None:
        return 0
    print(f"pagedjax: the replay differs at {report.first_difference}", file=sys.stderr)
    return 1
