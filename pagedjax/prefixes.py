"""Registered prefixes: beginnings of prompts that are kept for all to share (paper section 4.4)."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

from pagedjax.device.kv_pool import PoolInfo
from pagedjax.errors import RequestTooLong
from pagedjax.params import SamplingParams

PREFIX_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""A prefix is computed as a request that samples one token, which nobody sees."""


@dataclass(frozen=True, slots=True)
class RegisteredPrefix:
    """The beginning of prompts whose blocks are kept, until `Engine.unregister_prefix`, for all to share.

    Attributes:
        token_ids: of the whole prefix.
        num_tokens: of these in full blocks, which alone are shared.
        num_blocks: blocks kept.
        cache_salt: only requests of the same salt share them.
    """

    name: str
    token_ids: tuple[int, ...]
    num_tokens: int
    num_blocks: int
    cache_salt: str | None


def check_prefix_len(num_tokens: int, max_model_len: int, pool: PoolInfo) -> None:
    """Raises RequestTooLong for a prefix that the model or the pool could not hold."""
    limit = min(max_model_len - 1, pool.num_slots)
    if num_tokens > limit:
        raise RequestTooLong(
            f"the prefix has {num_tokens} tokens, but max_model_len={max_model_len} and the whole pool of "
            f"{pool.num_blocks} blocks of {pool.block_size} tokens allow at most {limit}"
        )


def warn_shares_nothing(num_tokens: int, block_size: int) -> None:
    """Says that a prefix is too short, at the line of the user's that registers it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("pagedjax."):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"the prefix of {num_tokens} tokens is shorter than a block of {block_size}: nothing of it is shared",
        stacklevel=level,
    )
