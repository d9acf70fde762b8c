"""What is told of a run: of its steps and of its requests, in memory that does not grow with it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from pagedjax.host.protocol import KVUsage
from pagedjax.sim.simulator import RequestRecord, StepRecord

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
        since: seconds; steps that end before are left out, requests never (paper section 6.1 averages over all).
    """

    def __init__(self, num_slots: int, since: float = 0.0) -> None:
        self._num_slots = num_slots
        self._since = since
        self._usage = [0] * len(KVUsage._fields)
        self._num_steps = 0
        self._num_running = 0
        self._tokens = 0
        self._last = 0.0
        self._preemptions = 0
        self.normalized_latency = Quantiles()
        self.first_token = Quantiles()
        self.between_tokens = Quantiles()

    def on_step(self, step: StepRecord) -> None:
        """Takes a step in."""
        self._last = step.end
        if step.end < self._since:
            return
        self._num_steps += 1
        self._num_running += step.num_running
        self._usage = [total + slots for total, slots in zip(self._usage, step.usage, strict=True)]

    def on_request(self, request: RequestRecord) -> None:
        """Takes a request in."""
        self._tokens += request.output_len
        self._preemptions += request.num_preemptions
        self.normalized_latency.add(request.normalized_latency)
        self.first_token.add(request.first_token - request.arrival)
        if request.output_len > 1:
            self.between_tokens.add((request.end - request.first_token) / (request.output_len - 1))

    def row(self) -> dict[str, Any]:
        """Fractions of the pool, requests, seconds and tokens a second."""
        slots = max(1, self._num_steps * self._num_slots)
        return {
            **{name: total / slots for name, total in zip(KVUsage._fields, self._usage, strict=True)},
            "mean_batched_requests": self._num_running / max(1, self._num_steps),
            "requests": self.normalized_latency.count,
            "normalized_latency_s": self.normalized_latency.mean,
            "normalized_latency_p50_s": self.normalized_latency.quantile(0.5),
            "normalized_latency_p99_s": self.normalized_latency.quantile(0.99),
            "time_to_first_token_s": self.first_token.mean,
            "time_between_tokens_s": self.between_tokens.mean,
            "output_tokens_per_s": self._tokens / self._last if self._last else 0.0,
            "preemptions": self._preemptions,
        }
