"""What is told of a run: of its steps and of its requests, in memory that does not grow with it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from pagedjax.host.protocol import KVUsage
from pagedjax.sim.records import RequestRecord, StepRecord

_FINENESS = math.log(1.005)


class Quantiles:
    """Of positive numbers, to half a per cent: a histogram whose bins grow by as much."""

    def __init__(self) -> None:
        self._bins = Counter[int]()
        self._sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Takes a number in."""
        self._bins[math.floor(math.log(max(value, 1e-9)) / _FINENESS)] += 1
        self._sum += value
        self.count += 1

    @property
    def mean(self) -> float:
        """Exactly; NaN of nothing."""
        return self._sum / self.count if self.count else math.nan

    def quantile(self, part: float) -> float:
        """The number that this part of all do not exceed; NaN of nothing."""
        left = part * self.count
        for index in sorted(self._bins):
            left -= self._bins[index]
            if left <= 0:
                return math.exp((index + 0.5) * _FINENESS)
        return math.nan


class Summary:
    """Adds up steps and requests.

    Args:
        num_slots: of the pool, in tokens.
        since, until: seconds; steps that end before or after are left out, requests never (paper section 6.1 averages
            over all).
    """

    def __init__(self, num_slots: int, since: float = 0.0, until: float = math.inf) -> None:
        self._num_slots = num_slots
        self._since = since
        self._until = until
        self._usage = [0] * len(KVUsage._fields)
        self._num_steps = 0
        self._num_running = 0
        self._sharing = 0.0
        self._num_sharing = 0
        self._swapped = 0
        self._reasons = Counter[str]()
        self._tokens = 0
        self._last = 0.0
        self._preemptions = 0
        self.normalized_latency = Quantiles()
        self.first_token = Quantiles()
        self.between_tokens = Quantiles()

    def on_step(self, step: StepRecord) -> None:
        """Takes a step in."""
        self._last = step.end
        self._swapped += step.swapped_blocks
        if not self._since <= step.end <= self._until:
            return
        self._num_steps += 1
        self._num_running += step.num_running
        self._usage = [total + slots for total, slots in zip(self._usage, step.usage, strict=True)]
        if step.physical_blocks:
            self._sharing += step.logical_blocks / step.physical_blocks
            self._num_sharing += 1

    def on_request(self, request: RequestRecord) -> None:
        """Takes a request in; one that was aborted, failed or has no output has no latencies."""
        self._reasons[request.finish_reason] += 1
        self._tokens += request.num_output_tokens
        self._preemptions += request.num_preemptions
        if not request.is_served:
            return
        self.normalized_latency.add(request.normalized_latency)
        self.first_token.add(request.first_token - request.arrival)
        if request.output_len > 1:
            self.between_tokens.add((request.end - request.first_token) / (request.output_len - 1))

    def row(self) -> dict[str, Any]:
        """Fractions of the pool, requests, seconds, tokens a second, blocks; None for a mean over nothing.

        `sharing_saving` is 1 - 1 / (mean over steps of logical / physical blocks), as in the paper's Fig. 15.
        """
        steps, slots = self._num_steps, self._num_steps * self._num_slots
        return {
            **{
                name: total / slots if steps else None for name, total in zip(KVUsage._fields, self._usage, strict=True)
            },
            "mean_batched_requests": self._num_running / steps if steps else None,
            "requests": self._reasons.total(),
            "failed_requests": self._reasons.total() - self.normalized_latency.count,
            **_spread("normalized_latency", self.normalized_latency),
            **_spread("time_to_first_token", self.first_token),
            **_spread("time_between_tokens", self.between_tokens),
            "output_tokens_per_s": self._tokens / self._last if self._last else 0.0,
            "requests_per_s": self._reasons.total() / self._last if self._last else 0.0,
            "seconds": self._last,
            "preemptions": self._preemptions,
            "swapped_blocks": self._swapped,
            "sharing_saving": 1 - self._num_sharing / self._sharing if self._num_sharing else 0.0,
        }


def _spread(name: str, times: Quantiles) -> dict[str, float | None]:
    """Mean, median and 99th percentile in seconds; None of nothing, which JSON can say."""
    values = {"": times.mean, "_p50": times.quantile(0.5), "_p99": times.quantile(0.99)}
    return {f"{name}{part}_s": None if math.isnan(value) else value for part, value in values.items()}
