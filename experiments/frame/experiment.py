"""Experiments: files with a configuration, a run, a figure and claims. A new one needs a file and nothing else."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.frame.claims import Claim
from experiments.frame.values import keys_of, nearest, plain_values, said
from pagedjax.cli.flags import attribute_texts
from pagedjax.errors import ConfigError
from pagedjax.scalars import shown

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
        cpu_set: the configurations that `reproduce` runs, each once.
        run: gives the records of one configuration: flat, of numbers, texts, booleans and None.
        plot: gives a figure of the records, as a DataFrame, of one or several configurations.
        claims: gives what the paper says beside what such records say.
        timed: columns that measure time.
        runs_alone: whether a configuration is not to be disturbed by others beside it; by default, if any column
            measures time.
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
    runs_alone: Callable[[Any], bool]

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
    # Processes elsewhere, which have another working directory, get these paths.
    others = [Path(name).resolve() for name in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if name]
    for folder in others:
        if not folder.is_dir():
            raise ConfigError(f"{FOLDERS_VARIABLE} names {str(folder)!r}, which is no folder")
    return list(dict.fromkeys([OWN_FOLDER, *others]))


def experiment_paths() -> dict[str, list[Path]]:
    """The files that are experiments, by name; there should be one of each."""
    found: dict[str, list[Path]] = {}
    for folder in folders():
        for path in sorted(folder.glob("[!.]*.py")):
            if path.is_file() and re.search(rb"^class Config\b", path.read_bytes(), re.MULTILINE):
                found.setdefault(path.stem, []).append(path)
    return found


def find_experiment(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        ConfigError: there is none, or there are several, or its file lacks something.
    """
    return load_experiment(path_of(name))


def path_of(name: str) -> Path:
    """The file of an experiment, which may be one that cannot be loaded.

    Raises:
        ConfigError: there is none, or there are several.
    """
    paths = experiment_paths()
    if name not in paths:
        others = [str(path) for folder in folders() if (path := folder / f"{name}.py").is_file()]
        why = f" ({others[0]} has no class Config)" if others else nearest(name, paths)
        raise ConfigError(f"there is no experiment {name!r}{why}: they are {', '.join(paths)}")
    if len(paths[name]) > 1:
        raise ConfigError(f"several experiments are named {name}: {', '.join(map(str, paths[name]))}")
    return paths[name][0]


def find_all() -> tuple[list[Experiment], list[str]]:
    """All experiments that can be loaded, and what is wrong with the others."""
    found, wrong = [], []
    for name in experiment_paths():
        try:
            found.append(find_experiment(name))
        except ConfigError as error:
            wrong.append(str(error))
    return found, wrong


def load_experiment(path: Path) -> Experiment:
    """The experiment of a file.

    Raises:
        ConfigError: it cannot be imported, lacks something, or says nothing of one of its configuration's fields.
    """
    try:
        module = _import(path)
    except (Exception, SystemExit) as error:  # whatever a file does when it is imported
        raise ConfigError(f"{path}{_line_in(path, error)} cannot be loaded: {said(error)}") from error
    if wrong := next(_faults(module), None):
        raise ConfigError(f"{path} is no experiment: {wrong}")
    config_class: Any = module.Config
    title = (module.__doc__ or "").strip().partition("\n")[0]
    found = Experiment(
        path.stem,
        path,
        title,
        config_class,
        tuple(config for i, config in enumerate(module.CPU_SET) if config not in module.CPU_SET[:i]),
        module.run,
        module.plot,
        module.claims,
        tuple(getattr(module, "TIMED", ())),
        getattr(module, "runs_alone", lambda config: bool(getattr(module, "TIMED", ()))),
    )
    silent = keys_of(config_class).keys() - found.help_texts().keys()
    if silent or not title:
        what = f"the keys {', '.join(sorted(silent))}" if silent else "what it is (its docstring)"
        raise ConfigError(f"{path} says nothing of {what}")
    return found


def _faults(module: Any) -> Iterator[str]:
    """What is wrong with the parts of an experiment, the worst first."""
    if missing := [part for part in _PARTS if not hasattr(module, part)]:
        yield f"it has no {', '.join(missing)}"
    if not (is_dataclass(module.Config) and module.Config.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        yield "its Config is no frozen dataclass"
    config_class: Any = module.Config
    for part in ("run", "plot", "claims"):
        if not callable(getattr(module, part)):
            yield f"its {part} is no function"
    if not isinstance(module.CPU_SET, (list, tuple)):
        yield "its CPU_SET is no list"
    if others := [config for config in module.CPU_SET if not isinstance(config, config_class)]:
        yield f"its CPU_SET has {shown(others[0])}, which is no Config"
    for config in module.CPU_SET:
        try:
            plain_values(config)
        except ConfigError as error:
            yield f"its CPU_SET has {error}"
    timed = getattr(module, "TIMED", ())
    if not isinstance(timed, (list, tuple)) or not all(isinstance(column, str) for column in timed):
        yield "its TIMED is no list of columns"


def _line_in(path: Path, error: BaseException) -> str:
    """Where in a file an error came up; a syntax error says it itself."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}," if lines else ""


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
