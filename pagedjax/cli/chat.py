"""`pagedjax chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from pagedjax.cli.flags import add_model_flags, add_sampling_flags, engine_config, sampling_fields
from pagedjax.cli.generate import failure, print_stream
from pagedjax.cli.loading import llm_class
from pagedjax.errors import PagedJaxError
from pagedjax.request import SamplingParams, check_text
from pagedjax.scalars import shown

if TYPE_CHECKING:
    from pagedjax.llm import LLM

HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C cuts an answer short"


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `chat`."""
    parser = commands.add_parser("chat", help="talk with the model", description=HELP, allow_abbrev=False)
    parser.add_argument("--system", metavar="TEXT", help="system message (default: the model's own)")
    add_model_flags(parser)
    names = [field.name for field in fields(SamplingParams) if field.name != "n"]  # one answer is enough
    add_sampling_flags(parser, only=names, max_tokens=512, temperature=0.2, top_p=0.9)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads a line, answers it, remembers both; until /quit or the end of the input.

    Exit status: 0; 1 if a line that did not come from a terminal was refused or failed (whoever typed it has seen it).
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no UTF-8 are refused with their line, not with all
        sys.stdin.reconfigure(errors="surrogateescape")
    params, config = SamplingParams(**sampling_fields(args)), engine_config(args)
    if args.system:
        check_text("system", args.system)
    llm = llm_class()(args.model, config)
    start = [{"role": "system", "content": args.system}] if args.system else []
    history = list(start)
    typed, all_well = sys.stdin.isatty(), True
    if typed:
        print(HELP)
    while (line := _read()) is not None:
        if line == "/reset":
            history = list(start)
        elif line.startswith("/"):
            print(f"pagedjax: no such command: {shown(line)} ({HELP})", file=sys.stderr)
            all_well = False
        elif line:
            history, answered = _answer(llm, history, line, params)
            all_well &= answered
    return 0 if typed or all_well else 1


def _read() -> str | None:
    """The next line without the space around it; None when the user is done."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line in ("/quit", "/exit") else line


def _answer(
    llm: LLM, history: list[dict[str, str]], line: str, params: SamplingParams
) -> tuple[list[dict[str, str]], bool]:
    """Prints the answer; returns the history with both turns (as it was without an answer), and if all went well."""
    asked = [*history, {"role": "user", "content": line}]
    try:
        output, _ = print_stream(llm.stream(llm.chat_prompt(asked), params))
        error = failure(output) if output else None
    except PagedJaxError as refused:  # too long by now, say: the conversation up to here is still good
        output, error = None, str(refused)
    if error:
        print(f"pagedjax: {error}", file=sys.stderr)
    if output is None or error:
        return history, not error
    return [*asked, {"role": "assistant", "content": output.outputs[0].text}], True
