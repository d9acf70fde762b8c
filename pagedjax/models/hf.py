"""Llama-family models in Hugging Face's layout: a folder with config.json and safetensors, here or on the hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from pagedjax.config import ROPE_SCALING_KEYS, ModelConfig
from pagedjax.errors import DownloadError, ModelError
from pagedjax.models.registry import check_model_type
from pagedjax.models.weights import LeafPath, build_params, check_count, check_tensors, leaf_parts, named_errors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
}
"""What a config.json calls the fields of `ModelConfig`, where it is something else."""
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class HFFolder:
    """A folder in Hugging Face's layout.

    Attributes:
        weight_files: size in bytes of every safetensors file that is read.

    Raises:
        ModelError: a file that has to be there is missing or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._raw = self._json("config.json")
        names = [SINGLE]
        if not (folder / SINGLE).is_file():
            if not (folder / INDEX).is_file():
                raise ModelError(f"{folder}: no weights; allowed: {SINGLE}, or {INDEX} and the files that it names")
            with named_errors(str(folder / INDEX), {}):
                names = sorted(set(self._json(INDEX)["weight_map"].values()))
        self.weight_files: dict[str, int] = {}
        for name in names:
            if not (folder / name).is_file():
                raise ModelError(f"{folder / name} is missing; {INDEX} names it")
            self.weight_files[name] = (folder / name).stat().st_size

    def config(self) -> ModelConfig:
        """The model's shape, from config.json and, for the tokens that end a text, generation_config.json."""
        path = self.folder / "config.json"
        generation = self._json("generation_config.json") if (self.folder / "generation_config.json").is_file() else {}
        return config_from_hf(self._raw, generation, str(path))

    def params(
        self, config: ModelConfig, place: Callable[[LeafPath, np.ndarray], Any], *, progress: bool = True
    ) -> dict[str, Any]:
        """The parameters as a nested dict (layout: `weights.py`), each leaf being what `place` makes of the array.

        Raises:
            ModelError: a file is cut short; a tensor is missing, misshapen or has no place in the model.
        """
        with ExitStack() as stack:
            files = [stack.enter_context(self._open(self.folder / name)) for name in self.weight_files]
            owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)
            # buffers that old checkpoints carry, and the copy of a tied embedding, hold nothing of their own
            shapes = {
                name: tuple(file.get_slice(name).get_shape())
                for name, file in owner.items()
                if not name.endswith("rotary_emb.inv_freq")
                and not (config.tie_word_embeddings and name == "lm_head.weight")
            }
            names = {name: name for parts in leaf_parts(config).values() for name, _ in parts}
            check_tensors(str(self.folder), names, shapes, config)

            def read(name: str) -> np.ndarray:
                array = owner[name].get_tensor(name)
                if array.dtype.name not in ("float32", "bfloat16", "float16"):
                    raise ModelError(
                        f"{self.folder}: tensor {name!r} is of type {array.dtype.name}; allowed: float32, bfloat16, "
                        "float16"
                    )
                return array

            return build_params(config, read, place, desc=f"load {self.folder.name}", progress=progress)

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cut short, or no safetensors file ({error})") from error

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise ModelError(f"{path} is missing: the folder is not in Hugging Face's layout") from error
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise ModelError(f"{path} is not JSON ({error})") from error
        if not isinstance(data, dict):
            raise ModelError(f"{path} holds a {type(data).__name__}; expected an object")
        return data


def config_from_hf(raw: dict[str, Any], generation: dict[str, Any], where: str) -> ModelConfig:
    """The model's shape out of a config.json, older forms and that of transformers 5 alike.

    Args:
        raw: config.json.
        generation: generation_config.json, or {}; its end-of-text tokens win.
        where: the file, for messages.

    Raises:
        ModelError: an unknown model type, a key that is missing, or something that is not computed here.
    """
    keys = (
        {**_KEYS, "eos_token_ids": "generation_config.json's eos_token_id"} if "eos_token_id" in generation else _KEYS
    )
    with named_errors(where, keys):
        return _config(raw, _or(generation.get("eos_token_id"), raw.get("eos_token_id")), where)


def _config(raw: dict[str, Any], eos: Any, where: str) -> ModelConfig:
    model_type = check_model_type(raw.get("model_type"), where)
    _refuse_what_is_not_computed(raw, where)
    rope = _rope_parameters(raw, where)
    hidden, num_heads = _require(raw, "hidden_size", where), _require(raw, "num_attention_heads", where)
    check_count(hidden, "hidden_size", where)
    check_count(num_heads, "num_attention_heads", where)
    if raw.get("head_dim") is None and hidden % num_heads:
        raise ModelError(
            f"{where}: hidden_size={hidden} is not allowed: without head_dim it must be a multiple of "
            f"num_attention_heads={num_heads}"
        )
    return ModelConfig(
        model_type=model_type,
        vocab_size=_require(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_require(raw, "intermediate_size", where),
        num_layers=_require(raw, "num_hidden_layers", where),
        num_heads=num_heads,
        num_kv_heads=_or(raw.get("num_key_value_heads"), num_heads),
        head_dim=_or(raw.get("head_dim"), hidden // num_heads),
        max_position_embeddings=_or(raw.get("max_position_embeddings"), 2048),
        rope_theta=rope.pop("rope_theta"),
        rms_norm_eps=_or(raw.get("rms_norm_eps"), 1e-6),
        tie_word_embeddings=_or(raw.get("tie_word_embeddings"), False),
        rope_scaling=tuple(sorted(rope.items())) or None,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _rope_parameters(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """`rope_theta`, and if positions are scaled `rope_type` and what that type needs.

    Transformers 5 calls `rope_parameters` what was `rope_scaling`: a file that has both must say the same twice.
    """
    theta = _or(raw.get("rope_theta"), 10000.0)
    found = {
        key: _read_rope(raw[key], key, theta, where) for key in ("rope_scaling", "rope_parameters") if raw.get(key)
    }
    if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
        raise ModelError(
            f"{where}: rope_scaling={raw['rope_scaling']!r} contradicts rope_parameters={raw['rope_parameters']!r}; "
            "allowed: one of them, or both the same"
        )
    return next(iter(found.values()), {"rope_theta": theta})


def _read_rope(given: Any, name: str, theta: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ModelError(f"{where}: {name}={given!r} is not allowed: {name} must be an object")
    kinds = [given[key] for key in ("rope_type", "type") if given.get(key) is not None] or ["default"]
    for kind in kinds:
        if kind != kinds[0] or (kind != "default" and kind not in [*ROPE_SCALING_KEYS]):
            raise ModelError(
                f"{where}: {name}'s rope_type {kind!r} is not known, or contradicts its type; allowed: default, "
                f"{', '.join(ROPE_SCALING_KEYS)}"
            )
    _refuse_what_is_not_computed(given, f"{where}: {name}")
    scaling = {"rope_theta": _or(given.get("rope_theta"), theta)}
    if kinds[0] == "default":
        return scaling
    needed = {
        key: _require(given, key, f"{where}: {name} of rope_type {kinds[0]!r}") for key in ROPE_SCALING_KEYS[kinds[0]]
    }
    return {**scaling, "rope_type": kinds[0], **needed}


def _refuse_what_is_not_computed(raw: dict[str, Any], where: str) -> None:
    allowed = {
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "hidden_act": ("silu", None),
        "partial_rotary_factor": (1.0, None),
        "quantization_config": (None,),
    }
    for key, values in allowed.items():
        if raw.get(key) not in values:
            raise ModelError(f"{where}: {key}={raw[key]!r} is not supported; allowed: {values[0]!r}")


def _require(mapping: dict[str, Any], key: str, where: str) -> Any:
    if mapping.get(key) is None:
        raise ModelError(f"{where}: key {key!r} is missing")
    return mapping[key]


class _Silent(tqdm):
    """The hub's bars, switched off."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def download_snapshot(name: str, *, progress: bool = True) -> tuple[Path, str]:
    """The folder of a model of the Hugging Face hub ("org/model" or "org/model@revision"), and its commit.

    Raises:
        DownloadError: it is not on this machine and the hub does not give it.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo_id, _, revision = name.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision or None,
            allow_patterns=_PATTERNS,
            tqdm_class=None if progress and sys.stderr.isatty() else _Silent,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DownloadError(
            f"{name!r} is no local folder and cannot be downloaded from the Hugging Face hub ({reason}): connect to "
            "it, or give a folder that holds the model"
        ) from error
    return Path(folder), Path(folder).name
