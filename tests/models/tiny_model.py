"""Tiny random models, written in the formats that the loaders read."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from pagedjax.config import ModelConfig
from pagedjax.models.weights import leaf_parts

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2"]
TOKENS = SPECIAL + sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

CONFIG = ModelConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rope_theta=100000.0,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    shapes = dict(part for parts in leaf_parts(config).values() for part in parts)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def _to_gguf(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """The same tensors as the llama.cpp converter writes them: short names, q and k rows interleaved."""
    short = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    kinds = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    out = {}
    for name, array in tensors.items():
        if name in short:
            out[short[name]] = array
            continue
        layer, kind = name.split(".")[2], name.split(".")[-2]
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(kind)
        if heads is not None:
            rows, half = [], config.head_dim // 2
            for head in array.reshape(heads, config.head_dim, -1):
                for i in range(half):
                    rows += [head[i], head[i + half]]
            array = np.stack(rows)
        out[f"blk.{layer}.{kinds[kind]}.weight"] = array
    return out


def write_gguf(
    path: Path,
    config: ModelConfig = CONFIG,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    edit: dict[str, np.ndarray | None] | None = None,
    keys: dict[str, int | float | str] | None = None,
    without: tuple[str, ...] = (),
    arch: str = "llama",
    quantise: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str | None = "smollm",
) -> Path:
    """Writes a GGUF.

    Args:
        tensors: under Hugging Face's names; random ones by default.
        edit: GGUF name -> another array, or None to leave the tensor out.
        keys: metadata added, or written instead.
        without: metadata keys left out.
        arch: `general.architecture`.
        quantise: how matrices are stored.
        pre: the pre-tokenizer's name; None writes no tokenizer.
    """
    writer = gguf.GGUFWriter(path, arch)
    meta: dict[str, Any] = {
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.block_count": config.num_layers,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.context_length": config.max_position_embeddings,
        "llama.vocab_size": config.vocab_size,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **(keys or {}),
    }
    for key, value in meta.items():
        if key not in without:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key, value)
    if pre is not None:
        _add_tokenizer(writer, pre)
    named = _to_gguf(tensors or random_tensors(config), config) | (edit or {})
    for name, array in named.items():
        if array is not None:
            kind = quantise if array.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def write_wheel(folder: Path, member: str, content: bytes, name: str = "tiny_model", version: str = "1.0") -> Path:
    """A wheel that pip takes, with one file in it."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
