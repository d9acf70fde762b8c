"""Requests to measure with: random prompts whose every output length is fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and how many tokens each request puts out."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True))

    def part(self, start: int, stop: int) -> Workload:
        """Requests `start` to `stop - 1`."""
        return Workload(self.prompts[start:stop], self.output_lens[start:stop])

    def one_request(self) -> Workload:
        """The request with the median output length, alone."""
        middle = sorted(range(len(self.prompts)), key=lambda i: self.output_lens[i])[len(self.prompts) // 2]
        return self.part(middle, middle + 1)


def random_workload(num_requests: int, seed: int, vocab_size: int) -> Workload:
    """Prompts of 16 to 255 random tokens, outputs of 16 to 127; the default 32 requests of seed 0 are workload W.

    Token ids are drawn from [1000, 40000), clear of special tokens, or from the whole vocabulary where it is smaller.
    The draws' order is part of the workload: prompt lengths, output lengths, then each prompt.
    """
    rng = np.random.default_rng(seed)
    prompt_lens = rng.integers(16, 256, num_requests)
    output_lens = rng.integers(16, 128, num_requests)
    low, high = token_range(vocab_size)
    return Workload([rng.integers(low, high, size).tolist() for size in prompt_lens], output_lens.tolist())


def token_range(vocab_size: int) -> tuple[int, int]:
    """The ids that random tokens are drawn from, [low, high)."""
    return (1000, 40000) if vocab_size >= 40000 else (0, vocab_size)
