"""Hidden rows -> logits -> tokens, on the device.

Nothing here sorts the vocabulary. Top-k and top-p find their threshold by bisection over the bit patterns of the
weights (30 passes end exactly on one of them), and a token is drawn by a race of exponential clocks, one a token.
Logits stay [vocab, rows], as the head's matmul gives them: reductions over the vocabulary are then vectorised over
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from pagedjax.request import MAX_LOGPROBS

PROMPT_FLAG = 1 << 24
"""Added to a token's count when it stands in the prompt; output counts lie below."""

CHUNK = 128
ONE_BITS = 0x3F800000  # bit pattern of 1.0, the largest weight

Logits = Float[Array, "vocab rows"]
PerRow = Float[Array, " rows"]


class SamplerState(struct.PyTreeNode):
    """What the device remembers of running sequences, by slot (row 0 is for padding). Donated every step.

    Attributes:
        last_tokens: token last sampled.
        token_counts: how often each token was generated, plus PROMPT_FLAG where the prompt holds it; kept only for
            requests with penalties.
        logit_bias: added to raw logits; kept only for requests that ask for it.
    """

    last_tokens: Int[Array, " slots"]
    token_counts: Int[Array, "slots vocab"]
    logit_bias: Float[Array, "slots vocab"]

    @classmethod
    def create(cls, max_num_seqs: int, vocab_size: int) -> SamplerState:
        """A state for `max_num_seqs` slots, all neutral."""
        rows = max_num_seqs + 1
        return cls(
            last_tokens=jnp.zeros(rows, jnp.int32),
            token_counts=jnp.zeros((rows, vocab_size), jnp.int32),
            logit_bias=jnp.zeros((rows, vocab_size), jnp.float32),
        )


class SampleRows(struct.PyTreeNode):
    """What the sampler reads for one slice of rows; padding rows have slot 0 and temperature 0.

    Attributes:
        row_ids: which of the backbone's gathered rows.
        slots: of the sequence.
        seeds: high and low word of the request's seed.
        sample_index: which sample of its request.
        positions: of the token that is drawn.
        shapes_logits: whether penalties or a bias apply.
        wants_logprobs: whether logprobs of this row are returned.
    """

    row_ids: Int[Array, " rows"]
    slots: Int[Array, " rows"]
    seeds: UInt32[Array, "rows 2"]
    sample_index: Int[Array, " rows"]
    positions: Int[Array, " rows"]
    temperature: PerRow
    top_k: Int[Array, " rows"]
    top_p: PerRow
    min_p: PerRow
    presence_penalty: PerRow
    frequency_penalty: PerRow
    repetition_penalty: PerRow
    shapes_logits: Bool[Array, " rows"]
    wants_logprobs: Bool[Array, " rows"]


ROW_FIELDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    **dict.fromkeys(("row_ids", "slots", "sample_index", "positions", "top_k"), (np.int32, ())),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (np.float32, ())),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), (np.float32, ())),
    **dict.fromkeys(("shapes_logits", "wants_logprobs"), (np.bool_, ())),
    "seeds": (np.uint32, (2,)),
}
"""Of each field of `SampleRows`: dtype, and its shape within one row."""


class TokenLogprobs(struct.PyTreeNode):
    """Of one chosen token a row, from raw logits; `rank` counts from 1. Zeros when no row asked."""

    logprob: PerRow
    rank: Int[Array, " rows"]
    top_ids: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]


class SampleOutput(struct.PyTreeNode):
    """What the host reads back. `finite` is False where a row's logits hold NaN or infinity."""

    tokens: Int[Array, " rows"]
    finite: Bool[Array, " rows"]
    logprobs: TokenLogprobs


def compute_logits(kernel: Float[Array, "vocab features"], rows: Float[Array, "rows features"]) -> Logits:
    """Raw logits in float32. The barrier keeps XLA:CPU from turning the product round, which is slower."""
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    columns = lax.optimization_barrier(rows.T)
    logits = jnp.matmul(kernel, columns, precision=precision, preferred_element_type=jnp.float32)
    return lax.optimization_barrier(logits)


def argmax(logits: Logits) -> Int[Array, " rows"]:
    """First index of the largest logit of each row, in two levels: a plain argmax over the vocabulary is slower."""
    chunks = chunked(logits, -jnp.inf)
    peaks = chunks.max(axis=1)
    chunk = jnp.argmax(peaks, axis=0)
    inside = jnp.argmax(_take_chunk(chunks, chunk), axis=0)
    return (chunk * CHUNK + inside).astype(jnp.int32)


def chunked(values: Logits, fill: float) -> Float[Array, "chunks chunk rows"]:
    """The vocabulary in chunks of CHUNK, the last one filled up with `fill`."""
    vocab, rows = values.shape
    padded = -(-vocab // CHUNK) * CHUNK
    if padded != vocab:
        values = jnp.pad(values, ((0, padded - vocab), (0, 0)), constant_values=fill)
    return values.reshape(padded // CHUNK, CHUNK, rows)


def _take_chunk(chunks: Float[Array, "chunks chunk rows"], chunk: Int[Array, " rows"]) -> Float[Array, "chunk rows"]:
    return jnp.take_along_axis(chunks, chunk[None, None, :], axis=0)[0]


def token_logprobs(logits: Logits, tokens: Int[Array, " rows"]) -> TokenLogprobs:
    """Log-probability and rank of `tokens`, and the most likely MAX_LOGPROBS of each row."""
    peak = logits.max(axis=0)
    log_z = peak + jnp.log(jnp.exp(logits - peak).sum(axis=0))
    chosen = jnp.take_along_axis(logits, tokens[None, :], axis=0)[0]
    values, ids = lax.top_k(logits.T, min(MAX_LOGPROBS, logits.shape[0]))
    rank = 1 + (logits > chosen).sum(axis=0, dtype=jnp.int32)
    return TokenLogprobs(chosen - log_z, rank, ids, values - log_z[:, None])


def _no_logprobs(logits: Logits, tokens: Int[Array, " rows"]) -> TokenLogprobs:
    shape = (logits.shape[1], min(MAX_LOGPROBS, logits.shape[0]))
    zeros = jnp.zeros_like(tokens)
    return TokenLogprobs(zeros.astype(jnp.float32), zeros, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


def shape_logits(logits: Logits, rows: SampleRows, state: SamplerState) -> Logits:
    """Adds biases, then takes penalties (repetition, then frequency and presence), in rows that ask for it."""
    counts = state.token_counts[rows.slots].T
    shaped = logits + state.logit_bias[rows.slots].T
    seen, generated = counts > 0, counts & (PROMPT_FLAG - 1)
    penalised = jnp.where(shaped > 0, shaped / rows.repetition_penalty, shaped * rows.repetition_penalty)
    shaped = jnp.where(seen, penalised, shaped)
    shaped = shaped - rows.frequency_penalty * generated - rows.presence_penalty * (generated > 0)
    return jnp.where(rows.shapes_logits, shaped, logits)


def largest_threshold(holds: Callable[[PerRow], Bool[Array, " rows"]], rows: int) -> PerRow:
    """The largest weight t in [0, 1] for which `holds(t)`; it must hold at 0 and stop holding once as t grows.

    Bisects the bit patterns, whose order is that of non-negative floats.
    """

    def as_float(bits: Int[Array, " rows"]) -> PerRow:
        return lax.bitcast_convert_type(bits, jnp.float32)

    def halve(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        ok = holds(as_float(middle))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    start = jnp.zeros(rows, jnp.int32), jnp.full(rows, ONE_BITS + 1, jnp.int32)
    return as_float(lax.fori_loop(0, ONE_BITS.bit_length(), halve, start)[0])


def filter_weights(weights: Logits, rows: SampleRows) -> Logits:
    """Sets to 0 what min-p, top-k and top-p exclude. `weights` are relative to the most likely token's, which is 1.

    top-p counts within what min-p and top-k left. Tokens that tie with the last one kept are kept.
    """
    num_rows = weights.shape[1]
    weights = jnp.where(weights >= rows.min_p, weights, 0.0)

    def top_k(weights: Logits) -> Logits:
        k = jnp.where(rows.top_k > 0, rows.top_k, weights.shape[0])
        threshold = largest_threshold(lambda t: (weights >= t).sum(axis=0, dtype=jnp.int32) >= k, num_rows)
        return jnp.where(weights >= threshold, weights, 0.0)

    def top_p(weights: Logits) -> Logits:
        # Where nothing is cut, rounding must not cut either: the goal is then 0.
        goal = jnp.where(rows.top_p < 1.0, rows.top_p * weights.sum(axis=0), 0.0)
        threshold = largest_threshold(lambda t: jnp.where(weights >= t, weights, 0.0).sum(axis=0) >= goal, num_rows)
        return jnp.where((weights >= threshold) | (rows.top_p >= 1.0), weights, 0.0)

    weights = lax.cond((rows.top_k > 0).any(), top_k, lambda w: w, weights)
    return lax.cond((rows.top_p < 1.0).any(), top_p, lambda w: w, weights)


def draw(weights: Logits, clocks: Logits) -> Int[Array, " rows"]:
    """The token whose clock rings first, each ringing at a rate of its weight: one with probability weight / sum.

    (The Gumbel-max trick without its logarithms.) Inverting the cumulative sum with one number a row would be quicker,
    but rounding shifts those sums: logits that differ by 4e-6, as another batch makes them, changed 11 of 3,200 draws
    from a nearly flat distribution over 50,000 tokens. Here two clocks would have to ring at the same moment: none did.
    """
    return argmax(weights / clocks)


def clocks(rows: SampleRows, vocab: int) -> Logits:
    """Exponentially distributed numbers, from `fold_in(fold_in(key(seed), sample_index), position)` alone."""

    def bits(seed: UInt32[Array, " 2"], sample_index: Int[Array, ""], position: Int[Array, ""]) -> UInt32[Array, " v"]:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        return jax.random.bits(key, (vocab,), jnp.uint32)

    numbers = jax.vmap(bits)(rows.seeds, rows.sample_index, rows.positions).T.astype(jnp.float32)
    # All 32 bits count near 0, which is where an unlikely token wins; 1 would never ring.
    return -jnp.log1p(-jnp.minimum(numbers * 2**-32 + 2**-33, 1 - 2**-24))


def choose(logits: Logits, rows: SampleRows) -> Int[Array, " rows"]:
    """Greedy where the temperature is 0, drawn elsewhere; a batch of greedy rows skips the drawing."""
    greedy = argmax(logits)

    def sampled(logits: Logits) -> Int[Array, " rows"]:
        temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
        weights = jnp.exp((logits - logits.max(axis=0)) / temperature)
        drawn = draw(filter_weights(weights, rows), clocks(rows, weights.shape[0]))
        return jnp.where(rows.temperature > 0, drawn, greedy)

    return lax.cond((rows.temperature > 0).any(), sampled, lambda _: greedy, logits)


def sample(
    kernel: Float[Array, "vocab features"],
    hidden_rows: Float[Array, "max_num_seqs features"],
    rows: SampleRows,
    state: SamplerState,
) -> tuple[SampleOutput, SamplerState]:
    """The head and the sampler: one token for each of `rows`, and the state that knows them."""
    raw = compute_logits(kernel, hidden_rows[rows.row_ids])
    logits = lax.cond(rows.shapes_logits.any(), lambda x: shape_logits(x, rows, state), lambda x: x, raw)
    tokens = choose(logits, rows)
    logprobs = lax.cond(rows.wants_logprobs.any(), token_logprobs, _no_logprobs, raw, tokens)
    finite = jnp.isfinite(raw.max(axis=0)) & jnp.isfinite(raw.min(axis=0))
    tokens = jnp.where(finite, tokens, 0)  # an argmax among NaN may lie outside the vocabulary
    state = state.replace(
        last_tokens=state.last_tokens.at[rows.slots].set(tokens),
        token_counts=state.token_counts.at[rows.slots, tokens].add(rows.shapes_logits.astype(jnp.int32)),
    )
    return SampleOutput(tokens, finite, logprobs), state


def prompt_logprobs(
    kernel: Float[Array, "vocab features"],
    hidden_rows: Float[Array, "rows features"],
    targets: Int[Array, " rows"],
) -> TokenLogprobs:
    """Logprobs of the prompt tokens `targets`, each given the hidden state of the token before it."""
    return token_logprobs(compute_logits(kernel, hidden_rows), targets)


def set_token_counts(state: SamplerState, slot: Int[Array, ""], counts: Int[Array, " vocab"]) -> SamplerState:
    """Begins a slot's counts anew, for a sequence that was just admitted."""
    return state.replace(token_counts=state.token_counts.at[slot].set(counts))


def set_logit_bias(state: SamplerState, slot: Int[Array, ""], bias: Float[Array, " vocab"]) -> SamplerState:
    """Sets a slot's bias."""
    return state.replace(logit_bias=state.logit_bias.at[slot].set(bias))
