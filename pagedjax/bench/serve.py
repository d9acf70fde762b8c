"""Serves requests as they come, on the wall clock: what a simulation is compared with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagedjax.bench.workload import token_range
from pagedjax.request import SamplingParams
from pagedjax.sim.workload import TimedRequest

if TYPE_CHECKING:
    from pagedjax.engine import Engine


def serve(
    engine: Engine, trace: Sequence[TimedRequest], seed: int = 0, progress: Callable[[int], object] | None = None
) -> None:
    """Adds each request when its time has come, with a random prompt of its length; makes steps until all have ended.

    Args:
        trace: in order of arrival; times in seconds from the start.
        seed: of the prompts' tokens.
        progress: told how many requests a step ended.
    """
    rng, (low, high) = np.random.default_rng(seed), token_range(engine.model_config.vocab_size)
    coming = deque((timed, rng.integers(low, high, len(timed.request.prompt_token_ids)).tolist()) for timed in trace)
    began = time.monotonic()
    while coming or engine.has_unfinished():
        while coming and coming[0][0].time <= time.monotonic() - began:
            (moment, request), prompt = coming.popleft()
            params = SamplingParams(max_tokens=request.params.max_tokens, ignore_eos=True, temperature=0.0)
            engine.add_request({"prompt_token_ids": prompt}, params, request.request_id, began + moment)
        if not engine.has_unfinished():
            time.sleep(max(0.0, coming[0][0].time - (time.monotonic() - began)))
            continue
        ended = sum(output.finished for output in engine.step())
        if progress is not None and ended:
            progress(ended)
