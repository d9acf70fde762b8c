"""The paper's artifact: one sequence is computed again, several are swapped.

Sequences of one group share blocks, which a swap moves once, while computing them again would take each its own tokens.
"""

from __future__ import annotations

from pagedjax.request import SequenceGroup


def swaps(group: SequenceGroup, block_size: int) -> bool:
    """Whether the group has several sequences that have not ended."""
    return len(group.unfinished) > 1
