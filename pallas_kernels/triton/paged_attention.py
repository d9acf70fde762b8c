"""`paged_attention` on Pallas' Triton backend."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import xla
from pallas_kernels.triton.paged_decode import paged_decode


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    query_start_loc: Int[Array, " seqs+1"],
    *,
    interpret: bool = False,
    **options: Any,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Sequences with one query token through the kernel, the others through XLA."""
    decode = functools.partial(paged_decode, interpret=interpret)
    return xla.paged_attention(q, k_pool, v_pool, block_tables, seq_lens, query_start_loc, **options, decode=decode)
