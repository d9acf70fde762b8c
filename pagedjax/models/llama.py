"""The Llama family as a functional flax model over a paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from pagedjax.config import ModelConfig
from pagedjax.device.batch import Batch
from pagedjax.device.kv_pool import KVPool
from pagedjax.models.layers import GatedMLP, Linear, RMSNorm, apply_rope, rope_tables
from pallas_kernels import paged_attention, write_kv

Params = Mapping[str, Any]
LayerPool = tuple[Array, ...]  # K and V of one layer; behind them their scales, if the pool is quantised
Rope = tuple[Float[Array, "half_dim tokens"], Float[Array, "half_dim tokens"]]


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """Which kernels the model calls: a name of `pallas_kernels`, and whether Pallas interprets them."""

    name: str = "auto"
    interpret: bool = False

    @property
    def writer(self) -> str:
        """What writes and copies: kernels where there are some for this chip, though attention may be interpreted."""
        return self.name if self.name in ("reference", "xla") else "auto"


class Attention(nn.Module):
    """Grouped-query attention through the block tables (paper section 4.1)."""

    config: ModelConfig
    backend: AttentionBackend

    @nn.compact
    def __call__(
        self, x: Float[Array, "features tokens"], pool: LayerPool, batch: Batch, rope: Rope
    ) -> tuple[Float[Array, "features tokens"], LayerPool]:
        c = self.config
        qkv = Linear((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, name="qkv_proj")(x)
        qkv = qkv.reshape(c.num_heads + 2 * c.num_kv_heads, c.head_dim, -1)
        turned = apply_rope(qkv[: c.num_heads + c.num_kv_heads], *rope).transpose(2, 0, 1)
        q, k = turned[:, : c.num_heads], turned[:, c.num_heads :]
        v = qkv[c.num_heads + c.num_kv_heads :].transpose(2, 0, 1)
        chosen: dict[str, Any] = {"backend": self.backend.name, "interpret": self.backend.interpret}
        scales = dict(zip(("k_scale", "v_scale"), pool[2:], strict=False))
        k_pool, v_pool, *new_scales = write_kv(
            k, v, pool[0], pool[1], batch.slot_mapping, **scales, backend=self.backend.writer
        )
        scales = dict(zip(scales, new_scales, strict=True))
        tables = (batch.block_tables, batch.seq_lens, batch.query_start_loc)
        out = paged_attention(q, k_pool, v_pool, *tables, **scales, **chosen)
        out = out.reshape(out.shape[0], -1).T.astype(x.dtype)
        return Linear(x.shape[0], name="o_proj")(out), (k_pool, v_pool, *new_scales)


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm and added back."""

    config: ModelConfig
    backend: AttentionBackend

    @nn.compact
    def __call__(
        self, x: Float[Array, "features tokens"], pool: LayerPool, batch: Batch, rope: Rope
    ) -> tuple[Float[Array, "features tokens"], LayerPool]:
        c = self.config
        normed = RMSNorm(c.rms_norm_eps, name="input_norm")(x)
        attended, pool = Attention(c, self.backend, name="attention")(normed, pool, batch, rope)
        x = x + attended
        normed = RMSNorm(c.rms_norm_eps, name="mlp_norm")(x)
        return x + GatedMLP(c.intermediate_size, name="mlp")(normed), pool


@partial(jax.jit, static_argnums=0)
def _apply_block(
    block: Block, params: Params, x: Float[Array, "features tokens"], pool: LayerPool, batch: Batch, rope: Rope
) -> tuple[Float[Array, "features tokens"], LayerPool]:
    """A layer as a function of its own: all layers share one trace, which takes most of a warm start otherwise."""
    return block.apply({"params": params}, x, pool, batch, rope)  # pyright: ignore[reportReturnType]


def forward(
    config: ModelConfig, backend: AttentionBackend, params: Params, pool: KVPool, batch: Batch
) -> tuple[Float[Array, "features tokens"], KVPool]:
    """One step of the backbone: embedding, decoder layers and final norm; the head is the sampler's.

    Args:
        params: pytree as `parameter_shapes` says; the head's kernel, if there is one, is not used here.
        pool: donated by the caller; this step's keys and values are written into it.
        batch: `token_ids` must be known ids here (tokens still on the device are resolved before).

    Returns:
        The hidden states after the final norm, one column per token (padding columns hold garbage), and the pool.
    """
    block = Block(config, backend)
    x = params["embed_tokens"]["embedding"][batch.token_ids].T
    rope = rope_tables(config, batch.positions)
    layers: list[LayerPool] = []
    for i, layer_pool in enumerate(pool.layers):
        x, layer_pool = _apply_block(block, params[f"layers_{i}"], x, layer_pool, batch, rope)
        layers.append(layer_pool)
    hidden: Any = RMSNorm(config.rms_norm_eps).apply({"params": params["final_norm"]}, x)
    return hidden, KVPool.of_layers(layers)


def head_kernel(params: Params) -> Float[Array, "vocab features"]:
    """The output projection: the embedding itself when tied."""
    return params["lm_head"]["kernel"] if "lm_head" in params else params["embed_tokens"]["embedding"]


def parameter_shapes(config: ModelConfig) -> dict[str, Any]:
    """The parameter pytree as nested dictionaries of shapes: what every loader must produce."""
    hidden, qkv = config.hidden_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = {
        "input_norm": {"scale": (hidden,)},
        "attention": {
            "qkv_proj": {"kernel": (qkv, hidden)},
            "o_proj": {"kernel": (hidden, config.num_heads * config.head_dim)},
        },
        "mlp_norm": {"scale": (hidden,)},
        "mlp": {
            "gate_up_proj": {"kernel": (2 * config.intermediate_size, hidden)},
            "down_proj": {"kernel": (hidden, config.intermediate_size)},
        },
    }
    shapes: dict[str, Any] = {
        "embed_tokens": {"embedding": (config.vocab_size, hidden)},
        **{f"layers_{i}": layer for i in range(config.num_layers)},
        "final_norm": {"scale": (hidden,)},
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = {"kernel": (config.vocab_size, hidden)}
    return shapes


def init_params(config: ModelConfig, seed: int, dtype: str = "float32") -> dict[str, Any]:
    """Random parameters of the right shapes, for tests and for timing without weights."""
    leaves, treedef = jax.tree.flatten(parameter_shapes(config), is_leaf=lambda s: isinstance(s, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = [
        jnp.ones(shape, dtype)
        if len(shape) == 1
        else (jax.random.normal(key, shape, jnp.float32) * shape[1] ** -0.5).astype(dtype)
        for key, shape in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, made)
