"""The knee of a system: the highest rate of requests that it serves before they wait too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pagedjax.errors import ConfigError

TOLERANCE = 0.01
"""How close the ends of a bracket must come, relative to the lower one."""


class Probe(NamedTuple):
    """A rate that was tried, in requests a second, and whether requests were served fast enough; None if none came."""

    rate: float
    holds: bool | None


def find_knee(
    holds: Callable[[float], bool | None],
    *,
    first: float,
    lowest: float,
    highest: float,
    progress: Callable[[Probe], None] | None = None,
) -> float:
    """Brackets the knee by doubling or halving, and narrows it down by bisection.

    Args:
        holds: whether requests are served fast enough at a rate; taken to be so below the knee, and not above. None if
            no request comes at that rate, which leads the search upwards.
        first: rate to begin with, from `lowest` to `highest`.
        lowest: rate below which the search ends.
        highest: rate above which it does.
        progress: told of every rate tried.

    Returns:
        The highest rate found that holds.

    Raises:
        ConfigError: no rate holds at which requests come, or every rate does.
    """
    served = 0.0  # the highest rate at which requests came and were served fast enough

    def probe(rate: float) -> bool:
        nonlocal served
        found = Probe(rate, holds(rate))
        if progress is not None:
            progress(found)
        if found.holds:
            served = max(served, rate)
        return found.holds is not False

    low = high = first
    if probe(first):
        while probe(high := 2 * low):
            low = high
            if low > highest:
                raise ConfigError(f"requests are served fast enough at every rate up to {low:g} a second")
    else:
        while not probe(low := high / 2):
            high = low
            if low < lowest:
                raise ConfigError(f"requests are not served fast enough even at {low:g} a second")
    while high - low > TOLERANCE * low:
        middle = (low + high) / 2
        low, high = (middle, high) if probe(middle) else (low, middle)
    if served < low:
        raise ConfigError(
            f"requests are not served fast enough at {high:g} a second, and at {low:g} none come in the time"
        )
    return served
