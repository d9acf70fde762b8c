"""Always swap."""

from __future__ import annotations

from pagedjax.request import SequenceGroup


def swaps(group: SequenceGroup, block_size: int) -> bool:
    """True."""
    return True
