"""What to do with a request whose memory is taken: bring it to the host, or compute it again (paper section 4.5).

A policy is one module of this package, by whose name it is chosen: `swaps(group, block_size)` says whether the group is
swapped out rather than computed again. It is a function of the state alone. A swap space that is full, or a group of
which nothing is computed, falls back to recomputation whatever the policy says.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from pagedjax.request import SequenceGroup

Policy = Callable[[SequenceGroup, int], bool]


@cache
def policy_names() -> tuple[str, ...]:
    """The policies there are."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load_policy(name: str) -> Policy:
    """The policy of that name, which must be one of `policy_names`."""
    return importlib.import_module(f"{__name__}.{name}").swaps
