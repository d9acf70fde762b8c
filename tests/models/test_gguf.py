"""GGUF files: what is read out of them, and what is said of those that cannot be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_model import CONFIG, random_tensors, write_gguf

from pagedjax.errors import ModelError
from pagedjax.models.gguf import GGUFFile, unpermute
from pagedjax.models.weights import leaf_shapes

UNTIED = dataclasses.replace(CONFIG, tie_word_embeddings=False)


def test_config_comes_from_the_metadata(tmp_path: Path):
    assert GGUFFile(write_gguf(tmp_path / "a.gguf")).config() == CONFIG
    assert GGUFFile(write_gguf(tmp_path / "b.gguf", UNTIED)).config() == UNTIED


def test_config_without_optional_keys(tmp_path: Path):
    optional = ("llama.attention.head_count_kv", "llama.rope.freq_base", "llama.vocab_size")
    config = GGUFFile(write_gguf(tmp_path / "a.gguf", without=optional)).config()
    assert (config.num_kv_heads, config.rope_theta, config.vocab_size) == (4, 10000.0, CONFIG.vocab_size)


def test_linear_rope_scaling_is_kept(tmp_path: Path):
    keys: dict[str, int | float | str] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    config = GGUFFile(write_gguf(tmp_path / "a.gguf", keys=keys)).config()
    assert config.rope_scaling == (("rope_type", "linear"), ("factor", 2.0))


def test_params_are_the_tensors_that_were_written_with_q_and_k_rows_put_back(tmp_path: Path):
    tensors = random_tensors(UNTIED)
    params = GGUFFile(write_gguf(tmp_path / "a.gguf", UNTIED, tensors=tensors)).params(UNTIED, progress=False)
    name = "model.layers.1"
    attention, mlp = params["layers_1"]["attention"], params["layers_1"]["mlp"]
    qkv = np.concatenate([tensors[f"{name}.self_attn.{kind}_proj.weight"] for kind in "qkv"])
    np.testing.assert_array_equal(attention["qkv_proj"]["kernel"], qkv)
    np.testing.assert_array_equal(attention["o_proj"]["kernel"], tensors[f"{name}.self_attn.o_proj.weight"])
    gate_up = np.concatenate([tensors[f"{name}.mlp.{kind}_proj.weight"] for kind in ("gate", "up")])
    np.testing.assert_array_equal(mlp["gate_up_proj"]["kernel"], gate_up)
    np.testing.assert_array_equal(mlp["down_proj"]["kernel"], tensors[f"{name}.mlp.down_proj.weight"])
    np.testing.assert_array_equal(params["layers_1"]["input_norm"]["scale"], tensors[f"{name}.input_layernorm.weight"])
    np.testing.assert_array_equal(
        params["layers_1"]["mlp_norm"]["scale"], tensors[f"{name}.post_attention_layernorm.weight"]
    )
    np.testing.assert_array_equal(params["embed_tokens"]["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["final_norm"]["scale"], tensors["model.norm.weight"])
    np.testing.assert_array_equal(params["lm_head"]["kernel"], tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_1", 0.1), ("Q4_0", 0.1)],
)
def test_other_types_are_dequantised_to_float32(tmp_path: Path, kind: str, tolerance: float):
    tensors = random_tensors(CONFIG)
    path = write_gguf(tmp_path / "a.gguf", tensors=tensors, quantise=gguf.GGMLQuantizationType[kind])
    params = GGUFFile(path).params(CONFIG, progress=False)
    expected, read = tensors["model.embed_tokens.weight"], params["embed_tokens"]["embedding"]
    assert read.dtype == np.float32
    assert np.linalg.norm(read - expected) < tolerance * np.linalg.norm(expected)


def test_unpermute_pairs_dimension_i_with_i_plus_half():
    rows = np.arange(8.0)[:, None]  # two heads of x0 y0 x1 y1
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_missing_tensor_is_named(tmp_path: Path):
    path = write_gguf(tmp_path / "a.gguf", edit={"blk.1.ffn_up.weight": None})
    with pytest.raises(ModelError, match=r"a\.gguf: tensor 'blk\.1\.ffn_up\.weight' is missing.*\[96, 64\]"):
        GGUFFile(path).params(CONFIG, progress=False)


def test_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path):
    path = write_gguf(tmp_path / "a.gguf", edit={"blk.0.attn_k.weight": np.zeros((16, 64), np.float32)})
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_k\.weight' has shape \[16, 64\]; expected \[32, 64\]"):
        GGUFFile(path).params(CONFIG, progress=False)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight"])
def test_tensor_without_a_place_in_the_model_is_refused(tmp_path: Path, name: str):
    path = write_gguf(tmp_path / "a.gguf", edit={name: np.zeros(64, np.float32)})
    with pytest.raises(ModelError, match=f"no place for, such as {name!r}.*allowed: 2 layers of bias-free attention"):
        GGUFFile(path).params(CONFIG, progress=False)


def test_unknown_architecture_is_named_with_what_is_allowed(tmp_path: Path):
    path = write_gguf(tmp_path / "a.gguf", arch="mamba")
    with pytest.raises(ModelError, match="unknown model type 'mamba'; allowed: llama"):
        GGUFFile(path)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_file_cut_short_is_named(tmp_path: Path, part: float):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ModelError, match=r"cut\.gguf: cut short, or no GGUF file"):
        GGUFFile(path)


def test_other_file_and_no_file_are_named(tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" * 1000)
    with pytest.raises(ModelError, match=r"a\.gguf: cut short, or no GGUF file"):
        GGUFFile(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match=r"b\.gguf: no such file"):
        GGUFFile(tmp_path / "b.gguf")


def test_missing_metadata_key_is_named(tmp_path: Path):
    path = write_gguf(tmp_path / "a.gguf", without=("llama.block_count",))
    with pytest.raises(ModelError, match=r"metadata key 'llama\.block_count' is missing"):
        GGUFFile(path).config()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8; allowed: head_dim=16"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8; allowed: 0"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count=0 is not allowed.*at least 1"),
        (
            {"llama.attention.head_count_kv": 3},
            r"llama\.attention\.head_count_kv=3 is not allowed.*a divisor of llama\.attention\.head_count=4",
        ),
        ({"llama.block_count": 0}, r"llama\.block_count=0 is not allowed"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
            r"llama\.rope\.scaling\.type='yarn' is not allowed.*'linear' or 'llama3'",
        ),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0},
            r"llama\.rope\.scaling\.factor=0\.0 is not allowed.*a positive number",
        ),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, keys: dict, message: str):
    path = write_gguf(tmp_path / "a.gguf", keys=keys)
    with pytest.raises(ModelError, match=rf"a\.gguf: .*{message}"):
        GGUFFile(path).config()


def test_the_real_model(smollm2_gguf: Path):
    file = GGUFFile(smollm2_gguf)
    config = file.config()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (100000.0, 1e-5, 8192)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    seen = []
    file.params(config, lambda path, array: seen.append((path, array.shape)), progress=False)
    assert dict(seen) == leaf_shapes(config)
