"""What users give as a number, a switch or a text. Standard library only: `pagedjax.config` imports this module."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

_LONGEST = 120
_PLAIN = (bool, int, float, str, tuple, list, dict)


def plain(value: object) -> object:
    """A number of any library (`np.int64(3)`) or `np.bool_` as the Python value it is; anything else as given."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value).__module__ == "numpy" and type(value).__name__ == "bool":
        return bool(value)
    return value


def make_plain(config: Any) -> None:
    """Applies `plain` to every field of a frozen dataclass that is being made."""
    for field in fields(config):
        object.__setattr__(config, field.name, plain(getattr(config, field.name)))


def is_int(value: object, least: int) -> bool:
    """Whether it is an integer, no bool, of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether it is a finite number, and no bool."""
    # An int may be too large for a float; isfinite would raise.
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def is_text(value: object) -> bool:
    """Whether it is a string that can be written as UTF-8: lone surrogates stand for bytes that were none."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """A value for a message: its repr on one line, cut where it is long, and its type where the repr hides it."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    if value is None or type(value).__module__ == "builtins":
        return text
    return f"{text} (of type {type(value).__name__})"
