"""`pagedjax generate PROMPT...`: one prompt token by token, several each as it ends."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

from tqdm import tqdm

from pagedjax.cli.flags import add_model_flags, add_sampling_flags, engine_config, sampling_fields
from pagedjax.cli.loading import llm_class
from pagedjax.cli.logprobs import format_logprobs
from pagedjax.request import RequestOutput, SamplingParams, check_text

if TYPE_CHECKING:
    from pagedjax.llm import LLM, RequestStream


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `generate`."""
    parser = commands.add_parser("generate", help="continue one or more prompts", allow_abbrev=False)
    parser.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="text to continue, as it is; several, or --n, make one batch"
    )
    add_model_flags(parser)
    add_sampling_flags(parser, max_tokens=128, temperature=0.2, top_p=0.9)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, 1 when a request failed, 130 after Ctrl-C (what there is was printed)."""
    params, config = SamplingParams(**sampling_fields(args)), engine_config(args)
    for prompt in args.prompts:
        check_text("prompt", prompt)
    llm = llm_class()(args.model, config)
    start = time.perf_counter()
    if len(args.prompts) == 1 and params.n == 1:
        last, interrupted = print_stream(llm.stream(args.prompts[0], params))
        outputs = [last] if last else []
    else:
        outputs, interrupted = _print_each_as_it_ends(llm, args.prompts, params)
    _print_speed(outputs, time.perf_counter() - start, llm.engine.stats().compile_seconds)
    failed = [error for output in outputs if (error := failure(output))]
    for error in failed:
        print(f"pagedjax: {error}", file=sys.stderr)
    return 130 if interrupted else 1 if failed else 0


def failure(output: RequestOutput) -> str | None:
    """What went wrong with a request that ended by an error of its own; None if nothing did."""
    errors = [completion.stop_reason for completion in output.outputs if completion.finish_reason == "error"]
    return f"request {output.request_id}: {errors[0]}" if errors else None


def print_stream(stream: RequestStream) -> tuple[RequestOutput | None, bool]:
    """Prints one request's text as it grows, a line end, and logprobs if it asked for them.

    Returns:
        Its last state, and whether Ctrl-C cut it.
    """
    last, interrupted = None, False
    with closing(stream):  # which aborts the request, if it is not done
        try:
            for output in stream:
                printed = len(last.outputs[0].text) if last else 0
                last = output
                print(output.outputs[0].text[printed:], end="", flush=True)
        except KeyboardInterrupt:
            interrupted = True
    print()
    if last and (logprobs := format_logprobs(last)):
        print(logprobs)
    return last, interrupted


def _print_each_as_it_ends(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[list[RequestOutput], bool]:
    """Runs all prompts in one batch. After Ctrl-C the unfinished are aborted, and printed as far as they got."""
    engine = llm.engine
    numbers = {engine.add_request(prompt, params): number for number, prompt in enumerate(prompts, 1)}
    ended: list[RequestOutput] = []
    interrupted = False
    with tqdm(total=len(prompts), desc="generating", unit="prompt", disable=None, leave=False) as bar:
        while engine.has_unfinished():
            try:
                outputs = engine.step()
            except KeyboardInterrupt:
                interrupted = True
                outputs = [engine.abort(name) for name in numbers if engine.is_unfinished(name)]
            for output in outputs:
                if output.finished:
                    ended.append(output)
                    bar.update()
                    bar.write(_labelled(numbers[output.request_id], output))
    return ended, interrupted


def _labelled(number: int, output: RequestOutput) -> str:
    several = len(output.outputs) > 1
    texts = [f"({number}.{c.index + 1}) {c.text}" if several else c.text for c in output.outputs]
    lines = [f"[{number}] {output.prompt}", *texts]
    if logprobs := format_logprobs(output):
        lines.append(logprobs)
    return "\n".join(lines) + "\n"


def _print_speed(outputs: list[RequestOutput], seconds: float, compiling: float) -> None:
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    running = max(seconds - compiling, 1e-9)
    not_counted = f" (compiling, {compiling:.1f} s, is not counted)" if compiling >= 0.05 else ""
    print(f"{num_tokens} tokens in {running:.1f} s, {num_tokens / running:.1f} tokens/s{not_counted}", file=sys.stderr)
