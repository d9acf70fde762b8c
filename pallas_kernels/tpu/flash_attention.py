"""`flash_attention` on TPUs: contiguous K and V, which the grid's own pipeline brings tile by tile."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.config import LANES, Config, default_config
from pallas_kernels.tpu.softmax import Softmax, for_rows, product
from pallas_kernels.tuning import tuned

KV_TOKENS = 512  # a grid step costs as much as a few hundred tokens


def flash_attention(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    kv_lens: Int[Array, " batch"] | None,
    *,
    causal: bool,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    config: Config | None = None,
    interpret: Any = False,
) -> Float[Array, "batch q_len heads head_dim"]:
    """See `pallas_kernels.flash_attention`; one program takes the query heads of one KV head."""
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    width = pl.cdiv(head_dim, LANES) * LANES
    config = config or tuned(Config, "tpu", "flash_attention", q, k)
    config = config or _default_config(group, width, q.dtype, k.dtype)
    if config.kv_heads != 1 or config.query_tokens == 1:
        raise ValueError(
            f"config has kv_heads {config.kv_heads} and query_tokens {config.query_tokens}; flash_attention takes one "
            "KV head at a time, and 16 or more query tokens"
        )
    q_tiles, kv_tiles = pl.cdiv(q_len, config.query_tokens), pl.cdiv(kv_len, config.kv_tokens)
    kv_lens = jnp.full(batch, kv_len, jnp.int32) if kv_lens is None else jnp.minimum(kv_lens, kv_len)

    def tiled(x, tokens):
        x = jnp.pad(x, ((0, 0), (0, tokens - x.shape[1]), (0, 0), (0, width - head_dim)))
        return x.transpose(0, 2, 1, 3)  # [batch, heads, tokens, width]

    packed = tiled(q, q_tiles * config.query_tokens)
    packed = packed.reshape(batch, kv_heads, group, q_tiles, config.query_tokens, width).swapaxes(2, 3)
    packed = packed.reshape(batch, kv_heads, q_tiles, -1, width)
    body = functools.partial(
        _kernel,
        config=config,
        q_len=q_len,
        causal=causal,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    span = functools.partial(_span, config=config, q_len=q_len, causal=causal, sliding_window=sliding_window)

    def kv_index(seq, head, q_tile, kv_tile, lens):
        begin, end = span(lens[seq], q_tile)
        last = jnp.maximum(pl.cdiv(end, config.kv_tokens) - 1, 0)  # outside the span nothing new is fetched
        return seq, head, jnp.clip(kv_tile, jnp.minimum(lax.div(begin, config.kv_tokens), last), last), 0

    rows = packed.shape[3]
    q_spec = pl.BlockSpec((1, 1, 1, rows, width), lambda seq, head, q_tile, kv_tile, lens: (seq, head, q_tile, 0, 0))
    kv_spec = pl.BlockSpec((1, 1, config.kv_tokens, width), kv_index)
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, q_tiles, kv_tiles),
            in_specs=[q_spec, kv_spec, kv_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((config.kv_tokens, width), v.dtype), *Softmax.scratch((rows,), width)],
        ),
        out_shape=jax.ShapeDtypeStruct(packed.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="flash_attention",
    )(kv_lens, packed, *(tiled(x, kv_tiles * config.kv_tokens) for x in (k, v)))
    out = out.reshape(batch, kv_heads, q_tiles, group, config.query_tokens, width).transpose(0, 2, 4, 1, 3, 5)
    return out.reshape(batch, -1, heads, width)[:, :q_len, :, :head_dim]


def _default_config(group: int, head_dim: int, q_dtype: Any, kv_dtype: Any) -> Config:
    paged = default_config(1, group, head_dim, q_dtype, kv_dtype, decode=False)
    return Config(1, paged.query_tokens, KV_TOKENS)


def _span(
    kv_len: Any, q_tile: Any, *, config: Config, q_len: int, causal: bool, sliding_window: int | None
) -> tuple[Any, Any]:
    """The tokens that the queries of a tile see, from a first one to behind a last one."""
    first = kv_len - q_len + q_tile * config.query_tokens  # position of the tile's first query
    end = jnp.clip(first + config.query_tokens, 0, kv_len) if causal else kv_len
    return 0 if sliding_window is None else jnp.maximum(first - sliding_window + 1, 0), end


def _kernel(
    len_ref,  # i32[batch]
    q_ref,  # [1, 1, 1, rows, head_dim]; row `g * query_tokens + t` is token `t` of the group's head `g`
    k_ref,  # [1, 1, kv_tokens, head_dim]
    v_ref,  # the same
    out_ref,  # as q_ref
    clean_ref,  # [kv_tokens, head_dim]: V without what nobody sees
    *state,
    config: Config,
    q_len: int,
    causal: bool,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
):
    softmax = Softmax(*state)  # of [rows]
    q_tile, kv_tile = pl.program_id(2), pl.program_id(3)
    kv_len = len_ref[pl.program_id(0)]
    rows, kv_tokens = q_ref.shape[3], config.kv_tokens
    begin, end = _span(kv_len, q_tile, config=config, q_len=q_len, causal=causal, sliding_window=sliding_window)
    start = kv_tile * kv_tokens
    pl.when(kv_tile == 0)(softmax.start)

    def attend_rows(some, values_ref):
        row = some.start + lax.broadcasted_iota(jnp.int32, (some.size, 1), 0)
        row = row % config.query_tokens + q_tile * config.query_tokens
        last = jnp.minimum(row + kv_len - q_len, kv_len - 1) if causal else jnp.full((some.size, 1), kv_len - 1)
        key = start + lax.broadcasted_iota(jnp.int32, (some.size, kv_tokens), 1)
        seen = key <= last
        if sliding_window is not None:
            seen &= key > last - sliding_window
        multiply = functools.partial(product, q_ref.dtype, k_ref.dtype)
        scores = multiply(q_ref[0, 0, 0, some], k_ref[0, 0], (1, 1)) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        softmax.at(some).add(scores, seen, lambda weights: multiply(weights, values_ref[...], (1, 0)))

    def attend(values_ref):
        for_rows(rows, lambda some: attend_rows(some, values_ref))

    partly = (start < begin) | (start + kv_tokens > end)

    @pl.when((start < end) & (start + kv_tokens > begin) & partly)
    def _():
        position = start + lax.broadcasted_iota(jnp.int32, (kv_tokens, 1), 0)
        values = jnp.where((position >= begin) & (position < end), v_ref[0, 0].astype(jnp.float32), 0)
        clean_ref[...] = values.astype(v_ref.dtype)  # 0 x NaN is NaN
        attend(clean_ref)

    pl.when((start < end) & jnp.logical_not(partly))(lambda: attend(v_ref.at[0, 0]))

    @pl.when(kv_tile == pl.num_programs(3) - 1)
    def _():
        out, _ = softmax.finish()
        out_ref[0, 0, 0] = out.astype(out_ref.dtype)
