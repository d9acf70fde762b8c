"""Runs of the real engine with SmolLM2, at the scale of a laptop: requests with the lengths of a workload, scaled down.

Prompts are pieces of the licence, so that the model has a text to go on with. All requests come at once and outputs
have the lengths that the workload gives them, so that what is planned, and the tokens, are the same each time; only
what begins with `measured_` measures time.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments.frame.experiment import OWN_FOLDER
from experiments.frame.lengths import lengths, require_real
from pagedjax import LLM, BeamSearchParams, EngineConfig, SamplingParams
from pagedjax.engine import Engine
from pagedjax.errors import ConfigError
from pagedjax.replay import replay
from pagedjax.sim.from_log import LogMetrics
from pagedjax.sim.traces import open_trace

MODEL = "smollm2-135m"

SHAPE = {"num_blocks": 40, "max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 256}
"""One for all where it can be, so that its programs are compiled once and then found in JAX's persistent cache."""

_KEPT = (
    "token_states",
    "reserved",
    "internal_fragmentation",
    "external_fragmentation",
    "free",
    "mean_batched_requests",
    "requests",
    "failed_requests",
    "preemptions",
    "swapped_blocks",
    "sharing_saving",
)
Prompt = dict[str, list[int]]


def scaled_requests(
    workload: str, lengths_from: str, number: int, shrink: int, seed: int, longest: int, text: list[int]
) -> tuple[list[tuple[Prompt, int]], bool]:
    """Prompts cut out of a text at random, and numbers of tokens to put out; and whether their lengths are statistics.

    Args:
        shrink: prompts and outputs of the workload are as many times shorter.
        longest: tokens of prompt and output together; longer rows are left out.
        text: tokens of a text that the model can go on with, longer than `longest`.
    """
    rng = np.random.default_rng(seed)
    with lengths(lengths_from):
        trace = open_trace(workload)
        require_real(trace, lengths_from)
        scaled = ((-(-row.prompt_len // shrink), -(-row.output_len // shrink)) for row in trace.rows(seed))
        chosen = list(islice((pair for pair in scaled if sum(pair) <= longest), number))
    starts = rng.integers(0, len(text) - longest, len(chosen)).tolist()
    cut = [text[start : start + prompt] for start, (prompt, _) in zip(starts, chosen, strict=True)]
    requests = [({"prompt_token_ids": tokens}, output) for tokens, (_, output) in zip(cut, chosen, strict=True)]
    return requests, trace.is_statistics


def serve(
    *,
    workload: str,
    lengths_from: str,
    num_requests: int,
    shrink: int,
    seed: int = 0,
    n: int = 1,
    beam_width: int = 0,
    longest: int = 160,
    shared_prefix: int = 0,
    **engine_fields: Any,
) -> dict[str, Any]:
    """One record of requests served together: memory, batches, a hash of all tokens, and times that were measured.

    Args:
        workload, lengths_from, num_requests, shrink, longest: see `scaled_requests`.
        n, beam_width: samples of each request, or beams.
        shared_prefix: tokens that all prompts begin with beside their own.
        engine_fields: of `EngineConfig`.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "run.log")
        llm = LLM(MODEL, EngineConfig(event_log=log, seed=seed, **{**SHAPE, **engine_fields}))
        engine = llm.engine
        assert engine.tokenizer is not None
        text = engine.tokenizer.encode((OWN_FOLDER.parent / "LICENSE").read_text(encoding="utf-8"))
        requests, are_statistics = scaled_requests(workload, lengths_from, num_requests, shrink, seed, longest, text)
        prefix = text[:shared_prefix]
        requests = [({"prompt_token_ids": prefix + p["prompt_token_ids"]}, tokens) for p, tokens in requests]
        outputs, seconds = _run(engine, requests, n, beam_width)
        metrics = LogMetrics()
        replay(log, observer=metrics.observe)
        row = metrics.row()
        stats = engine.stats()
    tokens = [sample.token_ids for output in outputs for sample in output.outputs]
    return {
        **{name: row[name] for name in _KEPT},
        "prefix_hit_rate": stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens),
        "output_tokens": sum(map(len, tokens)),
        "tokens_sha256": hashlib.sha256(repr(tokens).encode()).hexdigest(),
        "measured_s": seconds,
        "measured_tokens_per_s": sum(map(len, tokens)) / seconds,
        "lengths_are_statistics": are_statistics,
        "note": f"engine: {MODEL}, {num_requests} requests at once, lengths of {workload} divided by {shrink}",
    }


def _run(engine: Engine, requests: list[tuple[Prompt, int]], n: int, beam_width: int) -> tuple[list[Any], float]:
    """Final outputs in the order of the requests, and seconds without the compilation of programs."""
    ids = []
    for prompt, tokens in requests:
        if beam_width:
            params: Any = BeamSearchParams(beam_width=beam_width, max_tokens=tokens, ignore_eos=True)
        else:
            temperature = 1.0 if n > 1 else 0.0
            params = SamplingParams(n=n, max_tokens=tokens, temperature=temperature, ignore_eos=True)
        ids.append(engine.add_request(prompt, params))
    final: dict[str, Any] = {}
    before, begun = engine.stats().compile_seconds, time.perf_counter()
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                final[output.request_id] = output
    seconds = time.perf_counter() - begun - (engine.stats().compile_seconds - before)
    failed = [output for output in final.values() if any(one.finish_reason == "error" for one in output.outputs)]
    if failed:
        raise ConfigError(f"a request failed: {failed[0].outputs[0].stop_reason}")
    return [final[name] for name in ids], seconds
