"""Hugging Face folders and hub ids: every form of the configuration, and what is said of broken folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_model import CONFIG, TOKENS, random_tensors, write_gguf

from pagedjax.config import ModelConfig
from pagedjax.errors import ConfigError, DownloadError, ModelError
from pagedjax.models.gguf import GGUFFile
from pagedjax.models.hf import config_from_hf
from pagedjax.models.loader import load_model
from pagedjax.models.tokenizer import tokenizer_from_gguf
from pagedjax.models.weights import build_params, keep

RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model in one file, without a tokenizer."""
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(RAW))
    save_file(random_tensors(CONFIG), path / "model.safetensors")
    return path


def load(folder: Path | str, dtype: str = "float32"):
    return load_model(folder, dtype=dtype, progress=False)


def parse(**changes: Any) -> ModelConfig:
    return config_from_hf({**RAW, **changes}, {}, "config.json")


def assert_params(params: dict, tensors: dict[str, np.ndarray], dtype: str = "float32") -> None:
    expected = build_params(CONFIG, tensors.__getitem__, keep, desc="", progress=False)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, want.astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folder_with_one_file(folder: Path, dtype: str):
    model = load(folder, dtype)
    assert model.config == CONFIG
    assert model.tokenizer is None
    size = (folder / "model.safetensors").stat().st_size
    assert model.source == {"kind": "folder", "name": str(folder), "files": {"model.safetensors": size}}
    assert_params(model.params, random_tensors(CONFIG), dtype)


@pytest.mark.parametrize("stored", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_half_precision_weights(folder: Path, stored: np.dtype):
    tensors = {name: array.astype(stored) for name, array in random_tensors(CONFIG).items()}
    save_file(tensors, folder / "model.safetensors")
    assert_params(load(folder).params, tensors)


def test_folder_with_several_files(folder: Path):
    tensors = random_tensors(CONFIG)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({n: a for n, a in tensors.items() if weight_map[n] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_params(load(folder).params, tensors)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1\.safetensors is missing; model\.safetensors\.index\.json names it"):
        load(folder)


def test_tied_copy_of_the_head_and_old_buffers_are_passed_over(folder: Path):
    tensors = random_tensors(CONFIG)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    save_file({**tensors, **extra}, folder / "model.safetensors")
    assert_params(load(folder).params, tensors)


def test_folder_with_a_tokenizer(folder: Path, tmp_path: Path):
    tokenizer = tokenizer_from_gguf(GGUFFile(write_gguf(tmp_path / "a.gguf")))
    assert tokenizer is not None
    tokenizer.save_pretrained(folder)
    loaded = load(folder).tokenizer
    assert loaded is not None
    assert loaded("hello 12").input_ids == tokenizer("hello 12").input_ids
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="its tokenizer cannot be read"):
        load(folder)


def test_gguf_given_by_path(tmp_path: Path):
    path = write_gguf(tmp_path / "a.gguf")
    model = load(path)
    assert_params(model.params, random_tensors(CONFIG))
    assert model.tokenizer is not None
    assert model.source == {"kind": "gguf", "name": str(path), "num_bytes": path.stat().st_size}


def test_defaults_of_the_configuration():
    config = config_from_hf({k: v for k, v in RAW.items() if k in REQUIRED}, {}, "config.json")
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.rms_norm_eps) == (4, 16, 10000.0, 1e-6)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (None, (), False)
    assert parse(head_dim=32, num_key_value_heads=None).head_dim == 32


REQUIRED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@pytest.mark.parametrize("key", REQUIRED[1:])
def test_missing_key_is_named(key: str):
    with pytest.raises(ModelError, match=f"config.json: key '{key}' is missing"):
        config_from_hf({k: v for k, v in RAW.items() if k != key}, {}, "config.json")


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_scaling": None}, 100000.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 100000.0, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": LLAMA3}, 100000.0, LLAMA3),
        ({"rope_scaling": {"rope_type": "default"}}, 100000.0, None),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, 5e5, LLAMA3),
    ],
)
def test_both_forms_of_rope_settings(changes: dict, theta: float, scaling: dict | None):
    config = parse(**changes)
    assert config.rope_theta == theta
    assert (None if config.rope_scaling is None else dict(config.rope_scaling)) == scaling


YARN = {"rope_type": "yarn", "factor": 2.0}
DEFAULT = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": YARN}, "rope_scaling's rope_type 'yarn' is not known.* allowed: default, linear, llama3"),
        ({"rope_scaling": YARN, "rope_parameters": DEFAULT}, "rope_scaling's rope_type 'yarn' is not known"),
        ({"rope_scaling": DEFAULT, "rope_parameters": YARN}, "rope_parameters's rope_type 'yarn' is not known"),
        ({"rope_scaling": {"type": "yarn", **DEFAULT}}, "rope_type 'yarn' is not known, or contradicts its type"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_type \['yarn'\] is not known"),
        ({"rope_scaling": LLAMA3, "rope_parameters": DEFAULT}, "rope_scaling=.*llama3.* contradicts rope_parameters="),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2.0}},
            "of rope_type 'llama3': key 'low_freq_factor' is missing",
        ),
        ({"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, "rope_parameters: partial_rotary_factor=0.5"),
    ],
)
def test_rope_settings_that_are_refused(changes: dict, message: str):
    with pytest.raises(ModelError, match=message):
        parse(**changes)


def test_rope_settings_may_be_said_twice():
    assert parse(rope_scaling=LLAMA3, rope_parameters=LLAMA3) == parse(rope_scaling=LLAMA3)


def test_end_of_text_tokens():
    assert parse(eos_token_id=[2, 0]).eos_token_ids == (2, 0)
    assert config_from_hf(RAW, {"eos_token_id": [0, 1]}, "").eos_token_ids == (0, 1)
    assert config_from_hf(RAW, {"eos_token_id": None}, "").eos_token_ids == (2,)
    with pytest.raises(ModelError, match=r"config\.json: generation_config\.json's eos_token_id=-1 is not allowed"):
        config_from_hf(RAW, {"eos_token_id": -1}, "config.json")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("attention_bias", True, "False"),
        ("mlp_bias", True, "False"),
        ("hidden_act", "gelu", "'silu'"),
        ("partial_rotary_factor", 0.5, r"1\.0"),
        ("quantization_config", {"quant_method": "gptq"}, "None"),
    ],
)
def test_what_is_not_computed_is_refused(key: str, value: object, allowed: str):
    with pytest.raises(ModelError, match=rf"config\.json: {key}=.* is not supported; allowed: {allowed}"):
        parse(**{key: value})


def test_unknown_model_type_is_named_with_what_is_allowed(folder: Path):
    (folder / "config.json").write_text(json.dumps({**RAW, "model_type": "mixtral"}))
    with pytest.raises(ModelError, match=r"config\.json: unknown model type 'mixtral'; allowed: llama"):
        load(folder)


def test_folder_that_is_none_of_ours(tmp_path: Path, folder: Path):
    with pytest.raises(ModelError, match=r"config\.json is missing: the folder is not in Hugging Face's layout"):
        load(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights; allowed: model\.safetensors, or model\.safetensors\.index"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json holds a list; expected an object"):
        load(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json cannot be read \(Is a directory\)"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not allowed: num_attention_heads must be an integer"),
        ({"hidden_size": "64"}, "hidden_size='64' is not allowed: hidden_size must be an integer of at least 1"),
        ({"hidden_size": 66}, "hidden_size=66 is not allowed: without head_dim .* multiple of num_attention_heads=4"),
        ({"vocab_size": True}, "vocab_size=True is not allowed"),
        ({"num_hidden_layers": 2.5}, r"num_hidden_layers=2\.5 is not allowed: num_hidden_layers must be an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 is not .* divisor of num_attention_heads=4"),
        ({"rope_theta": "a lot"}, "rope_theta='a lot' is not allowed: rope_theta must be a positive number"),
        ({"rope_theta": True}, "rope_theta=True is not allowed"),
        ({"rope_theta": float("inf")}, "rope_theta=inf is not allowed"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not allowed"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is not allowed: .* True or False"),
        ({"eos_token_id": 10**6}, r"eos_token_id=1000000 is not allowed: eos_token_id must be a token id"),
        ({"eos_token_id": ["2"]}, "eos_token_id='2' is not allowed"),
        ({"bos_token_id": "<s>"}, "bos_token_id='<s>' is not allowed"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' is not allowed: rope_scaling must be an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "factor=0 is not allowed: factor must be a positive number",
        ),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, r"factor=-1\.0 is not allowed"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor=nan is not allowed"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' is not allowed"),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
            r"high_freq_factor=1\.0 .* above low_freq_factor=1\.0",
        ),
        ({"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 0}}, "original_max_position_embeddings=0"),
    ],
)
def test_odd_values_name_the_file(folder: Path, changes: dict, message: str):
    (folder / "config.json").write_text(json.dumps({**RAW, **changes}))
    with pytest.raises(ModelError, match=rf"hf/config\.json: .*({message})"):
        load(folder)


def test_index_without_a_map_is_named(folder: Path):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: key 'weight_map' is missing"):
        load(folder)


@pytest.mark.parametrize("num_bytes", [0, 20, 5000, -4])
def test_file_cut_short_is_named(folder: Path, num_bytes: int):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors: cut short, or no safetensors file"):
        load(folder)


def test_tensors_that_do_not_fit_are_named(folder: Path):
    tensors = random_tensors(CONFIG)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({n: a for n, a in tensors.items() if n != name}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor '{name}' is missing; expected it with shape \[64, 96\]"):
        load(folder)
    save_file({**tensors, name: np.zeros((96, 64), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor '{name}' has shape \[96, 64\]; expected \[64, 96\]"):
        load(folder)
    save_file({**tensors, name: np.zeros((64, 96), np.int8)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor '{name}' is of type int8; allowed: float32, bfloat16, float16"):
        load(folder)
    save_file(
        {**tensors, "model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}, folder / "model.safetensors"
    )
    with pytest.raises(ModelError, match=r"no place for, such as 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        load(folder)


def test_names_that_are_nothing(tmp_path: Path):
    with pytest.raises(ModelError) as caught:
        load("gpt-17")
    message = str(caught.value)
    assert "unknown model 'gpt-17'" in message
    assert "smollm2-135m" in message
    assert "a Hugging Face id such as 'org/model'" in message
    with pytest.raises(ModelError, match="unknown model .*/nowhere"):
        load(tmp_path / "nowhere")


def test_dtype_is_checked_first(folder: Path):
    with pytest.raises(ConfigError, match="dtype='int8' is not allowed: dtype must be one of float32, bfloat16"):
        load(folder, "int8")


def test_hub_id(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    snapshot = tmp_path / "snapshots" / "0123abcd"
    snapshot.parent.mkdir()
    folder.rename(snapshot)
    asked = []

    def download(repo_id: str, *, revision: str | None, **options: object) -> str:
        asked.append((repo_id, revision))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = load("org/tiny-llama")
    assert_params(model.params, random_tensors(CONFIG))
    assert model.source["name"] == "org/tiny-llama@0123abcd"
    load(model.source["name"])
    assert asked == [("org/tiny-llama", None), ("org/tiny-llama", "0123abcd")]


def test_hub_id_without_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError) as caught:
        load("org/tiny-llama")
    message = str(caught.value)
    assert message.startswith(
        "'org/tiny-llama' is no local folder and cannot be downloaded from the Hugging Face hub ("
    )
    assert message.endswith("connect to it, or give a folder that holds the model")
    assert "\n" not in message


def test_what_transformers_saves(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="compares with a model that transformers saves, which needs torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={**LLAMA3, "rope_theta": 5e5},
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    loaded = load(tmp_path / "saved")
    assert len(loaded.source["files"]) > 1
    assert loaded.config.rope_theta == 5e5
    assert dict(loaded.config.rope_scaling or ()) == LLAMA3
    assert not loaded.config.tie_word_embeddings
    theirs = model.state_dict()
    attention = "model.layers.1.self_attn"
    qkv = np.concatenate([theirs[f"{attention}.{kind}_proj.weight"].numpy() for kind in "qkv"])
    np.testing.assert_array_equal(loaded.params["layers_1"]["attention"]["qkv_proj"]["kernel"], qkv)
    np.testing.assert_array_equal(loaded.params["lm_head"]["kernel"], theirs["lm_head.weight"].numpy())
