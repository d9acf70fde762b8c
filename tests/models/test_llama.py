"""The Llama family against `transformers`, on random weights, through the paged cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.engine import Engine
from pagedjax.models.llama import init_params, parameter_shapes
from pagedjax.models.loader import load_model
from pagedjax.request import SamplingParams

torch = pytest.importorskip("torch", reason="the comparison is with transformers' own model, which needs torch")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="untied-gqa"),
        pytest.param({"tie_word_embeddings": True, "num_key_value_heads": 1}, id="tied-mqa"),
        pytest.param({"num_key_value_heads": 4, "head_dim": 24}, id="mha-wide-heads"),
        pytest.param({"rope_parameters": {"rope_theta": 5000.0, **LLAMA3}}, id="llama3-rope"),
        pytest.param({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}}, id="linear-rope"),
    ],
)
def test_logprobs_are_those_of_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **fields,
        }
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    prompt = np.random.default_rng(0).integers(0, 300, 150)
    with torch.no_grad():
        logits = theirs(torch.tensor(prompt[None])).logits[0].double()
    want = torch.log_softmax(logits, -1).numpy()

    model = load_model(tmp_path, dtype="float32", progress=False)
    engine = Engine(model, EngineConfig(num_blocks=40, block_size=8, max_num_seqs=2, max_num_batched_tokens=64))
    engine.add_request(
        {"prompt_token_ids": prompt.tolist()}, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    )
    output = [output for _ in range(4) for output in engine.step()][-1]
    assert output.prompt_logprobs is not None
    ours = [entry[t].logprob for t, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True) if entry]
    np.testing.assert_allclose(ours, want[np.arange(149), prompt[1:]], atol=2e-4)
    assert output.outputs[0].token_ids == [want[-1].argmax()]


def test_random_parameters_have_the_shapes_that_loaders_must_produce() -> None:
    config = ModelConfig(64, 32, 48, 2, 4, 2, 8, 128)
    params = init_params(config, seed=0)
    assert jax.tree.map(np.shape, params) == parameter_shapes(config)
    assert params["layers_0"]["mlp"]["down_proj"]["kernel"].std() == pytest.approx(48**-0.5, rel=0.1)
