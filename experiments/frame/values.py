"""Configurations from the command line: keys and values as texts, sweeps over several of them, seeds."""

from __future__ import annotations

import difflib
import itertools
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any

from pagedjax.config import require
from pagedjax.errors import ConfigError
from pagedjax.scalars import shown

MOST_CONFIGURATIONS = 100_000


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean ...?)" for a name that is close to a known one, else nothing."""
    close = difflib.get_close_matches(str(name), [str(other) for other in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises ConfigError unless it is one of the choices; it names the nearest."""
    require(value in choices, name, value, f"one of {', '.join(choices)}{nearest(str(value), choices)}")


def keys_of(config_class: type) -> dict[str, Any]:
    """The types of a configuration's fields, by name."""
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in fields(config_class)}


def parse_value(config_class: type, key: str, text: str) -> Any:
    """The value of a field from its text.

    Raises:
        ConfigError: there is no such field, or the text is of another type.
    """
    kinds = keys_of(config_class)
    if key not in kinds:
        raise ConfigError(f"there is no key {key!r}{nearest(key, kinds)}: the keys are {', '.join(kinds)}")
    members = typing.get_args(kinds[key]) or (kinds[key],)
    if NoneType in members and text.lower() == "none":
        return None
    for member in (kind for kind in (bool, int, float, str) if kind in members):
        try:
            return _READERS[member](text)
        except ValueError:
            continue
    names = " or ".join("none" if kind is NoneType else kind.__name__ for kind in members)
    raise ConfigError(f"{key}={shown(text)} is not allowed: {key} must be of type {names}")


def _bool(text: str) -> bool:
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError:
        raise ValueError from None


_READERS: dict[type, Callable[[str], Any]] = {bool: _bool, int: int, float: float, str: str}


def split_pair(text: str, flag: str) -> tuple[str, str]:
    """Key and value of "key=value"."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{flag} {text!r} is not of the form key=value")
    return key.strip(), value


def parse_settings(config_class: type, pairs: Iterable[str]) -> dict[str, Any]:
    """What `--set key=value` says, of each key the last."""
    split = (split_pair(pair, "--set") for pair in pairs)
    return {key: parse_value(config_class, key, text) for key, text in split}


def parse_sweeps(config_class: type, sweeps: Iterable[str]) -> dict[str, list[Any]]:
    """What `--sweep key=a,b,c` says."""
    found: dict[str, list[Any]] = {}
    for sweep in sweeps:
        key, texts = split_pair(sweep, "--sweep")
        if key in found:
            raise ConfigError(f"--sweep {key}=... is given twice")
        values = [parse_value(config_class, key, text.strip()) for text in texts.split(",") if text.strip()]
        if not values:
            raise ConfigError(f"--sweep {sweep!r} is empty: it must be key=a,b,c with one value at least")
        found[key] = list(dict.fromkeys(values))
    return found


def parse_seeds(text: str) -> list[int]:
    """ "0..4" with both ends, "3", or "0,2,5"."""
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text.strip()):
        seeds = list(range(int(match[1]), int(match[2]) + 1)) if int(match[2]) - int(match[1]) < 10_000 else []
    elif re.fullmatch(r"\d+(,\d+)*", text.strip()):
        seeds = list(dict.fromkeys(int(part) for part in text.split(",")))
    else:
        seeds = []
    if not seeds:
        raise ConfigError(f"--seeds {text!r} is not allowed: it must be like 0..4, or 0,2,5")
    return seeds


def make_configs(config_class: type, settings: Mapping[str, Any], sweeps: Mapping[str, Sequence[Any]]) -> list[Any]:
    """One configuration for each combination of what is swept, the rest as set.

    Raises:
        ConfigError: a key is both set and swept, there are too many combinations, or one is not allowed.
    """
    for key in settings.keys() & sweeps.keys():
        raise ConfigError(f"{key} is both set and swept")
    number = 1
    for values in sweeps.values():
        number *= len(values)
    if number > MOST_CONFIGURATIONS:
        raise ConfigError(f"the sweep has {number:,} configurations; at most {MOST_CONFIGURATIONS:,} are allowed")
    combinations = itertools.product(*sweeps.values())
    return [config_class(**settings, **dict(zip(sweeps, values, strict=True))) for values in combinations]
