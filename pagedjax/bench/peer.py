"""The same requests and the same weights through `transformers`, to measure against."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedjax.bench.engine import Run
from pagedjax.bench.workload import Workload
from pagedjax.config import ModelConfig
from pagedjax.errors import PagedJaxError
from pagedjax.provenance import num_cpu_cores


def require_torch() -> None:
    """Raises PagedJaxError when torch, which `transformers` runs on, is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise PagedJaxError(
            "--against transformers runs the requests through transformers, which needs torch, and torch is not "
            "installed: pip install torch (a build for the CPU does)"
        )


class TransformersPeer:
    """A torch `LlamaForCausalLM` that holds our weights, on the CPU, with as many threads as there are cores.

    Args:
        params: our parameter pytree.
        model_config: its shape.
        dtype: "float32" or "bfloat16".
    """

    def __init__(self, params: Mapping[str, Any], model_config: ModelConfig, dtype: str) -> None:
        require_torch()
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(num_cpu_cores())
        self._torch = torch
        self.model: Any = LlamaForCausalLM(LlamaConfig(**llama_config_fields(model_config)))
        state = {name: torch.tensor(array) for name, array in llama_state(params, model_config).items()}
        self.model.load_state_dict(state, strict=True)
        self.model.to(getattr(torch, dtype)).eval()

    def run(self, workload: Workload, batch_size: int, **sampling: Any) -> Run:
        """Static batches of `batch_size` requests in their order; a batch runs until its longest output is done.

        Only the tokens that a request wanted are counted. `sampling` are further arguments of transformers' generate.
        """
        start = time.perf_counter()
        for first in range(0, len(workload.prompts), batch_size):
            self.generate(workload.part(first, first + batch_size), **sampling)
        return Run(time.perf_counter() - start, workload.num_output_tokens)

    def generate(self, batch: Workload, **sampling: Any) -> list[list[int]]:
        """The output tokens of one batch, padded on the left, each row as long as the longest output wanted."""
        torch = self._torch
        width, length = max(map(len, batch.prompts)), max(batch.output_lens)
        ids, mask = np.zeros((2, len(batch.prompts), width), np.int64)
        for row, prompt in enumerate(batch.prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = self.model.generate(
                torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask),
                max_new_tokens=length,
                min_new_tokens=length,
                eos_token_id=None,
                pad_token_id=0,
                **({"do_sample": False} | sampling),
            )
        return out[:, width:].tolist()


def llama_config_fields(config: ModelConfig) -> dict[str, Any]:
    """Arguments of `transformers.LlamaConfig`."""
    rope = {"rope_type": "default", **dict(config.rope_scaling or ()), "rope_theta": config.rope_theta}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": rope,
    }


def llama_state(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """Our parameter pytree as a Hugging Face Llama's state: the fused projections taken apart, names translated."""

    def array(leaf: Any) -> np.ndarray:
        return np.asarray(leaf, np.float32)

    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    embedding = array(params["embed_tokens"]["embedding"])
    head = embedding if config.tie_word_embeddings else array(params["lm_head"]["kernel"])
    state = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": array(params["final_norm"]["scale"]),
        "lm_head.weight": head,
    }
    for i in range(config.num_layers):
        layer, name = params[f"layers_{i}"], f"model.layers.{i}."
        qkv = np.split(array(layer["attention"]["qkv_proj"]["kernel"]), [q_rows, q_rows + kv_rows])
        gate, up = np.split(array(layer["mlp"]["gate_up_proj"]["kernel"]), 2)
        state |= {f"{name}self_attn.{part}_proj.weight": w for part, w in zip("qkv", qkv, strict=True)}
        state |= {
            f"{name}self_attn.o_proj.weight": array(layer["attention"]["o_proj"]["kernel"]),
            f"{name}mlp.gate_proj.weight": gate,
            f"{name}mlp.up_proj.weight": up,
            f"{name}mlp.down_proj.weight": array(layer["mlp"]["down_proj"]["kernel"]),
            f"{name}input_layernorm.weight": array(layer["input_norm"]["scale"]),
            f"{name}post_attention_layernorm.weight": array(layer["mlp_norm"]["scale"]),
        }
    return state
