"""How the weights of a Llama-family model are laid out, and how they are put together from a file's own tensors.

Every file format names tensors its own way; readers translate Hugging Face's names, which are used here as the common
ones. Kernels are `[out_features, in_features]`; projections that read the same input are one kernel, rows one after
the other (q, k, v and gate, up), because one large matmul is faster than three small ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from pagedjax.config import ModelConfig
from pagedjax.errors import ConfigError, ModelError
from pagedjax.models.progress import bar
from pagedjax.scalars import is_int, shown

LeafPath = tuple[str, ...]
Part = tuple[str, tuple[int, ...]]
Leaf = TypeVar("Leaf")


def _layer_leaves(config: ModelConfig, layer: int) -> dict[LeafPath, tuple[Part, ...]]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    name, key = f"model.layers.{layer}", f"layers_{layer}"
    attention, ffn = f"{name}.self_attn", f"{name}.mlp"
    return {
        (key, "input_norm", "scale"): ((f"{name}.input_layernorm.weight", (hidden,)),),
        (key, "attention", "qkv_proj", "kernel"): (
            (f"{attention}.q_proj.weight", (q_rows, hidden)),
            (f"{attention}.k_proj.weight", (kv_rows, hidden)),
            (f"{attention}.v_proj.weight", (kv_rows, hidden)),
        ),
        (key, "attention", "o_proj", "kernel"): ((f"{attention}.o_proj.weight", (hidden, q_rows)),),
        (key, "mlp_norm", "scale"): ((f"{name}.post_attention_layernorm.weight", (hidden,)),),
        (key, "mlp", "gate_up_proj", "kernel"): (
            (f"{ffn}.gate_proj.weight", (mlp, hidden)),
            (f"{ffn}.up_proj.weight", (mlp, hidden)),
        ),
        (key, "mlp", "down_proj", "kernel"): ((f"{ffn}.down_proj.weight", (hidden, mlp)),),
    }


def leaf_parts(config: ModelConfig) -> dict[LeafPath, tuple[Part, ...]]:
    """Every leaf of the parameters, with the file tensors (name, shape) whose rows it is made of, in order."""
    leaves: dict[LeafPath, tuple[Part, ...]] = {
        ("embed_tokens", "embedding"): (("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)),)
    }
    for layer in range(config.num_layers):
        leaves |= _layer_leaves(config, layer)
    leaves["final_norm", "scale"] = (("model.norm.weight", (config.hidden_size,)),)
    if not config.tie_word_embeddings:
        leaves["lm_head", "kernel"] = (("lm_head.weight", (config.vocab_size, config.hidden_size)),)
    return leaves


def leaf_shapes(config: ModelConfig) -> dict[LeafPath, tuple[int, ...]]:
    """Shape of every leaf of the parameters."""
    return {path: (sum(shape[0] for _, shape in parts), *parts[0][1][1:]) for path, parts in leaf_parts(config).items()}


def nest(leaves: Mapping[LeafPath, Any]) -> dict[str, Any]:
    """The nested dict whose leaves are given by path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = leaf
    return tree


def check_tensors(
    where: str, names: Mapping[str, str], found: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> None:
    """Raises ModelError unless a file holds exactly the tensors of the model, each in its shape.

    Args:
        where: the file or folder, for the message.
        names: a tensor's common (Hugging Face) name -> its name in the file.
        found: shape by name in the file, of everything in the file that is meant as a weight.
        config: the model.
    """
    expected = {names[name]: shape for parts in leaf_parts(config).values() for name, shape in parts}
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: tensor {name!r} is missing; expected it with shape {list(shape)}")
        if tuple(found[name]) != shape:
            raise ModelError(f"{where}: tensor {name!r} has shape {list(found[name])}; expected {list(shape)}")
    if extra := sorted(set(found) - set(expected)):
        raise ModelError(
            f"{where}: {len(extra)} tensors that a {config.model_type!r} model has no place for, such as {extra[0]!r}; "
            f"allowed: {config.num_layers} layers of bias-free attention and gated MLP, norms, embedding, output head"
        )


@contextmanager
def named_errors(where: str, keys: Mapping[str, str]) -> Iterator[None]:
    """Turns what a file's odd values (a text for a number, zero heads) set off into a ModelError naming the file.

    Args:
        where: the file.
        keys: what the file calls the fields of `ModelConfig`, where it is something else.
    """
    try:
        yield
    except ModelError:
        raise
    except ConfigError as error:
        named = r"\b(" + "|".join(keys) + r")(?==| must be)"
        raise ModelError(f"{where}: {re.sub(named, lambda match: keys[match[1]], str(error))}") from error
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{where}: {error}") from error
    except KeyError as error:
        raise ModelError(f"{where}: key {error} is missing") from error


def check_count(value: object, key: str, where: str) -> None:
    """Raises ModelError unless a file's value, which others are computed from, is an integer of at least 1."""
    if not is_int(value, 1):
        raise ModelError(f"{where}: {key}={shown(value)} is not allowed: {key} must be an integer of at least 1")


def keep(path: LeafPath, array: np.ndarray) -> np.ndarray:
    """Leaves a finished leaf as it is: what `build_params` does with leaves that stay on the host."""
    return array


def build_params(
    config: ModelConfig,
    read: Callable[[str], np.ndarray],
    place: Callable[[LeafPath, np.ndarray], Leaf],
    *,
    desc: str,
    progress: bool,
) -> dict[str, Any]:
    """Reads every tensor and puts the parameters together, one leaf at a time.

    Args:
        config: the model.
        read: common (Hugging Face) name -> array `[out_features, in_features]`.
        place: what becomes of a finished leaf: kept as it is, or cast and put on a device.
        desc: what the progress bar says.
        progress: whether there is a bar (it shows itself after a second).
    """
    leaves: dict[LeafPath, Leaf] = {}
    for path, parts in bar(leaf_parts(config).items(), desc, progress, unit="tensor"):
        arrays = [read(name) for name, _ in parts]
        leaves[path] = place(path, arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
    return nest(leaves)
