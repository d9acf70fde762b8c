"""Iteration-level scheduling, as Orca introduced it: requests join and leave at every step."""

from __future__ import annotations

HOLDS = False


def may_join(running: int, filling: bool) -> bool:
    """Always."""
    return True
