"""`flash_attention` on Pallas' Triton backend: contiguous K and V, else as the tiles of `paged_attention`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.triton.paged_attention import Config, default_config
from pallas_kernels.triton.tiles import KVTile, Math, Ref, Sight, load_rows, padded_width, plgpu, store_rows
from pallas_kernels.tuning import tuned


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
    interpret: bool = False,
    config: Config | None = None,
) -> Float[Array, "batch q_len heads head_dim"]:
    """Zeros for a query that sees no key; with `causal`, the queries are the last of a sequence's tokens."""
    batch, q_len, heads, head_dim = q.shape
    group = heads // k.shape[2]
    config = config or tuned(Config, "triton", "flash_attention", q, k) or default_config(q, k)
    rows = max(config.rows, pl.next_power_of_2(group))
    body = functools.partial(
        _attend_queries, rows=rows, causal=causal, sliding_window=sliding_window, how=Math.of(q, k, scale, soft_cap)
    )
    lens = jnp.full(batch, k.shape[1], jnp.int32) if kv_lens is None else kv_lens
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(q_len, rows // group), k.shape[2], batch),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="flash_attention",
    )(q, k, v, lens)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads the tiles of one head of one sequence."""

    k_ref: Ref  # [batch, kv_len, kv_heads, head_dim]
    v_ref: Ref
    seq: Int[Array, ""]
    head: Int[Array, ""]

    def read(self, position: Int[Array, " tile"], seen: Bool[Array, " tile"] | None) -> KVTile:
        width = padded_width(self.k_ref.shape[3])
        k, v = (load_rows(ref, width, seen, self.seq, position, self.head) for ref in (self.k_ref, self.v_ref))
        return KVTile(k, v)


def _attend_queries(
    q_ref,  # [batch, q_len, heads, head_dim]
    k_ref,  # [batch, kv_len, kv_heads, head_dim]
    v_ref,  # the same
    len_ref,  # [batch]
    out_ref,  # as q
    *,
    rows: int,
    causal: bool,
    sliding_window: int | None,
    how: Math,
):
    tile, head, seq = (pl.program_id(axis) for axis in range(3))
    _, q_len, heads, head_dim = q_ref.shape
    group = heads // k_ref.shape[2]
    first = tile * (rows // group)
    num_tokens = jnp.minimum(rows // group, q_len - first)
    row = jnp.arange(rows)
    token, q_head = row // group, head * group + row % group
    valid = token < num_tokens
    q = load_rows(q_ref, padded_width(head_dim), valid, seq, first + token, q_head)
    kv_len = len_ref[seq]
    if causal:
        before = kv_len - q_len  # tokens of the sequence before its queries
        sight = Sight.causal(before + first + token, before + first, num_tokens, sliding_window)
    else:
        sight = Sight.everything(rows, kv_len)
    out, _ = sight.walk(q, _Reader(k_ref, v_ref, seq, head), how).finish()
    store_rows(out_ref, out, valid, seq, first + token, q_head)
