"""Registered prefixes: beginnings of prompts that are kept for all to share (paper section 4.4)."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from pagedjax.baselines import PAGED
from pagedjax.device.kv_pool import PoolInfo
from pagedjax.errors import InvalidRequest, PagedJaxError, RequestTooLong
from pagedjax.params import SamplingParams
from pagedjax.prompt import Prompt
from pagedjax.scalars import shown

if TYPE_CHECKING:
    from pagedjax.engine import Engine

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


class Prefixes:
    """The registered prefixes of an engine: each is computed as a request, whose blocks are then kept.

    Attributes:
        by_name: those that were computed. Where their blocks are lost, they are computed again unasked.
        pending: names of those that are being computed for the first time.
    """

    def __init__(self, engine: Engine) -> None:
        self.by_name: dict[str, RegisteredPrefix] = {}
        self.pending: set[str] = set()
        self._engine = engine

    def register(self, prefix: Prompt, cache_salt: str | None) -> RegisteredPrefix:
        """See `Engine.register_prefix`."""
        engine, size = self._engine, self._engine.config.block_size
        if engine.config.allocator != PAGED:
            raise InvalidRequest(
                f"a prefix cannot be shared with allocator={engine.config.allocator!r}: only with 'paged'"
            )
        token_ids = engine._intake.read(prefix, PREFIX_PARAMS, None, cache_salt).prompt_token_ids
        check_prefix_len(len(token_ids), engine.max_model_len, engine.pool_info)
        num_blocks = len(token_ids) // size
        with engine._lock:
            names = (f"prefix-{number}" for number in count(engine._num_requests))
            name = next(name for name in names if not (engine.is_unfinished(name) or name in self.by_name))
            registered = RegisteredPrefix(name, token_ids, num_blocks * size, num_blocks, cache_salt)
            if num_blocks:
                self._compute(registered)
                self.pending.add(name)
                engine.open_mailbox(name, every=False)
            else:
                engine._num_requests += 1
        if num_blocks:
            self._wait_for(name)
        else:
            warn_shares_nothing(len(token_ids), size)
        with engine._lock:
            self.pending.discard(name)
            self.by_name[name] = registered
        return registered

    def _compute(self, prefix: RegisteredPrefix) -> None:
        """Adds the request that computes a prefix's full blocks."""
        tokens = {"prompt_token_ids": list(prefix.token_ids[: prefix.num_tokens])}
        request = self._engine._intake.read(tokens, PREFIX_PARAMS, None, prefix.cache_salt)
        request.max_len, request.registers_prefix = prefix.num_tokens + 1, True
        self._engine._add(request, prefix.name)

    def _wait_for(self, name: str) -> None:
        """Makes steps until a prefix is computed; one that is not leaves nothing pinned."""
        engine, reason = self._engine, None
        try:
            while not (output := engine.receive(name)).finished:
                pass
            reason = output.outputs[0].stop_reason or output.outputs[0].finish_reason
        finally:
            engine.close_mailbox(name)
            with engine._lock:
                if reason != "length":
                    self.pending.discard(name)
                    if name in engine.allocator.pins():
                        engine.scheduler.unpin(name)
        if reason != "length":
            raise PagedJaxError(f"the prefix could not be computed: {reason}")

    def compute_again(self) -> None:
        """Adds what computes the prefixes whose blocks are lost."""
        engine = self._engine
        for name, prefix in self.by_name.items():
            if prefix.num_blocks and name not in engine.allocator.pins() and not engine.is_unfinished(name):
                self._compute(prefix)

    def unregister(self, prefix: RegisteredPrefix) -> None:
        """See `Engine.unregister_prefix`."""
        engine = self._engine
        with engine._lock:
            if not isinstance(prefix, RegisteredPrefix) or self.by_name.get(prefix.name) is not prefix:
                raise InvalidRequest(
                    f"prefix={shown(prefix)} is not one that register_prefix gave and that is registered"
                )
            del self.by_name[prefix.name]
            if engine.is_unfinished(prefix.name):  # it was lost, and is not there again yet
                engine.abort(prefix.name)
            if prefix.name in engine.allocator.pins():
                engine.scheduler.unpin(prefix.name)


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
