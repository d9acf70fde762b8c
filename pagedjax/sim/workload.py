"""When requests come, and what they are: lengths from a trace, arrivals drawn by a seed, or both as they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from pagedjax.config import require
from pagedjax.errors import ConfigError
from pagedjax.request import BeamSearchParams, Request, SamplingParams
from pagedjax.sim.traces.rows import TraceRow

HIGHEST_RATE = 1_000_000
"""Requests a second."""

_SHARED = -1  # the token of prefixes that all have; the others are smaller, or hashes

HOPELESS = 200_000
"""Rows too long to be served, before the first that is not."""


class TimedRequest(NamedTuple):
    """A request that comes at a time, in seconds from the start."""

    time: float
    request: Request


# ---------------------------------------------------------------------- arrivals


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Arrivals at random, so many a second."""
    rng, now = random.Random(f"arrivals {seed}"), 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def constant(rate: float, seed: int) -> Iterator[float]:
    """Arrivals at equal distances, so many a second; the seed does nothing."""
    return (number / rate for number in count(1))


def gamma(rate: float, seed: int, shape: float = 0.5) -> Iterator[float]:
    """Arrivals in bursts, so many a second: a shape below 1 makes the distances vary more than Poisson's."""
    rng, now = random.Random(f"arrivals {seed}"), 0.0
    while True:
        now += rng.gammavariate(shape, 1 / (rate * shape))
        yield now


ARRIVALS: dict[str, Callable[[float, int], Iterator[float]]] = {
    "poisson": poisson,
    "gamma": gamma,
    "constant": constant,
}


def paper_arrivals(rate: float, duration: float, seed: int) -> list[float]:
    """The artifact's: Poisson counts of numpy's generator in bins of 10 ms."""
    import numpy as np

    bin_seconds = 0.01
    counts = np.random.RandomState(seed).poisson(rate * bin_seconds, round(duration / bin_seconds))
    return [index * bin_seconds for index, number in enumerate(counts) for _ in range(number)]


# ---------------------------------------------------------------------- rows in an order


def paper_order(rows: Iterable[TraceRow], seed: int) -> list[TraceRow]:
    """The artifact's: rows, as many of the first as are needed, shuffled by Python's generator."""
    taken = list(rows)
    random.Random(seed).shuffle(taken)
    return taken


def at_random(rows: Sequence[TraceRow], seed: int) -> Iterator[TraceRow]:
    """Rows drawn one by one, each as likely every time."""
    rng = random.Random(f"rows {seed}")
    while True:
        yield rng.choice(rows)


# ---------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes requests whose outputs have lengths that are known beforehand.

    No two prompts have a token in common, except where block hashes say that they begin alike.

    Attributes:
        n: samples of each request.
        beam_width: of a beam search instead; 0 is none.
        block_tokens: tokens that a block hash stands for.
        shrink: prompts are as many times shorter, and so are the blocks of their hashes.
        cut_prompts: to their last so many tokens; None is not at all.
        cut_outputs: to so many tokens; None is not at all.
        shared_prefix: tokens that all prompts begin with, beside their own.
    """

    n: int = 1
    beam_width: int = 0
    block_tokens: int = 0
    shrink: int = 1
    cut_prompts: int | None = None
    cut_outputs: int | None = None
    shared_prefix: int = 0

    def make(self, number: int, row: TraceRow, time: float) -> Request:
        """The request of a row that comes as number so many."""
        output_len = self.output_len(row)
        params, beam = SamplingParams(n=self.n, max_tokens=output_len, ignore_eos=True), None
        if self.beam_width:
            beam = BeamSearchParams(beam_width=self.beam_width, max_tokens=output_len, ignore_eos=True)
        prompt = self._prompt(number, row)
        max_len = len(prompt) + output_len
        return Request(str(number), number, prompt, params, 0, frozenset(), max_len, time, beam=beam)

    def prompt_len(self, row: TraceRow) -> int:
        """Tokens of a row's prompt, the shared ones included."""
        return self.shared_prefix + self._own_len(row)

    def output_len(self, row: TraceRow) -> int:
        """Tokens of a row's output."""
        return min(row.output_len, self.cut_outputs or row.output_len)

    def _own_len(self, row: TraceRow) -> int:
        return min(-(-row.prompt_len // self.shrink), self.cut_prompts or row.prompt_len)

    def _prompt(self, number: int, row: TraceRow) -> tuple[int, ...]:
        """Of every block the hash, as often as it has tokens; of what has no hash a number that nobody else has."""
        length, shared = self._own_len(row), (_SHARED,) * self.shared_prefix
        if not row.block_hashes:
            return (*shared, *(-2 - number,) * length)
        size = self.block_tokens // self.shrink
        whole = [token for token in row.block_hashes for _ in range(size)][: -(-row.prompt_len // self.shrink)]
        return (*shared, *whole[len(whole) - length :])


def keep_servable(
    rows: Iterable[TraceRow], maker: RequestMaker, max_len: int, leave_out: Callable[[str], None]
) -> Iterator[TraceRow]:
    """The rows whose prompt and output together have at most `max_len` tokens; `leave_out` is told of the others.

    Raises:
        ConfigError: while reading, if there is none among so many that there is little hope: rows may be without end.
    """
    kept = False
    for number, row in enumerate(rows):
        if maker.prompt_len(row) + maker.output_len(row) <= max_len:
            kept = True
            yield row
        else:
            leave_out(f"more than {max_len} tokens")
            if not kept and number == HOPELESS:
                raise ConfigError(f"no row of the workload can be served: {number:,} have more than {max_len} tokens")


def timed(
    arrivals: Iterable[tuple[float, TraceRow]],
    duration: float,
    maker: RequestMaker = RequestMaker(),
    too_late: Callable[[], None] | None = None,
) -> Iterator[TimedRequest]:
    """The requests of these times and rows, up to `duration` seconds.

    Args:
        too_late: told of each that comes later. None: nobody asks, and there may be no end of them.
    """
    for number, (time, row) in enumerate(arrivals):
        if time < duration:
            yield TimedRequest(time, maker.make(number, row, time))
        elif too_late is None:
            return
        else:
            too_late()


def require_rate(rate: object) -> None:
    """Raises ConfigError unless it is a positive number that arrivals can have."""
    ok = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate <= HIGHEST_RATE
    require(ok, "rate", rate, f"above 0 and at most {HIGHEST_RATE:,} requests a second")
