"""The best continuations of one request's beams, in one search over beams x vocabulary, on the device."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pagedjax.device.sampler import CHUNK, PerRow, chunked, compute_logits


class BeamOutput(struct.PyTreeNode):
    """What the host reads back: continuations, best first, and which rows' logits were finite.

    Where there are fewer continuations than asked for, the rest have a logprob of -inf.
    """

    beams: Int[Array, " candidates"]
    tokens: Int[Array, " candidates"]
    logprobs: Float[Array, " candidates"]
    finite: Bool[Array, " rows"]


def best_continuations(
    kernel: Float[Array, "vocab features"],
    hidden_rows: Float[Array, "max_num_seqs features"],
    row_ids: Int[Array, " rows"],
    logprobs: PerRow,
    num_candidates: int,
) -> BeamOutput:
    """Looks for the best `num_candidates` among all beams and tokens.

    Args:
        row_ids: which of the backbone's gathered rows are beams.
        logprobs: of each beam so far; -inf for a row that is none.
    """
    logits = compute_logits(kernel, hidden_rows[row_ids])
    finite = jnp.isfinite(logits.max(axis=0)) & jnp.isfinite(logits.min(axis=0))
    peak = logits.max(axis=0)
    scores = logits - (peak + jnp.log(jnp.exp(logits - peak).sum(axis=0))) + logprobs
    values, tokens, beams = _top_k(scores, num_candidates)
    return BeamOutput(beams, tokens, values, finite)


def _top_k(scores: Float[Array, "vocab rows"], k: int) -> tuple[Float[Array, " k"], Int[Array, " k"], Int[Array, " k"]]:
    """The k largest of all, their indices in the vocabulary and their rows.

    In two levels, because `lax.top_k` over everything is slower: the k largest lie in the k chunks of the vocabulary
    whose largest are largest.
    """
    chunks = chunked(scores, -jnp.inf)
    num_chunks, _, rows = chunks.shape
    _, places = lax.top_k(chunks.max(axis=1).reshape(-1), min(k, num_chunks * rows))
    chunk, row = places // rows, places % rows
    values, inside = lax.top_k(chunks[chunk, :, row].reshape(-1), k)
    place = inside // CHUNK
    return values, chunk[place] * CHUNK + inside % CHUNK, row[place]
