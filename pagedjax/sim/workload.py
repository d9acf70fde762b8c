"""Requests and when they come: lengths from anywhere, arrivals drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from pagedjax.config import require
from pagedjax.request import Request, SamplingParams

Lengths = tuple[int, int]
"""Tokens of a prompt and of its output."""


class TimedRequest(NamedTuple):
    """A request that comes at a time, in seconds from the start."""

    time: float
    request: Request


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Arrivals at random, so many a second."""
    rng, now = random.Random(seed), 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def constant(rate: float, seed: int) -> Iterator[float]:
    """Arrivals at equal distances, so many a second; the seed does nothing."""
    return (number / rate for number in count(1))


def gamma(rate: float, seed: int, shape: float = 0.5) -> Iterator[float]:
    """Arrivals in bursts, so many a second: a shape below 1 makes the distances vary more than Poisson's."""
    rng, now = random.Random(seed), 0.0
    while True:
        now += rng.gammavariate(shape, 1 / (rate * shape))
        yield now


ARRIVALS: dict[str, Callable[[float, int], Iterator[float]]] = {
    "poisson": poisson,
    "constant": constant,
    "gamma": gamma,
}


def make_request(number: int, lengths: Lengths, time: float) -> Request:
    """A request whose output has a length that is known beforehand; its tokens are all alike."""
    prompt_len, output_len = lengths
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    prompt = (0,) * prompt_len
    return Request(str(number), number, prompt, params, 0, frozenset(), prompt_len + output_len, time)


def timed(lengths: Iterable[Lengths], times: Iterator[float], duration: float) -> Iterator[TimedRequest]:
    """Requests of these lengths, one at each time up to `duration` seconds."""
    for number, (pair, time) in enumerate(zip(lengths, times, strict=False)):
        if time >= duration:
            return
        yield TimedRequest(time, make_request(number, pair, time))


def paper_recipe(pairs: Sequence[Lengths], rate: float, duration: float, seed: int) -> Iterator[TimedRequest]:
    """The artifact's recipe: Poisson counts in bins of 10 ms; as many of the first pairs, shuffled.

    numpy's and Python's generators are seeded alike, as there.
    """
    import numpy as np

    require(rate > 0, "rate", rate, "a positive number of requests a second")
    bin_seconds = 0.01
    counts = np.random.RandomState(seed).poisson(rate * bin_seconds, int(duration / bin_seconds))
    times = [index * bin_seconds for index, number in enumerate(counts) for _ in range(number)]
    taken = list(pairs[: len(times)])
    random.Random(seed).shuffle(taken)
    return timed(taken, iter(times), duration)


def keep_servable(pairs: Iterable[Lengths], max_len: int) -> tuple[list[Lengths], dict[str, int]]:
    """Pairs that a model can serve, and how many cannot be, by what is wrong with them."""
    kept: list[Lengths] = []
    dropped = {"negative or empty": 0, f"longer than {max_len} tokens": 0}
    for prompt, output in pairs:
        if prompt < 1 or output < 1:
            dropped["negative or empty"] += 1
        elif prompt + output > max_len:
            dropped[f"longer than {max_len} tokens"] += 1
        else:
            kept.append((prompt, output))
    return kept, {reason: number for reason, number in dropped.items() if number}
