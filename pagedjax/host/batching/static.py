"""Request-level batching, as in FasterTransformer: the earliest requests run together until the longest is done."""

from __future__ import annotations

HOLDS = True


def may_join(running: int, filling: bool) -> bool:
    """Only into a new batch, while it is being filled."""
    return filling or not running
