"""Wall-clock time of calls that run on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Call = Callable[[], Any]  # starts the work and returns its results, which may not be there yet

SAMPLE_SECONDS = 0.01  # a sample lasts at least this long, so that starting the work is not what is measured
MAX_CALLS = 200


def seconds_per_call(call: Call, calls: int) -> float:
    """Of several calls one after the other, waited for once."""
    begin = time.perf_counter()
    result = None
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / calls


def alternate(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each, taken in turn: what disturbs the machine for a while disturbs all of them.

    Each is called twice before (the first call compiles), and that tells how many calls make a sample.
    """
    counts = {}
    for name, call in calls.items():
        seconds_per_call(call, 1)
        counts[name] = max(1, min(MAX_CALLS, round(SAMPLE_SECONDS / seconds_per_call(call, 1))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(seconds_per_call(call, counts[name]))
    return samples


def paired_ratio(samples: list[float], against: list[float]) -> float:
    """The median over all rounds of one round's time over the other's in the same round."""
    return statistics.median(a / b for a, b in zip(samples, against, strict=True))
