"""Converted checkpoints: a folder with an Orbax checkpoint of the parameters, the tokenizer, and a manifest.

The manifest is written last and lists every file with its size and CRC-32, so that a folder which was cut short or
altered is recognised before a single weight is used. Weights are stored in float32, uncompressed (compressed they take
twice as long to restore), and are cast to the wanted dtype while they are read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import orbax.checkpoint as ocp

from pagedjax.config import ModelConfig
from pagedjax.errors import CheckpointError, ConfigError
from pagedjax.interrupt import interrupts_deferred
from pagedjax.models.progress import bar, bytes_bar
from pagedjax.models.tokenizer import load_tokenizer
from pagedjax.models.weights import LeafPath, leaf_shapes, nest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Placement = Callable[[LeafPath, tuple[int, ...]], jax.sharding.Sharding]

MANIFEST = "pagedjax_manifest.json"
FORMAT_VERSION = 1
# leaves restored in one go: few enough for a bar that moves, enough to keep every core reading
_GROUP = 24
_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint folder says of itself.

    Attributes:
        source: where the weights came from, JSON-able.
        config: the model.
        tensors: shape by leaf, the path joined by "/".
        files: (bytes, CRC-32) of every other file in the folder.
    """

    source: dict[str, Any]
    config: ModelConfig
    tensors: dict[str, list[int]]
    files: dict[str, list[int]]


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a converted checkpoint, or was to become one."""
    return (folder / MANIFEST).is_file() or ((folder / "params").is_dir() and not (folder / "config.json").exists())


def save_checkpoint(
    folder: Path,
    config: ModelConfig,
    params: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    source: dict[str, Any],
) -> None:
    """Writes a checkpoint into an empty or missing folder.

    Args:
        folder: where to; the caller renames it to its place afterwards if others may look at it meanwhile.
        config: the model.
        params: nested dict of arrays in the layout of `weights.py`.
        tokenizer: saved beside the weights, if there is one.
        source: where the weights came from, JSON-able.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with interrupts_deferred(), quiet_orbax(), ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save((folder / "params").absolute(), args=ocp.args.PyTreeSave(params))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "tokenizer")
    manifest = {
        "format": "pagedjax-checkpoint",
        "version": FORMAT_VERSION,
        "source": source,
        "config": dataclasses.asdict(config),
        "tensors": {"/".join(path): list(shape) for path, shape in leaf_shapes(config).items()},
        "files": {name: [size, _crc32(folder / name)] for name, size in _sizes(folder).items()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


@contextmanager
def quiet_orbax(least: int = logging.ERROR) -> Iterator[None]:
    """Keeps off stderr what Orbax warns of when one process alone saves: that no other has a part to merge.

    Args:
        least: of the levels, what is still said.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(least)
    try:
        yield
    finally:
        logger.setLevel(level)


def read_manifest(folder: Path) -> Manifest:
    """The manifest, checked against itself; raises CheckpointError saying what is wrong with it."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text())
        if (data["format"], data["version"]) != ("pagedjax-checkpoint", FORMAT_VERSION):
            raise CheckpointError(
                f"{path}: format {data['format']!r} version {data['version']!r}; allowed: 'pagedjax-checkpoint' "
                f"version {FORMAT_VERSION}"
            )
        manifest = Manifest(data["source"], _config(data["config"]), data["tensors"], data["files"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, or none") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    for leaf, shape in leaf_shapes(manifest.config).items():
        name = "/".join(leaf)
        if manifest.tensors.get(name) != list(shape):
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {manifest.tensors.get(name, 'none')}; expected {list(shape)}"
            )
    return manifest


def verify_files(folder: Path, manifest: Manifest, *, progress: bool = True) -> None:
    """Raises CheckpointError naming the first file that is missing, cut short or altered."""
    sizes = _sizes(folder)
    for name, (size, _) in manifest.files.items():
        if sizes.get(name) != size:
            found = f"{sizes[name]} bytes" if name in sizes else "no such file"
            raise CheckpointError(f"{folder / name}: expected {size} bytes, found {found}")
    names = list(manifest.files)
    with (
        bytes_bar(f"check {folder.name}", sum(sizes[name] for name in names), progress) as ticks,
        ThreadPoolExecutor() as pool,
    ):
        for name, crc in zip(names, pool.map(lambda name: _crc32(folder / name), names), strict=True):
            if crc != manifest.files[name][1]:
                raise CheckpointError(
                    f"{folder / name}: was altered, its CRC-32 is {crc:08x}; expected {manifest.files[name][1]:08x}"
                )
            ticks.update(sizes[name])


def restore_checkpoint(
    folder: Path, manifest: Manifest, *, dtype: str, placement: Placement, progress: bool = True
) -> tuple[dict[str, Any], PreTrainedTokenizerBase | None]:
    """Reads a checkpoint's parameters straight into device arrays, and its tokenizer if there is one.

    Args:
        folder: holds what `save_checkpoint` wrote.
        manifest: of that folder.
        dtype: of the parameters, "float32" or "bfloat16".
        placement: sharding of a leaf, by its path and shape.
        progress: show bars on stderr.

    Raises:
        CheckpointError: the folder is incomplete, altered, or does not match its own description.
    """
    verify_files(folder, manifest, progress=progress)
    wanted = {
        path: jax.ShapeDtypeStruct(shape, dtype, sharding=placement(path, shape))
        for path, shape in leaf_shapes(manifest.config).items()
    }
    paths = list(wanted)
    leaves: dict[LeafPath, jax.Array] = {}
    with (
        ocp.Checkpointer(_handler()) as checkpointer,
        bar(None, f"load {folder.name}", progress, total=len(paths), unit="tensor") as ticks,
    ):
        for start in range(0, len(paths), _GROUP):
            group = {path: wanted[path] for path in paths[start : start + _GROUP]}
            leaves |= _restore_group(checkpointer, folder, group)
            ticks.update(len(group))
    return nest(leaves), load_tokenizer(folder / "tokenizer")


def _restore_group(
    checkpointer: ocp.Checkpointer, folder: Path, group: dict[LeafPath, jax.ShapeDtypeStruct]
) -> dict[LeafPath, jax.Array]:
    args = {
        path: ocp.ArrayRestoreArgs(dtype=leaf.dtype, sharding=leaf.sharding, global_shape=leaf.shape)
        for path, leaf in group.items()
    }
    restore = ocp.args.PyTreeRestore(item=nest(group), restore_args=nest(args), partial_restore=True)
    with interrupts_deferred():  # in the middle of Orbax's event loop, Ctrl-C sets off tracebacks of its own
        tree = checkpointer.restore((folder / "params").absolute(), args=restore)
    return {path: _leaf(tree, path) for path in group}


def _leaf(tree: Any, path: LeafPath) -> jax.Array:
    for key in path:
        tree = tree[key]
    return tree


def _handler() -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)


def _config(data: dict[str, Any]) -> ModelConfig:
    scaling = data["rope_scaling"]
    try:
        return ModelConfig(
            **{
                **data,
                "rope_scaling": None if scaling is None else tuple((key, value) for key, value in scaling),
                "eos_token_ids": tuple(data["eos_token_ids"]),
            }
        )
    except ConfigError as error:
        raise CheckpointError(f"the manifest's model configuration is not allowed: {error}") from error


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc
