"""Random paged-attention problems, and what is right for them in float64, straight from the definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# What the backends are held to, as norm(out - right) / norm(right).
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}

# Decodes and prefill chunks, whole prompts and their later parts; lengths around blocks and tiles; a sequence that
# rests in this step; two rows of padding and some tokens of it.
MIXED: dict[str, Any] = {
    "seq_lens": (1, 5, 64, 130, 40, 200, 65, 63, 257, 33),
    "query_lens": (1, 5, 1, 70, 0, 1, 65, 1, 3, 1),
    "num_seqs": 12,
    "num_tokens": 160,
}

# The same in little, for interpreters that take a second for each tile.
SMALL: dict[str, Any] = {
    "seq_lens": (1, 70, 130, 40),
    "query_lens": (1, 66, 1, 0),
    "num_seqs": 5,
    "num_tokens": 70,
    "heads": (3, 1),
}

# For a kernel that takes 256 tokens of the KV axis at a step: decodes and chunks over one and several.
STEPS: dict[str, Any] = {
    "seq_lens": (1, 300, 513, 40, 5, 280),
    "query_lens": (1, 3, 1, 0, 5, 70),
    "num_seqs": 7,
    "num_tokens": 90,
    "heads": (6, 2),
}


@dataclasses.dataclass(frozen=True)
class PagedProblem:
    """One ragged batch. `keys` and `values` hold each sequence's own, [seq_len, kv_heads, head_dim]."""

    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    query_lens: list[int]
    block_tables: np.ndarray
    num_blocks: int
    block_size: int
    num_seqs: int

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def seq_lens(self) -> np.ndarray:
        return self._padded([len(k) for k in self.keys])

    @property
    def query_start_loc(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self._padded(self.query_lens))]).astype(np.int32)

    def pool(self, contents: list[np.ndarray], rest: float) -> np.ndarray:
        """A pool with each sequence's `contents` in its blocks, and `rest` in all other slots."""
        shape = (self.num_blocks, contents[0].shape[1], self.block_size, contents[0].shape[2])
        pool = np.full(shape, rest, np.float32)
        for table, content in zip(self.block_tables, contents, strict=False):
            for position, token in enumerate(content):
                pool[table[position // self.block_size], :, position % self.block_size] = token
        return pool

    def arguments(
        self, dtype: str = "float32", rest: float = 0.0, max_blocks: int | None = None, stored_dim: int | None = None
    ) -> tuple[Any, ...]:
        """The arguments of `paged_attention`; `max_blocks` makes the table wider, `stored_dim` the rows of the pool."""
        tables = np.zeros((self.num_seqs, max_blocks or self.block_tables.shape[1]), np.int32)
        tables[: len(self.block_tables), : self.block_tables.shape[1]] = self.block_tables
        pad = [(0, 0)] * 3 + [(0, (stored_dim or self.head_dim) - self.head_dim)]
        pools = (np.pad(self.pool(x, rest), pad) for x in (self.keys, self.values))
        floats = (jnp.asarray(x, dtype) for x in (self.q, *pools))
        return *floats, *(jnp.asarray(x) for x in (tables, self.seq_lens, self.query_start_loc))

    def right(
        self, dtype: str = "float32", scale: float | None = None, window: int | None = None, cap: float | None = None
    ) -> np.ndarray:
        """What attention should give for inputs rounded to `dtype`."""
        q, out = _rounded(self.q, dtype), np.zeros(self.q.shape)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        starts = self.query_start_loc
        for seq, num_queries in enumerate(self.query_lens):
            keys, values = _rounded(self.keys[seq], dtype), _rounded(self.values[seq], dtype)
            for i in range(num_queries if len(keys) else 0):
                end = len(keys) - num_queries + i + 1
                begin = 0 if window is None else max(0, end - window)
                token = starts[seq] + i
                out[token] = _attend(q[token], keys[begin:end], values[begin:end], factor, cap)
        return out

    def right_lse(self, dtype: str = "float32") -> np.ndarray:
        """The log-sum-exp of every token's scores, -1e30 for padding."""
        q, out = _rounded(self.q, dtype), np.full(self.q.shape[:2], -1e30, np.float32)
        for seq, num_queries in enumerate(self.query_lens):
            keys = _rounded(self.keys[seq], dtype)
            for i in range(num_queries if len(keys) else 0):
                token = self.query_start_loc[seq] + i
                scores = _scores(q[token], keys[: len(keys) - num_queries + i + 1], q.shape[-1] ** -0.5, None)
                out[token] = np.log(np.exp(scores).sum(axis=-1)).reshape(-1)
        return out

    def _padded(self, per_seq: list[int]) -> np.ndarray:
        return np.array(per_seq + [0] * (self.num_seqs - len(per_seq)), np.int32)


def make_problem(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    block_size: int = 16,
    num_seqs: int | None = None,
    num_tokens: int | None = None,
    seed: int = 0,
    spare_blocks: int = 5,
) -> PagedProblem:
    """A problem whose numbers depend on `seed` and the lengths, not on where the blocks lie or how large they are."""
    rng = np.random.default_rng(seed)
    num_tokens = num_tokens or sum(query_lens)
    q = rng.standard_normal((num_tokens, heads[0], head_dim), np.float32)
    keys, values = ([rng.standard_normal((n, heads[1], head_dim), np.float32) for n in seq_lens] for _ in range(2))
    needed = [-(-n // block_size) for n in seq_lens]
    num_blocks = 1 + sum(needed) + spare_blocks
    free = iter(1 + rng.permutation(num_blocks - 1))
    tables = np.zeros((len(needed), max(*needed, 1)), np.int32)
    for table, count in zip(tables, needed, strict=True):
        table[:count] = [next(free) for _ in range(count)]
    return PagedProblem(q, keys, values, list(query_lens), tables, num_blocks, block_size, num_seqs or len(seq_lens))


def error(out: Any, right: np.ndarray) -> float:
    """Norm-wise, relative."""
    return float(np.linalg.norm(np.asarray(out, np.float64) - right) / np.linalg.norm(right))


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x, dtype), np.float64)


def _scores(q: np.ndarray, keys: np.ndarray, scale: float, cap: float | None) -> np.ndarray:
    scores = np.einsum("kgd,tkd->kgt", q.reshape(keys.shape[1], -1, q.shape[-1]), keys) * scale
    return scores if cap is None else cap * np.tanh(scores / cap)


def _attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, cap: float | None) -> np.ndarray:
    scores = _scores(q, keys, scale, cap)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("kgt,tkd->kgd", weights, values).reshape(q.shape)
