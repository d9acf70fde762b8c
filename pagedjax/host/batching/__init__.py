"""Who may join those that run, and when who is done leaves: a policy is one module of this package, chosen by its name.

`may_join(running, filling)` says whether anybody may be admitted now: `running` is the number of requests that run, and
`filling` whether the batch that was begun last has been closed by nothing but a step's tokens. `HOLDS` says whether a
sequence that is done keeps its memory until all that run are.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import NamedTuple


class Batching(NamedTuple):
    """A policy."""

    holds: bool
    may_join: Callable[[int, bool], bool]


@cache
def batching_names() -> tuple[str, ...]:
    """The policies there are."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load_batching(name: str) -> Batching:
    """The policy of that name, which must be one of `batching_names`."""
    module = importlib.import_module(f"{__name__}.{name}")
    return Batching(module.HOLDS, module.may_join)
