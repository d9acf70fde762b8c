"""Reading llama-architecture GGUF files: metadata, and weights dequantised to float32.

A GGUF keeps the rows of the q and k projections in the order that pairs neighbouring dimensions for the rotary
embedding; here (as in Hugging Face's files) dimension i is paired with i + head_dim / 2, so those rows are put back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from jaxtyping import Float

from pagedjax.config import ModelConfig
from pagedjax.errors import ModelError
from pagedjax.models.registry import check_model_type
from pagedjax.models.weights import LeafPath, build_params, check_count, check_tensors, keep, leaf_parts, named_errors

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


_KEYS = {
    "vocab_size": "llama.vocab_size",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_layers": "llama.block_count",
    "num_heads": "llama.attention.head_count",
    "num_kv_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.attention.key_length",
    "max_position_embeddings": "llama.context_length",
    "rope_theta": "llama.rope.freq_base",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_type": "llama.rope.scaling.type",
    "factor": "llama.rope.scaling.factor",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_ids": "tokenizer.ggml.eos_token_id",
}
"""What a GGUF calls the fields of `ModelConfig`."""


def gguf_name(name: str) -> str:
    """Name in a GGUF of a tensor with that Hugging Face name."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.weight"
    layer, _, kind = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[kind]}.weight"


class GGUFFile:
    """An open GGUF of the llama architecture.

    Raises:
        ModelError: the file is missing, cut short, no GGUF, or of another architecture.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ModelError(f"{self.path}: no such file")
        try:
            self._reader = gguf.GGUFReader(self.path)
        except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise ModelError(f"{self.path}: cut short, or no GGUF file ({error})") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        check_model_type(self.get("general.architecture"), str(self.path))

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a metadata key: a number, a string or a list of either."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """Value of a metadata key that has to be there, or ModelError."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: metadata key {key!r} is missing")
        return value

    def config(self) -> ModelConfig:
        """The model's shape, from the metadata; raises ModelError naming a value that is missing or not allowed."""
        with named_errors(str(self.path), _KEYS):
            return self._config()

    def _config(self) -> ModelConfig:
        hidden, num_heads = self.require("llama.embedding_length"), self.require("llama.attention.head_count")
        check_count(hidden, "llama.embedding_length", str(self.path))
        check_count(num_heads, "llama.attention.head_count", str(self.path))
        head_dim = self.get("llama.attention.key_length", hidden // num_heads)
        self._refuse_what_is_not_computed(head_dim)
        eos = (self.get("tokenizer.ggml.eos_token_id"), self.get("tokenizer.ggml.eot_token_id"))
        return ModelConfig(
            vocab_size=self._vocab_size(),
            hidden_size=hidden,
            intermediate_size=self.require("llama.feed_forward_length"),
            num_layers=self.require("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=self.get("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=self.require("llama.context_length"),
            rope_theta=_decimal(self.get("llama.rope.freq_base", 10000.0)),
            rms_norm_eps=_decimal(self.require("llama.attention.layer_norm_rms_epsilon")),
            tie_word_embeddings="output.weight" not in self._tensors,
            rope_scaling=self._rope_scaling(),
            bos_token_id=self.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        )

    def params(
        self, config: ModelConfig, place: Callable[[LeafPath, np.ndarray], Any] = keep, *, progress: bool = True
    ) -> dict[str, Any]:
        """Parameters as a nested dict (layout: `weights.py`): float32 numpy arrays, or what `place` makes of them.

        Raises:
            ModelError: a tensor is missing, misshapen, of a kind that cannot be read, or has no place in the model.
        """
        names = {name: gguf_name(name) for parts in leaf_parts(config).values() for name, _ in parts}
        shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
        check_tensors(str(self.path), names, shapes, config)
        heads = {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}

        def read(name: str) -> np.ndarray:
            weight = self._dequantise(names[name])
            num_heads = next((count for suffix, count in heads.items() if name.endswith(suffix)), None)
            return weight if num_heads is None else unpermute(weight, num_heads)

        return build_params(config, read, place, desc=f"read {self.path.name}", progress=progress)

    def _dequantise(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {name!r} is of type {tensor.tensor_type.name}: {error}") from error

    def _vocab_size(self) -> int:
        tokens = self._reader.get_field("tokenizer.ggml.tokens")
        return self.require("llama.vocab_size") if tokens is None else len(tokens.data)

    def _rope_scaling(self) -> tuple[tuple[str, object], ...] | None:
        kind = self.get("llama.rope.scaling.type", "none")
        if kind == "none":
            return None
        return (("rope_type", kind), ("factor", self.require("llama.rope.scaling.factor")))

    def _refuse_what_is_not_computed(self, head_dim: int) -> None:
        rotary = self.get("llama.rope.dimension_count", head_dim)
        if rotary != head_dim:
            raise ModelError(f"{self.path}: llama.rope.dimension_count is {rotary}; allowed: head_dim={head_dim}")
        if experts := self.get("llama.expert_count", 0):
            raise ModelError(f"{self.path}: llama.expert_count is {experts}; allowed: 0 (no mixture of experts)")


def unpermute(weight: Float[np.ndarray, "rows cols"], num_heads: int) -> Float[np.ndarray, "rows cols"]:
    """Puts the rows of a q or k projection from a GGUF's order, (x0, y0, x1, y1, ...), into x0, x1, ..., y0, y1, ..."""
    rows, cols = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, cols)
    return pairs.swapaxes(1, 2).reshape(rows, cols)


def _decimal(value: Any) -> Any:
    """A float32 out of the metadata as the decimal number it was written for (1e-05, not 9.999999747378752e-06)."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
