"""Configurations from the command line: keys and values as texts, sweeps over several of them, seeds."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any

from pagedjax.config import require
from pagedjax.errors import ConfigError
from pagedjax.scalars import is_text, plain, shown

MOST_CONFIGURATIONS = 100_000
MOST_SEEDS = 10_000

SCALARS = (bool, int, float, str, NoneType)
_LONGEST_ERROR = 400


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean ...?)" for a name that is close to a known one, else nothing."""
    close = difflib.get_close_matches(str(name), [str(other) for other in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises ConfigError unless it is one of the choices; it names the nearest."""
    require(value in choices, name, value, f"one of {', '.join(choices)}{nearest(str(value), choices)}")


def require_unused(config: Any, because: str, *names: str) -> None:
    """Raises ConfigError if a field of no effect is not its default: it would be stored as if it had one.

    Args:
        because: of which other field's value.
    """
    for field in fields(config):
        if field.name in names:
            value = getattr(config, field.name)
            allowed = f"{shown(field.default)} with {because}, where it is not used"
            require(value == field.default, field.name, value, allowed)


def said(error: BaseException) -> str:
    """An error in one line, cut where it is long."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."


def keys_of(config_class: type) -> dict[str, Any]:
    """The types of a configuration's fields, by name."""
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in fields(config_class)}


def kind_name(kind: Any) -> str:
    """A field's type in words."""
    return " or ".join(
        "none" if member is NoneType else getattr(member, "__name__", str(member)) for member in _of(kind)
    )


def _of(kind: Any) -> tuple[Any, ...]:
    """The types that a field may have."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, UnionType) else (kind,)


def plain_values(config: Any) -> dict[str, Any]:
    """The fields of a configuration as they are stored: equal ones for equal configurations.

    Raises:
        ConfigError: one cannot be stored.
    """
    kinds, values = keys_of(type(config)), {}
    for name, kind in kinds.items():
        value = plain(getattr(config, name))
        if type(value) is int and float in _of(kind) and int not in _of(kind):
            value = float(value)  # 4 and 4.0 are equal, and their texts are not
        for part in value if isinstance(value, tuple) else (value,):
            if not is_scalar(part):
                raise ConfigError(f"{name}={shown(value)} is not allowed: a configuration has {SCALAR_WORDS}")
        values[name] = value
    return values


SCALAR_WORDS = "finite numbers, texts, booleans and None"


def is_scalar(value: object) -> bool:
    """Whether JSON has it, and gives it back as it is."""
    return isinstance(value, SCALARS) and not (isinstance(value, float) and not math.isfinite(value))


def record_line(record: object) -> str:
    """A record as one line of JSON.

    Raises:
        ConfigError: it is no record, or holds what JSON has not.
    """
    if not isinstance(record, dict):
        raise ConfigError(f"a record must be a dict, not {shown(record)}")
    values = {key: plain(value) for key, value in record.items()}
    for key, value in values.items():
        if not isinstance(key, str) or not is_scalar(value):
            what = f"{shown(key)}: {shown(value)}"
            raise ConfigError(f"a record has {what}, which cannot be written: records have {SCALAR_WORDS}, by name")
    return json.dumps(values)


def parse_value(config_class: type, key: str, text: str) -> Any:
    """The value of a field from its text.

    Raises:
        ConfigError: there is no such field, or the text is of another type.
    """
    kinds = keys_of(config_class)
    if key not in kinds:
        raise ConfigError(f"there is no key {key!r}{nearest(key, kinds)}: the keys are {', '.join(kinds)}")
    members = _of(kinds[key])
    if NoneType in members and text.lower() == "none":
        return None
    for member in (kind for kind in (bool, int, float, str) if kind in members):
        try:
            return _READERS[member](text)
        except ValueError:
            continue
    finite = ", and finite" if float in members else ""
    raise ConfigError(f"{key}={shown(text)} is not allowed: {key} must be of type {kind_name(kinds[key])}{finite}")


def _bool(text: str) -> bool:
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError:
        raise ValueError from None


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


def _text(text: str) -> str:
    if not is_text(text):
        raise ValueError
    return text


_READERS: dict[type, Callable[[str], Any]] = {bool: _bool, int: int, float: _float, str: _text}


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
        values = (
            [parse_value(config_class, key, text.strip()) for text in texts.split(",")] if texts.strip(" ,") else []
        )
        if not values:
            raise ConfigError(f"--sweep {sweep!r} is empty: it must be key=a,b,c with one value at least")
        found[key] = list(dict.fromkeys(values))
    return found


def parse_seeds(text: str) -> list[int]:
    """ "0..4" with both ends, "3", or "0,2,5"."""
    if match := re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", text.strip()):
        seeds = range(int(match[1]), int(match[2]) + 1)
    elif re.fullmatch(r"\d{1,18}(,\d{1,18})*", text.strip()):
        seeds = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    else:
        seeds = ()
    if not 0 < len(seeds) <= MOST_SEEDS:
        raise ConfigError(
            f"--seeds {text!r} is not allowed: it must be like 0..4, or 0,2,5, of one seed to {MOST_SEEDS:,}"
        )
    return list(seeds)


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
    try:
        return [config_class(**settings, **dict(zip(sweeps, values, strict=True))) for values in combinations]
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # a field without a default; an experiment's own check
        raise ConfigError(f"the configuration is not allowed: {error}") from error
