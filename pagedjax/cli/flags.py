"""Flags made from the dataclasses: a field added to `EngineConfig` or `SamplingParams` is a flag of every command."""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from types import NoneType

from pagedjax.config import EngineConfig
from pagedjax.request import SamplingParams
from pagedjax.sim.config import SimulationConfig
from pagedjax.tables import check_writable

DEFAULT_MODEL = "smollm2-135m"
# Both classes have a `seed`; the request's is the one that people mean.
RENAMED = {(EngineConfig, "seed"): "--engine-seed"}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """`--model`, and a flag for every field of `EngineConfig`."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"{DEFAULT_MODEL}, a Hugging Face id, a local folder or a .gguf file (default: {DEFAULT_MODEL})",
    )
    _add_flags(parser.add_argument_group("engine"), EngineConfig, {}, _names(EngineConfig))


def add_sampling_flags(
    parser: argparse.ArgumentParser, only: Collection[str] | None = None, **defaults: object
) -> None:
    """A flag for every field of `SamplingParams`, or for those in `only`; `defaults` override the class's own."""
    _add_flags(parser.add_argument_group("sampling"), SamplingParams, defaults, only or _names(SamplingParams))


def add_simulation_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of `SimulationConfig`."""
    _add_flags(parser.add_argument_group("simulation"), SimulationConfig, {}, _names(SimulationConfig))


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`: the printed table again, as records."""
    parser.add_argument("--json", metavar="FILE", type=writable_file, help="write the table's rows to FILE too")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """What the engine's flags said. Raises ConfigError."""
    return EngineConfig(**_given(args, EngineConfig))


def simulation_config(args: argparse.Namespace) -> SimulationConfig:
    """What the simulation's flags said. Raises ConfigError."""
    return SimulationConfig(**_given(args, SimulationConfig))


def sampling_fields(args: argparse.Namespace) -> dict[str, typing.Any]:
    """What the sampling flags said, and the command's own defaults: arguments for `SamplingParams`."""
    return _given(args, SamplingParams)


def positive_int(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def natural_int(text: str) -> int:
    """An integer of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is not at least 0")
    return value


def writable_file(text: str) -> str:
    """The name of a file that can be written, for argparse: said before the work, not after it."""
    try:
        check_writable(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r} ({error.strerror})") from None
    return text


def _names(cls: type) -> list[str]:
    return [field.name for field in fields(cls)]


def _given(args: argparse.Namespace, cls: type) -> dict[str, typing.Any]:
    prefix = f"{cls.__name__}."
    return {dest.removeprefix(prefix): value for dest, value in vars(args).items() if dest.startswith(prefix)}


def _add_flags(
    group: argparse._ArgumentGroup, cls: type, defaults: Mapping[str, object], only: Collection[str]
) -> None:
    kinds, texts = typing.get_type_hints(cls), attribute_texts(cls.__doc__ or "")
    for field in fields(cls):
        if field.name not in only:
            continue
        default = defaults.get(field.name, field.default)
        flag = RENAMED.get((cls, field.name), "--" + field.name.replace("_", "-"))
        group.add_argument(
            flag,
            dest=f"{cls.__name__}.{field.name}",
            # The class keeps its defaults; only a command's own are passed on.
            default=defaults.get(field.name, argparse.SUPPRESS),
            help=f"{texts.get(field.name, '')} (default: {_shown(default)})".replace("%", "%%"),
            **_how(kinds[field.name]),
        )


def _shown(default: object) -> str:
    return "none" if default is None or default == () else str(default)


def attribute_texts(doc: str) -> dict[str, str]:
    """The "Attributes:" section of a Google-style docstring: {name: text on one line}."""
    section = doc.partition("Attributes:")[2]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in entries}


def _how(kind: typing.Any) -> dict[str, typing.Any]:
    """How argparse reads a field of this type."""
    members = typing.get_args(kind) or (kind,)
    if set(members) <= {bool, NoneType}:
        return {"action": argparse.BooleanOptionalAction}
    if any(typing.get_origin(member) is Mapping for member in members):
        return {"type": _biases, "metavar": "TOKEN=BIAS,..."}
    if tuple[int, ...] in members:
        return {"type": _token_ids, "metavar": "ID,..."}
    if tuple[str, ...] in members:
        return {"action": "append", "metavar": "TEXT"}
    base: type = next(member for member in members if member is not NoneType)
    return {"type": _or_none(base) if NoneType in members else base, "metavar": base.__name__.upper()}


def _or_none(base: type) -> Callable[[str], object]:
    def parse(text: str) -> object:
        return None if text.lower() == "none" else base(text)

    parse.__name__ = f"{base.__name__} (or none)"  # argparse names the type in its error
    return parse


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _biases(text: str) -> dict[int, float]:
    pairs = (part.partition("=") for part in text.split(","))
    return {int(token): float(bias) for token, _, bias in pairs}
