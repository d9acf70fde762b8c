"""A ragged batch taken apart: sequences with one query token, and tiles of query tokens of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.constants import MASKED

Result = tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]


def decode_singles(
    decode: Callable[..., Result],
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Array,
    v_pool: Array,
    block_tables: Int[Array, "seqs max_blocks"],
    seq_lens: Int[Array, " seqs"],
    query_start_loc: Int[Array, " seqs+1"],
) -> Result:
    """Sequences with one query token through `decode`, a `paged_decode`; zeros and MASKED for all other tokens."""
    query_lens = jnp.diff(query_start_loc)
    rows = q.at[query_start_loc[:-1]].get(mode="clip")
    decoded, lse = decode(rows, k_pool, v_pool, block_tables, jnp.where(query_lens == 1, seq_lens, 0))
    seq = (query_start_loc[1:] <= jnp.arange(len(q))[:, None]).sum(axis=1)
    alone = query_lens.at[seq].get(mode="fill", fill_value=0) == 1
    out = jnp.where(alone[:, None, None], decoded.at[seq].get(mode="clip"), 0)
    return out, jnp.where(alone[:, None], lse.at[seq].get(mode="clip"), MASKED)


class QueryTiles(NamedTuple):
    """The sequences with several query tokens, cut into tiles of at most `rows` query tokens of one sequence.

    There are as many entries as any batch of this shape could need; those from `count` on are empty.

    Attributes:
        rows: query tokens of a full tile.
        count: tiles in use, i32[1].
        seq: row of the block table, i32[tiles]; 0 in an empty tile.
        first_token: where the tile begins on the token axis, i32[tiles].
        num_tokens: query tokens in the tile, i32[tiles]; 0 in an empty tile.
        first_position: the position of its first token in the sequence, i32[tiles].
    """

    rows: int
    count: Int[Array, " 1"]
    seq: Int[Array, " tiles"]
    first_token: Int[Array, " tiles"]
    num_tokens: Int[Array, " tiles"]
    first_position: Int[Array, " tiles"]

    @classmethod
    def plan(
        cls,
        seq_lens: Int[Array, " seqs"],
        query_start_loc: Int[Array, " seqs+1"],
        num_tokens: int,
        rows: int,
        min_queries: int = 2,
    ) -> QueryTiles:
        """Tiles for the sequences with at least `min_queries` query tokens."""
        query_lens = jnp.diff(query_start_loc)
        tiles = jnp.where(query_lens >= min_queries, (query_lens + rows - 1) // rows, 0)
        ends = jnp.cumsum(tiles)
        tile = jnp.arange(num_tokens // rows + min(len(seq_lens), num_tokens // min_queries), dtype=jnp.int32)
        used = tile < ends[-1]
        seq = jnp.where(used, jnp.minimum((ends <= tile[:, None]).sum(axis=1), len(seq_lens) - 1), 0).astype(jnp.int32)
        offset = (tile - ends[seq] + tiles[seq]) * rows
        return cls(
            rows,
            ends[-1:].astype(jnp.int32),
            seq,
            jnp.where(used, query_start_loc[seq] + offset, 0),
            jnp.where(used, jnp.minimum(rows, query_lens[seq] - offset), 0),
            jnp.where(used, seq_lens[seq] - query_lens[seq] + offset, 0),
        )

    def pack(
        self, q: Float[Array, "tokens heads head_dim"], kv_heads: int
    ) -> Float[Array, "tiles kv_heads packed_rows head_dim"]:
        """The queries tile by tile: row `g * rows + r` is query token `r` of the group's head `g`; zeros behind."""
        tokens, valid = self._tokens()
        tiled = jnp.where(valid[..., None, None], q.at[tokens].get(mode="clip"), 0)
        tiled = tiled.reshape(*tokens.shape, kv_heads, -1, q.shape[-1]).transpose(0, 2, 3, 1, 4)
        return tiled.reshape(len(tokens), kv_heads, -1, q.shape[-1])

    def unpack(self, packed: Float[Array, "tiles kv_heads packed_rows *width"], into: Array) -> Array:
        """`into`, [tokens, heads, ...], with the tokens of all tiles replaced by what the tiles hold."""
        tokens, valid = self._tokens()
        num_tiles, kv_heads, rows, *width = packed.shape
        rest = packed.reshape(num_tiles, kv_heads, rows // self.rows, self.rows, *width)
        rest = jnp.moveaxis(rest, 3, 1).reshape(num_tiles, self.rows, *into.shape[1:])
        index = jnp.where(valid, tokens, len(into))
        return into.at[index].set(rest.astype(into.dtype), mode="drop")

    def _tokens(self) -> tuple[Int[Array, "tiles rows"], Bool[Array, "tiles rows"]]:
        offset = jnp.arange(self.rows)
        return self.first_token[:, None] + offset, offset < self.num_tokens[:, None]
