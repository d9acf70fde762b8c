"""Measures an engine on a workload."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedjax.bench.workload import Workload
from pagedjax.errors import PagedJaxError, RequestTooLong
from pagedjax.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from pagedjax.engine import Engine, EngineStats


@dataclass(frozen=True)
class Run:
    """One pass over a workload. `outputs` and `stats` are the engine's own; a peer has none."""

    seconds: float
    num_output_tokens: int
    outputs: tuple[RequestOutput, ...] = ()
    stats: EngineStats | None = None

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds


def run_engine(engine: Engine, workload: Workload, **sampling: Any) -> Run:
    """All requests at once, each to exactly its output length; `sampling` are further arguments of SamplingParams.

    Raises:
        PagedJaxError: a request ended with an error, before its output length.
    """
    engine.reset_stats()
    start = time.perf_counter()
    wanted = {
        engine.add_request(
            {"prompt_token_ids": prompt}, SamplingParams(max_tokens=length, ignore_eos=True, **sampling)
        ): length
        for prompt, length in zip(workload.prompts, workload.output_lens, strict=True)
    }
    outputs = []
    while engine.has_unfinished():
        outputs += [output for output in engine.step() if output.finished]
    seconds = time.perf_counter() - start
    for output in outputs:
        completion, length = output.outputs[0], wanted[output.request_id]
        if len(completion.token_ids) != length:
            raise PagedJaxError(
                f"request {output.request_id} gave {len(completion.token_ids)} of {length} output tokens and ended "
                f"with {completion.finish_reason}: {completion.stop_reason}"
            )
    return Run(seconds, workload.num_output_tokens, tuple(outputs), engine.stats())


def warm_up(engine: Engine, workload: Workload, **sampling: Any) -> None:
    """Compiles everything, then runs two short requests, so that the first measured pass is like the rest.

    Raises:
        RequestTooLong: a request of the workload would not reach its output length.
    """
    pool = engine.pool_info
    if workload.longest > min(engine.max_model_len, pool.num_slots):
        raise RequestTooLong(
            f"the workload's longest request needs {workload.longest} tokens, but max_model_len={engine.max_model_len} "
            f"and the pool holds {pool.num_blocks} blocks of {pool.block_size} tokens: give it larger ones"
        )
    engine.warmup()
    run_engine(engine, Workload(workload.prompts[:2], [4] * len(workload.prompts[:2])), **sampling)


def latency_columns(run: Run) -> dict[str, float]:
    """Milliseconds to the first token, and per output token after it: mean, median and 99th percentile of requests."""
    first, later = [], []
    for output in run.outputs:
        times = output.metrics
        if times is None or times.first_token_time is None or times.finished_time is None:
            continue
        first.append(times.first_token_time - times.arrival_time)
        later.append((times.finished_time - times.first_token_time) / max(len(output.outputs[0].token_ids) - 1, 1))
    return {**_spread("first_token_ms", first), **_spread("per_output_token_ms", later)}


def step_columns(stats: EngineStats) -> dict[str, float | int]:
    """Where a step's time goes, and how full the pool was.

    `plan_ms` is the scheduler (plan and update), `prepare_ms` building the arrays and dispatching the program,
    `device_wait_ms` waiting for its result, `output_ms` making text and outputs.
    """
    steps = max(stats.num_steps, 1)
    return {
        "steps": stats.num_steps,
        "plan_ms": 1e3 * stats.host_seconds / steps,
        "prepare_ms": 1e3 * stats.prepare_seconds / steps,
        "device_wait_ms": 1e3 * stats.device_wait_seconds / steps,
        "output_ms": 1e3 * stats.output_seconds / steps,
        "kv_utilisation": stats.kv_utilisation,
        "peak_blocks": stats.peak_blocks,
        "preemptions": stats.num_preemptions,
        "compilations": stats.num_compilations,
    }


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    millis = 1e3 * np.asarray(seconds)
    return {
        f"{name}_mean": float(millis.mean()),
        f"{name}_p50": float(np.percentile(millis, 50)),
        f"{name}_p99": float(np.percentile(millis, 99)),
    }
