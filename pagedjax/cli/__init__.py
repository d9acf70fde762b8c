"""The command line: `pagedjax generate | chat | bench | info | simulate | replay`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pagedjax.errors import PagedJaxError

INTERRUPTED = 130  # what a shell gives a command that Ctrl-C ended


def build_parser() -> argparse.ArgumentParser:
    """One subcommand a module of this package; each sets `run`, a function of the parsed arguments."""
    from pagedjax.cli import (
        bench,
        chat,
        generate,
        info,
        replay,
        simulate,
    )  # here, so that `main` answers a Ctrl-C meanwhile

    parser = argparse.ArgumentParser(prog="pagedjax", description="PagedAttention in JAX.", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (generate, chat, bench, info, simulate, replay):
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. An error that pagedjax raises on purpose is one sentence."""
    try:
        args = build_parser().parse_args(argv)
        return args.run(args)
    except PagedJaxError as error:
        print(f"pagedjax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pagedjax: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `pagedjax ... | head`: nobody reads on, and the interpreter must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
