"""The knee of a system: the highest rate of requests that it serves before they wait too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pagedjax.errors import ConfigError

HIGHEST = 1e6
"""Requests a second at which the search gives up."""


class Probe(NamedTuple):
    """A rate that was tried, in requests a second, and whether requests were served fast enough."""

    rate: float
    holds: bool


def find_knee(
    holds: Callable[[float], bool],
    *,
    first: float,
    lowest: float,
    tolerance: float = 0.01,
    progress: Callable[[Probe], None] | None = None,
) -> float:
    """Brackets the knee by doubling or halving, and narrows it down by bisection.

    Args:
        holds: whether requests are served fast enough at a rate; taken to be so below the knee, and not above.
        first: rate to begin with.
        lowest: rate below which there are no requests to speak of.
        tolerance: how close the bracket's ends must come, relative to the lower one.

        progress: told of every rate tried.

    Returns:
        The highest rate found that holds.

    Raises:
        ConfigError: not even the lowest rate holds, or every rate does.
    """

    def probe(rate: float) -> bool:
        found = Probe(rate, holds(rate))
        if progress is not None:
            progress(found)
        return found.holds

    low = high = first
    if probe(first):
        while probe(high := 2 * low):
            low = high
            if low > HIGHEST:
                raise ConfigError(f"requests are served fast enough at every rate up to {low:g} a second")
    else:
        while not probe(low := high / 2):
            high = low
            if low < lowest:
                raise ConfigError(f"requests are not served fast enough even at {low:g} a second")
    while high - low > tolerance * low:
        middle = (low + high) / 2
        low, high = (middle, high) if probe(middle) else (low, middle)
    return low
