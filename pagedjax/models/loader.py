"""`load_model`: from a name, a folder or a file to parameters on the device."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pagedjax.config import DTYPES, ModelConfig, require
from pagedjax.errors import CheckpointError, ModelError
from pagedjax.models.cache import cache_home, workspace
from pagedjax.models.checkpoint import (
    Manifest,
    Placement,
    is_checkpoint,
    read_manifest,
    restore_checkpoint,
    save_checkpoint,
    verify_files,
)
from pagedjax.models.fetch import fetch_gguf
from pagedjax.models.gguf import GGUFFile
from pagedjax.models.hf import HFFolder, download_snapshot
from pagedjax.models.progress import stages
from pagedjax.models.registry import KNOWN_MODELS, WheelRecipe
from pagedjax.models.tokenizer import load_tokenizer, tokenizer_from_gguf
from pagedjax.models.weights import LeafPath
from pagedjax.scalars import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        config: its shape.
        params: nested dict of arrays on the device, in the wanted dtype (layout: `weights.py`).
        tokenizer: None when the source has none; prompts are token ids then.
        source: JSON-able record of where the weights came from; `load_model(source["name"])` finds them again.
    """

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase | None
    source: dict[str, Any]


def check_model_name(name: object) -> None:
    """Raises ModelError unless it is something that can be looked for."""
    if not isinstance(name, str | Path) or not str(name) or "\0" in str(name):
        raise ModelError(f"model={shown(name)} must be a name, a path or a Hugging Face id")


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str,
    sharding: jax.sharding.Sharding | Placement | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Loads a model, fetching and converting it first where that has not been done yet.

    Args:
        name_or_path: a known name ("smollm2-135m"), a local folder (Hugging Face's layout, or a converted
            checkpoint), a llama-architecture `.gguf` file, or a Hugging Face id ("org/model", "org/model@revision").
        dtype: of the parameters, "float32" or "bfloat16".
        sharding: of every leaf, or a function of a leaf's path and shape; None is the default device.
        progress: show bars on stderr for what takes longer than a second.

    Raises:
        ModelError: unknown name or model type; a file missing, cut short or altered; a tensor missing or misshapen.
        CheckpointError: a converted checkpoint given by path is incomplete or altered.
        DownloadError: the model is not on this machine and cannot be downloaded.
    """
    require(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    placement = _placement(sharding)
    check_model_name(name_or_path)
    name, path = str(name_or_path), Path(os.path.expanduser(name_or_path))
    if name in KNOWN_MODELS:
        return _load_known(name, KNOWN_MODELS[name], dtype, placement, progress)
    if path.is_dir() and is_checkpoint(path):
        return _load_checkpoint(path.resolve(), dtype, placement, progress)
    if path.is_dir():
        return _load_folder(path.resolve(), {"kind": "folder", "name": str(path.resolve())}, dtype, placement, progress)
    if path.is_file():
        return _load_gguf(path.resolve(), dtype, placement, progress)
    if _HUB_ID.fullmatch(name):
        folder, revision = download_snapshot(name, progress=progress)
        source = {"kind": "hub", "name": f"{name.partition('@')[0]}@{revision}"}
        return _load_folder(folder, source, dtype, placement, progress)
    raise ModelError(
        f"unknown model {name!r}: allowed are the known names ({', '.join(KNOWN_MODELS)}), a local folder or .gguf "
        "file that exists, or a Hugging Face id such as 'org/model'"
    )


def _placement(sharding: jax.sharding.Sharding | Placement | None) -> Placement:
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(sharding, jax.sharding.Sharding):
        return lambda path, shape: sharding
    return sharding


def _load_known(name: str, recipe: WheelRecipe, dtype: str, placement: Placement, progress: bool) -> LoadedModel:
    """Restores the cached checkpoint; makes it when it is missing, or anew when it is damaged or of other weights."""
    folder = cache_home() / "models" / name
    try:
        return _restore_known(folder, recipe, dtype, placement, progress)
    except CheckpointError as error:
        if is_checkpoint(folder):
            warnings.warn(f"{error}; converting {name} anew", stacklevel=3)
    _convert(name, recipe, folder, progress)
    return _restore_known(folder, recipe, dtype, placement, progress)


def _restore_known(folder: Path, recipe: WheelRecipe, dtype: str, placement: Placement, progress: bool) -> LoadedModel:
    manifest = _check_known(folder, recipe)
    params, tokenizer = restore_checkpoint(folder, manifest, dtype=dtype, placement=placement, progress=progress)
    return LoadedModel(manifest.config, params, tokenizer, manifest.source)


def _check_known(folder: Path, recipe: WheelRecipe) -> Manifest:
    manifest = read_manifest(folder)
    if manifest.source.get("sha256") != recipe.sha256:
        raise CheckpointError(f"{folder} was made from other weights than those of {recipe.requirement}")
    return manifest


def _convert(name: str, recipe: WheelRecipe, folder: Path, progress: bool) -> None:
    with workspace(name) as work:
        try:
            verify_files(folder, _check_known(folder, recipe), progress=progress)
            return  # another process has made it while this one waited for its turn
        except CheckpointError:
            pass
        fresh = work / "checkpoint"
        with stages(f"prepare {name}", 4, progress) as begin:
            begin("fetch")
            path = fetch_gguf(name, recipe, work, progress=progress)
            begin("open")
            file = GGUFFile(path)
            config = file.config()
            begin("dequantise")
            params = file.params(config, progress=progress)
            begin("save")
            source = {"kind": "known", "name": name, "file": path.name, "sha256": recipe.sha256}
            save_checkpoint(fresh, config, params, tokenizer_from_gguf(file), source)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)


def _load_checkpoint(folder: Path, dtype: str, placement: Placement, progress: bool) -> LoadedModel:
    manifest = read_manifest(folder)
    params, tokenizer = restore_checkpoint(folder, manifest, dtype=dtype, placement=placement, progress=progress)
    source = {"kind": "checkpoint", "name": str(folder), "made_from": manifest.source}
    return LoadedModel(manifest.config, params, tokenizer, source)


def _load_gguf(path: Path, dtype: str, placement: Placement, progress: bool) -> LoadedModel:
    file = GGUFFile(path)
    config = file.config()
    params = file.params(config, _put(dtype, placement), progress=progress)
    source = {"kind": "gguf", "name": str(path), "num_bytes": path.stat().st_size}
    return LoadedModel(config, params, tokenizer_from_gguf(file), source)


def _load_folder(folder: Path, source: dict[str, Any], dtype: str, placement: Placement, progress: bool) -> LoadedModel:
    files = HFFolder(folder)
    config = files.config()
    params = files.params(config, _put(dtype, placement), progress=progress)
    return LoadedModel(config, params, load_tokenizer(folder), {**source, "files": files.weight_files})


def _put(dtype: str, placement: Placement) -> Callable[[LeafPath, np.ndarray], jax.Array]:
    def put(path: LeafPath, array: np.ndarray) -> jax.Array:
        return jax.device_put(array.astype(dtype), placement(path, array.shape))

    return put
