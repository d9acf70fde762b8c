"""One call of one op: the shapes and dtypes it takes, and the fewest bytes and operations it could do with."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.constants import FLOATS, QUANTIZED

OPS = (
    "paged_decode",
    "paged_attention",
    "write_kv",
    "copy_blocks",
    "gather_blocks",
    "scatter_blocks",
    "flash_attention",
)
ATTENTION = ("paged_decode", "paged_attention", "flash_attention")
POOL_DTYPES = (*FLOATS, *QUANTIZED)

# Query heads, KV heads, head_dim.
MODELS = {"llama3-8b": (32, 8, 128), "smollm2": (9, 3, 64)}
POOL_BLOCKS = 2048  # of a model's pool, where its sequences need fewer: a copied pool must stand out

SCALE_BYTES = 4  # float32, one for K and one for V of each token and head of a quantised pool
INDEX_BYTES = 4  # int32

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one op.

    Attributes:
        op: one of `OPS`.
        heads, kv_heads, head_dim: of the model.
        seqs: sequences of the batch.
        context: tokens in the cache of each sequence, this step's included.
        queries: query tokens of each sequence; they are its last ones.
        pool_dtype: one of `POOL_DTYPES`; queries are bfloat16, or as the pool where that is float32 or float16.
        block_size: tokens.
        stored_dim: width of a row in the pool, head_dim or the next multiple of 128.
        blocks: how many blocks `copy_blocks`, `gather_blocks` and `scatter_blocks` move.
        pool_blocks: the pool holds as many at least, whatever the sequences need.
    """

    op: str
    heads: int
    kv_heads: int
    head_dim: int
    seqs: int
    context: int
    queries: int
    pool_dtype: str = "bfloat16"
    block_size: int = 16
    stored_dim: int = 0
    blocks: int = 64
    pool_blocks: int = 1

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op is {self.op!r}; it must be one of {', '.join(OPS)}")
        if self.pool_dtype not in POOL_DTYPES:
            raise ValueError(f"pool_dtype is {self.pool_dtype!r}; it must be one of {', '.join(POOL_DTYPES)}")
        if not 1 <= self.queries <= self.context:
            raise ValueError(f"queries is {self.queries}; it must be 1 to {self.context}, the context")
        if not self.stored_dim:
            object.__setattr__(self, "stored_dim", self.head_dim)

    @property
    def dtype(self) -> str:
        """Of queries, results and new tokens."""
        return self.pool_dtype if self.pool_dtype in ("float32", "float16") else "bfloat16"

    @property
    def tokens(self) -> int:
        """Query tokens of the whole batch."""
        return self.seqs * self.queries

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.context // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Of the pool, the null block among them."""
        return 1 + max(self.seqs * self.blocks_per_seq, 2 * self.blocks, self.pool_blocks)

    @property
    def token_bytes(self) -> int:
        """K and V of one token as the pool stores them, scales included."""
        scale = SCALE_BYTES if self.pool_dtype in QUANTIZED else 0
        return 2 * self.kv_heads * (self.stored_dim * jnp.dtype(self.pool_dtype).itemsize + scale)

    @property
    def query_bytes(self) -> int:
        """Queries in, results and their log-sum-exp (not of `flash_attention`) out."""
        lse = 0 if self.op == "flash_attention" else 4
        return self.tokens * self.heads * (2 * self.head_dim * jnp.dtype(self.dtype).itemsize + lse)

    def pools(self) -> tuple[Shape, ...]:
        """K and V, and the scales of a quantised pool."""
        shape = (self.num_blocks, self.kv_heads, self.block_size)
        pool = Shape((*shape, self.stored_dim), self.pool_dtype)
        scale = Shape(shape, "float32")
        return (pool, pool, scale, scale) if self.pool_dtype in QUANTIZED else (pool, pool)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arrays of the op's internal contract (positional, and by name), as shapes.

        Queries have the width of the pool's rows, as the public ops see to.
        """
        ids = Shape((self.blocks,), "int32")
        if self.op == "flash_attention":
            q = Shape((self.seqs, self.queries, self.heads, self.head_dim), self.dtype)
            kv = Shape((self.seqs, self.context, self.kv_heads, self.head_dim), self.dtype)
            return (q, kv, kv, Shape((self.seqs,), "int32")), {}
        if self.op == "write_kv":
            pools = self.pools()
            row = (self.tokens, self.kv_heads)
            new = tuple(Shape((*row, *pool.shape[3:]), pool.dtype if len(pools) > 2 else self.dtype) for pool in pools)
            return (new, pools, Shape((self.tokens,), "int32")), {}
        if self.op == "copy_blocks":
            return (self.pools(), ids, ids), {}
        if self.op == "gather_blocks":
            return (self.pools(), ids), {}
        if self.op == "scatter_blocks":
            return (self.pools(), ids, tuple(Shape((self.blocks, *p.shape[1:]), p.dtype) for p in self.pools())), {}
        k_pool, v_pool, *scales = self.pools()
        q = Shape((self.tokens, self.heads, self.stored_dim), self.dtype)
        table, lens = Shape((self.seqs, self.blocks_per_seq), "int32"), Shape((self.seqs,), "int32")
        starts = () if self.op == "paged_decode" else (Shape((self.seqs + 1,), "int32"),)
        return (q, k_pool, v_pool, table, lens, *starts), dict(zip(("k_scale", "v_scale"), scales, strict=False))

    def options(self) -> dict[str, Any]:
        """The static arguments of the op's internal contract."""
        if self.op not in ATTENTION:
            return {}
        return {"scale": self.head_dim**-0.5} | ({"causal": True} if self.op == "flash_attention" else {})

    @property
    def updated(self) -> int | None:
        """Which positional argument is updated in place."""
        return {"write_kv": 1, "copy_blocks": 0, "scatter_blocks": 0}.get(self.op)

    def fewest_bytes(self) -> int:
        """What must be read and written at least: each block that a sequence sees once, whole and as stored."""
        if self.op in ("paged_decode", "paged_attention"):
            indices = INDEX_BYTES * self.seqs * (self.blocks_per_seq + 1)
            return self.seqs * self.blocks_per_seq * self.block_size * self.token_bytes + self.query_bytes + indices
        if self.op == "flash_attention":
            width = 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
            return self.seqs * self.context * width + self.query_bytes
        if self.op == "write_kv":
            new = 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
            new = self.token_bytes if self.pool_dtype in QUANTIZED else new
            return self.tokens * (new + self.token_bytes + INDEX_BYTES)
        return self.blocks * (2 * self.block_size * self.token_bytes + INDEX_BYTES)

    def flops(self) -> int:
        """Of both products, over the tokens that each query sees."""
        if self.op not in ATTENTION:
            return 0
        seen = self.queries * (2 * self.context - self.queries + 1) // 2
        return 4 * self.seqs * self.heads * self.head_dim * seen


def model_case(model: str, op: str, pool_dtype: str, stored_dim: int) -> Case:
    """The call of `op` that stands for a model at work.

    Decoding is 64 sequences of 4,096 tokens; prefill is a chunk of 512 query tokens in each of 4 sequences that have
    2,048 tokens with it, in a pool of four times as many; `flash_attention` is 4 whole prompts of 2,048 tokens;
    `write_kv` takes 512 tokens.
    """
    heads, kv_heads, head_dim = MODELS[model]
    seqs, context, queries = {
        "paged_decode": (64, 4096, 1),
        "paged_attention": (4, 2048, 512),
        "flash_attention": (4, 2048, 2048),
    }.get(op, (64, 4096, 8))
    shape = (op, heads, kv_heads, head_dim, seqs, context, queries, pool_dtype)
    return Case(*shape, stored_dim=stored_dim, pool_blocks=POOL_BLOCKS)
