"""An engine out of a snapshot: what is checked before it is believed, and how its state is put into a new engine."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedjax.config import EngineConfig
from pagedjax.device.compilation_cache import use_compilation_cache
from pagedjax.errors import ConfigError, SnapshotError
from pagedjax.intake import check_config
from pagedjax.models.loader import LoadedModel, load_model
from pagedjax.output_data import load_output
from pagedjax.prefixes import RegisteredPrefix
from pagedjax.scalars import shown
from pagedjax.snapshots.files import MANIFEST, Arrays, list_snapshots, read_snapshot
from pagedjax.snapshots.state import VERSION, fingerprint

if TYPE_CHECKING:
    from pagedjax.engine import Engine

FREE_TO_CHANGE = frozenset(
    {"attention_backend", "attention_interpret", "event_log", "overlap", "seed", "snapshot_every", "snapshot_path"}
)
"""Fields of `EngineConfig` that a restored engine may have otherwise: its requests' tokens do not depend on them."""


def restore_engine(
    engine_class: type[Engine], path: Path, model: LoadedModel | None, config: EngineConfig | None, progress: bool
) -> Engine:
    """See `Engine.restore`."""
    if model is not None and not isinstance(model, LoadedModel):
        raise ConfigError(f"model={shown(model)} must be a LoadedModel, which load_model() gives, or None")
    if config is not None:
        check_config(config)
    folder, state, arrays = read_newest(path)
    with _making_sense(folder):
        check_version(state, folder)
        config = resolve_config(state, config)
        source = state["model"]["source"]
    if model is None:
        if "name" not in source:
            raise SnapshotError(f"{folder} records {source} as its model's source, which has no name: give model=")
        use_compilation_cache()
        model = load_model(source["name"], dtype=config.dtype, progress=progress)
    with _making_sense(folder):
        check_shape(state, model)
    engine = engine_class(model, config, progress)
    with _making_sense(folder):
        check_weights(state, engine)
        load_state(engine, state, arrays)
    return engine


@contextlib.contextmanager
def _making_sense(folder: Path) -> Iterator[None]:
    """Raises SnapshotError where the content is not of the form that this version writes."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:  # there are many ways not to make sense
        raise SnapshotError(f"{folder} makes no sense: {error!r}") from error


def read_newest(path: Path) -> tuple[Path, dict[str, Any], Arrays]:
    """The newest snapshot of a folder that is whole; or the one given itself. Says which ones it had to refuse.

    Raises:
        SnapshotError: there is none.
    """
    try:
        candidates = [path] if (path / MANIFEST).exists() else list_snapshots(path)[::-1] or [path]
    except OSError as error:
        raise SnapshotError(f"no snapshot can be used in {path}: {error.strerror}") from error
    refused: list[str] = []
    for folder in candidates:
        try:
            state, arrays = read_snapshot(folder)
        except (SnapshotError, OSError, ValueError, RecursionError) as error:
            refused.append(f"{error}")
            continue
        if refused:
            warnings.warn(f"{'; '.join(refused)}: the snapshot before, {folder}, is used", RuntimeWarning, stacklevel=4)
        return folder, state, arrays
    raise SnapshotError(f"no snapshot can be used in {path}: {'; '.join(refused)}")


def check_version(state: dict[str, Any], folder: Path) -> None:
    """Raises SnapshotError unless this program can read the state."""
    if state.get("version") != VERSION:
        raise SnapshotError(
            f"{folder} is a snapshot of version {state.get('version')!r}, but this program reads version {VERSION}"
        )


def resolve_config(state: dict[str, Any], config: EngineConfig | None) -> EngineConfig:
    """The configuration to go on with: the one recorded, or one given that agrees with it in all that matters.

    Raises:
        SnapshotError: they differ.
    """
    recorded, decided = EngineConfig(**state["config"]), state["decided"]
    changes: dict[str, Any] = dict(decided)
    for field in fields(EngineConfig) if config is not None else ():
        name, given, saved = field.name, getattr(config, field.name), getattr(recorded, field.name)
        if name in FREE_TO_CHANGE:
            changes[name] = given
        elif given not in (None, saved, decided.get(name)):
            raise SnapshotError(f"the snapshot is of an engine with {name}={saved!r}, but config has {name}={given!r}")
    return replace(recorded, **changes)


def check_shape(state: dict[str, Any], model: LoadedModel) -> None:
    """Raises SnapshotError unless the model is of the snapshot's shape."""
    recorded = state["model"]
    theirs, ours = recorded["config"], _plain(asdict(model.config))
    for name, value in theirs.items():
        if ours.get(name) != value:
            raise SnapshotError(
                f"the snapshot is of another model ({recorded['source']}): its {name} is {value!r}, but "
                f"{model.source} has {ours.get(name)!r}"
            )


def check_weights(state: dict[str, Any], engine: Engine) -> None:
    """Raises SnapshotError unless the weights are those of the snapshot."""
    recorded = state["model"]
    if recorded["fingerprint"] != fingerprint(engine):
        raise SnapshotError(
            f"the snapshot is of other weights ({recorded['source']}) than those of {engine.source}, in this dtype"
        )


def _plain(data: Any) -> Any:
    """As JSON gives it back: tuples are lists."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, tuple | list) else data


def load_state(engine: Engine, state: dict[str, Any], arrays: Arrays) -> None:
    """Puts a snapshot into an engine that was just made with its configuration and model."""
    seconds = time.monotonic() - state["clock"]
    engine.scheduler.restore(state["scheduler"])
    for group in engine.scheduler.roster.groups.values():
        engine._trackers.add(group)
    for name, data in state["trackers"]:
        engine._trackers.by_request[name].restore(data, seconds)
    engine._num_requests = state["num_requests"]
    outputs = [load_output(data, seconds) for data in state["outputs"]]
    for data in state["prefixes"]:
        prefix = RegisteredPrefix(**{**data, "token_ids": tuple(data["token_ids"])})
        engine._prefixes.by_name[prefix.name] = prefix
    engine._mail.deliver(output for output in outputs if output.request_id not in state["registering"])
    _give_up(engine, state["registering"])
    _load_blocks(engine, arrays)
    engine._prefixes.compute_again()


def _give_up(engine: Engine, names: list[str]) -> None:
    """Ends the prefixes that were being registered: who waited for them is gone."""
    for name in names:
        if engine.is_unfinished(name):
            engine.abort(name)
        if name in engine.allocator.pins():
            engine.scheduler.unpin(name)


def _load_blocks(engine: Engine, arrays: Arrays) -> None:
    ids, host_ids = engine.allocator.held_blocks()
    pool = engine.runner.host_pool
    if ids:
        parts = [arrays[f"pool{number}"] for number in range(len(pool.arrays))]
        engine.runner.write_blocks(ids, [_typed(part, array) for part, array in zip(parts, pool.arrays, strict=True)])
    if host_ids:
        for number, array in enumerate(pool.arrays):
            array[np.array(host_ids) - 1] = _typed(arrays[f"host{number}"], array)


def _typed(data: np.ndarray, like: np.ndarray) -> np.ndarray:
    return data.view(like.dtype).reshape(len(data), *like.shape[1:])
