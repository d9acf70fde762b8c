"""Experiments: files with a configuration, a run, a figure and claims. A new one needs a file and nothing else."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.frame.claims import Claim
from experiments.frame.values import keys_of, nearest
from pagedjax.cli.flags import attribute_texts
from pagedjax.errors import ConfigError

OWN_FOLDER = Path(__file__).parent.parent
FOLDERS_VARIABLE = "PAGEDJAX_EXPERIMENTS"

_PARTS = ("Config", "CPU_SET", "run", "plot", "claims")


@dataclass(frozen=True)
class Experiment:
    """One file.

    Attributes:
        name: of the file, without its ending.
        title: the first line of its docstring.
        config_class: a frozen dataclass, which says what each of its fields is for.
        cpu_set: the configurations that `reproduce` runs.
        run: gives the records of one configuration: flat, of numbers, texts, booleans and None.
        plot: gives a figure of the records, as a DataFrame, of one or several configurations.
        claims: gives what the paper says beside what such records say.
        timed: columns that measure time. An experiment with any runs alone.
    """

    name: str
    path: Path
    title: str
    config_class: type
    cpu_set: tuple[Any, ...]
    run: Callable[[Any], Iterable[dict[str, Any]]]
    plot: Callable[[Any], Any]
    claims: Callable[[Any], list[Claim]]
    timed: tuple[str, ...]

    def help_texts(self) -> dict[str, str]:
        """What each key of the configuration is for."""
        return attribute_texts(self.config_class.__doc__ or "")


def values_hash(name: str, values: dict[str, Any]) -> str:
    """What a configuration's folder is named by: equal for equal values, in whatever order."""
    identity = json.dumps({"experiment": name, "config": values}, sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def describe_config(config: Any) -> str:
    """The fields that differ from their defaults, in one line."""
    parts = []
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if (value := getattr(config, field.name)) != default:
            parts.append(f"{field.name}={value}")
    return " ".join(parts) or "(defaults)"


def folders() -> list[Path]:
    """Where experiments are looked for: here, and in the folders of PAGEDJAX_EXPERIMENTS."""
    others = [Path(name) for name in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if name]
    for folder in others:
        if not folder.is_dir():
            raise ConfigError(f"{FOLDERS_VARIABLE} names {str(folder)!r}, which is no folder")
    return [OWN_FOLDER, *others]


def experiment_paths() -> dict[str, Path]:
    """The files that are experiments, by name."""
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.py")):
            if re.search(r"^class Config\b", path.read_text(encoding="utf-8"), re.MULTILINE):
                if path.stem in found:
                    raise ConfigError(f"two experiments are named {path.stem}: {found[path.stem]} and {path}")
                found[path.stem] = path
    return found


def find_experiment(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        ConfigError: there is none, or its file lacks something.
    """
    paths = experiment_paths()
    if name not in paths:
        raise ConfigError(f"there is no experiment {name!r}{nearest(name, paths)}: they are {', '.join(paths)}")
    return load_experiment(paths[name])


def load_experiment(path: Path) -> Experiment:
    """The experiment of a file.

    Raises:
        ConfigError: it lacks something, or a configuration of it says nothing of one of its fields.
    """
    module = _import(path)
    if missing := [part for part in _PARTS if not hasattr(module, part)]:
        raise ConfigError(f"{path} is no experiment: it has no {', '.join(missing)}")
    config_class: Any = module.Config
    if not _is_frozen(config_class):
        raise ConfigError(f"{path} is no experiment: its Config is no frozen dataclass")
    title = (module.__doc__ or "").strip().partition("\n")[0]
    found = Experiment(
        path.stem,
        path,
        title,
        config_class,
        tuple(module.CPU_SET),
        module.run,
        module.plot,
        module.claims,
        tuple(getattr(module, "TIMED", ())),
    )
    silent = keys_of(config_class).keys() - found.help_texts().keys()
    if silent or not title:
        what = f"the keys {', '.join(sorted(silent))}" if silent else "what it is (its docstring)"
        raise ConfigError(f"{path} says nothing of {what}")
    return found


def _is_frozen(config_class: Any) -> bool:
    return is_dataclass(config_class) and config_class.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _import(path: Path) -> ModuleType:
    if path.parent == OWN_FOLDER:
        return importlib.import_module(f"experiments.{path.stem}")
    name = f"experiments_of_{hashlib.sha256(str(path.parent).encode()).hexdigest()[:8]}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
