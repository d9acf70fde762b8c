"""The sampler against a float64 oracle that sorts, and against the frequencies it must have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.device import sampler
from pagedjax.device.sampler import PROMPT_FLAG, SampleRows, SamplerState

VOCAB = 300  # no multiple of the sampler's chunk


def make_rows(num_rows: int, **fields: Any) -> SampleRows:
    defaults: dict[str, Any] = {
        "row_ids": np.arange(num_rows),
        "slots": np.arange(1, num_rows + 1),
        "sample_index": 0,
        "positions": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "shapes_logits": False,
        "wants_logprobs": False,
        "seeds": np.zeros((num_rows, 2), np.uint32),
    }
    values = {**defaults, **fields}
    ints = {"row_ids", "slots", "sample_index", "positions", "top_k"}
    flags = {"shapes_logits", "wants_logprobs"}

    def array(name: str) -> Any:
        dtype = np.int32 if name in ints else bool if name in flags else np.float32
        if name == "seeds":
            return np.asarray(values[name], np.uint32)
        return np.broadcast_to(np.asarray(values[name], dtype), (num_rows,)).copy()

    return SampleRows(**{name: array(name) for name in values})


def kept_by_sorting(weights: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens survive, by sorting; ties with the last token kept are kept."""
    kept = weights >= np.float32(min_p)
    if top_k:
        kth = np.sort(np.where(kept, weights, 0))[-min(top_k, len(weights))]
        kept &= weights >= kth
    order = np.sort(np.where(kept, weights, 0).astype(np.float64))[::-1]
    sums = np.cumsum(order)
    if top_p < 1:
        last = order[np.searchsorted(sums, top_p * sums[-1] * (1 - 1e-6))]
        kept &= weights >= last
    return kept & (weights > 0)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    top_k=st.sampled_from([0, 1, 2, 7, 50, VOCAB, 10 * VOCAB]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
)
def test_filters_keep_what_sorting_would_keep(seed: int, top_k: int, top_p: float, min_p: float, scale: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal((VOCAB, 1)) * scale).astype(np.float32)
    weights = np.exp(logits - logits.max())
    rows = make_rows(1, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = np.asarray(jax.jit(sampler.filter_weights)(weights, rows))[:, 0] > 0
    want = kept_by_sorting(weights[:, 0], top_k, top_p, min_p)
    # The nucleus ends where a running sum passes top_p: rounding may decide about one token there.
    assert (kept != want).sum() <= (1 if top_p < 1 else 0)


def test_filters_act_row_by_row() -> None:
    weights = np.linspace(1, 0.01, VOCAB, dtype=np.float32)[:, None].repeat(3, axis=1)
    kept = (sampler.filter_weights(weights, make_rows(3, top_k=[0, 2, 5], top_p=[1.0, 1.0, 1.0])) > 0).sum(axis=0)
    assert kept.tolist() == [VOCAB, 2, 5]


def test_ties_with_the_last_token_kept_are_kept() -> None:
    weights = np.array([[1.0], [0.5], [0.5], [0.5], [0.1]], np.float32)
    assert (sampler.filter_weights(weights, make_rows(1, top_k=2)) > 0)[:, 0].tolist() == [True] * 4 + [False]


@pytest.mark.jax_matrix
def test_drawn_tokens_have_the_models_frequencies() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal(VOCAB) * 1.5).astype(np.float32)
    num_draws = 20_000
    rows = make_rows(num_draws, positions=np.arange(num_draws), temperature=0.7, top_k=40)
    tokens = np.asarray(jax.jit(sampler.choose)(jnp.tile(logits[:, None], (1, num_draws)), rows))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / 0.7)
    weights[np.argsort(weights)[:-40]] = 0
    expected = weights / weights.sum() * num_draws
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected) ** 2 / np.where(expected, expected, 1)).sum()
    assert chi_square < 39 + 5 * np.sqrt(2 * 39)  # mean and 5 standard deviations at 39 degrees of freedom


@given(st.integers(0, 2**31))
def test_a_token_without_weight_is_never_drawn(seed: int) -> None:
    weights = np.random.default_rng(seed).random((VOCAB, 1)).astype(np.float32)
    weights[np.random.default_rng(seed + 1).random(VOCAB) < 0.9] = 0
    weights[VOCAB // 2] = 1.0
    clocks = np.array(sampler.clocks(make_rows(1, positions=seed % 1000), VOCAB))
    clocks[VOCAB // 2] = clocks.max() + 10  # even where it is the last to ring
    token = int(sampler.draw(weights, clocks)[0])
    assert weights[token, 0] > 0


def test_clocks_are_exponential_down_to_the_unlikely_and_never_stand_still() -> None:
    found = np.sort(np.asarray(sampler.clocks(make_rows(40, positions=np.arange(40)), 50_000)).ravel())
    assert 0 < found[0] < 1e-5 and found[-1] < 17
    assert abs(found.mean() - 1) < 5 / np.sqrt(found.size)
    for limit in (1e-5, 1e-3, 0.1, 1.0, 3.0):
        count, expected = (found < limit).sum(), found.size * -np.expm1(-limit)
        assert abs(count - expected) < 5 * np.sqrt(expected)


def test_rounding_hardly_ever_changes_a_draw() -> None:
    """Logits of the same tokens in another batch differ by 4e-6: that must not draw another token."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((50_000, 32)).astype(np.float32)  # nearly flat: neighbours are as likely
    choose = jax.jit(sampler.choose)
    flips = 0
    for step in range(20):
        rows = make_rows(32, positions=np.arange(32) + 32 * step)
        noise = rng.uniform(-4e-6, 4e-6, logits.shape).astype(np.float32)
        flips += int((np.asarray(choose(logits, rows)) != np.asarray(choose(logits + noise, rows))).sum())
    assert flips == 0


def test_a_rows_draw_depends_on_its_own_key_alone() -> None:
    logits = np.random.default_rng(0).standard_normal((VOCAB, 4)).astype(np.float32)
    logits[:, 3] = logits[:, 0]
    fields = {"seeds": [[0, 7], [0, 8], [1, 7], [0, 7]], "positions": [5, 6, 5, 5], "sample_index": [0, 0, 1, 0]}
    together = np.asarray(sampler.choose(logits, make_rows(4, **fields)))
    assert together[0] == together[3]
    for i in range(4):
        alone = make_rows(1, **{name: [values[i]] for name, values in fields.items()})
        assert np.asarray(sampler.choose(logits[:, i : i + 1], alone))[0] == together[i]


def test_seed_sample_and_position_each_change_the_draw() -> None:
    def numbers(**fields: Any) -> list[float]:
        return np.asarray(sampler.clocks(make_rows(3, **fields), VOCAB))[0].tolist()

    assert len(set(numbers(seeds=[[0, 1], [0, 2], [1, 1]]))) == 3
    assert len(set(numbers(sample_index=[0, 1, 2]))) == 3
    assert len(set(numbers(positions=[0, 1, 2]))) == 3
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), 2), 3)
    got = np.asarray(sampler.clocks(make_rows(1, seeds=[[0, 9]], sample_index=2, positions=3), VOCAB))[:, 0]
    bits = np.asarray(jax.random.bits(key, (VOCAB,), jnp.uint32)).astype(np.float64)
    np.testing.assert_allclose(got, -np.log1p(-(bits + 0.5) / 2**32), rtol=1e-4)


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_argmax_is_numpys_first_largest(seed: int, num_rows: int) -> None:
    logits = np.random.default_rng(seed).integers(0, 20, (VOCAB, num_rows)).astype(np.float32)
    np.testing.assert_array_equal(sampler.argmax(logits), logits.argmax(axis=0))


def state_of(token_ids: list[int], prompt_ids: list[int], bias: dict[int, float]) -> SamplerState:
    state = SamplerState.create(1, VOCAB)
    counts = np.bincount(token_ids, minlength=VOCAB).astype(np.int32)
    counts[prompt_ids] += PROMPT_FLAG
    row = np.zeros(VOCAB, np.float32)
    for token, value in bias.items():
        row[token] = value
    return sampler.set_logit_bias(sampler.set_token_counts(state, jnp.int32(1), counts), jnp.int32(1), row)


def test_penalties_and_bias_are_those_of_the_definition() -> None:
    logits = np.random.default_rng(3).standard_normal((VOCAB, 1)).astype(np.float32)
    state = state_of([5, 5, 9], [9, 11], {5: 0.25, 20: -3.0})
    rows = make_rows(
        1, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.7, shapes_logits=True, slots=1
    )
    got = np.asarray(sampler.shape_logits(logits, rows, state))[:, 0]
    want = logits[:, 0].astype(np.float64)
    want[5] += 0.25
    want[20] -= 3.0
    for token in (5, 9, 11):
        want[token] = want[token] / 1.7 if want[token] > 0 else want[token] * 1.7
    want[5] -= 2 * 0.3 + 0.5
    want[9] -= 0.3 + 0.5
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_logprobs_ranks_and_alternatives() -> None:
    logits = np.random.default_rng(4).standard_normal((VOCAB, 2)).astype(np.float32) * 3
    got = jax.jit(sampler.token_logprobs)(logits, np.array([17, 40], np.int32))
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(axis=0))
    for row, token in enumerate((17, 40)):
        order = np.argsort(-logprobs[:, row])
        np.testing.assert_allclose(got.logprob[row], logprobs[token, row], atol=1e-5)
        assert got.rank[row] == 1 + np.flatnonzero(order == token)[0]
        np.testing.assert_array_equal(got.top_ids[row], order[:20])
        np.testing.assert_allclose(got.top_logprobs[row], logprobs[order[:20], row], atol=1e-5)


def test_one_call_samples_counts_remembers_and_names_rows_that_are_not_finite() -> None:
    rng = np.random.default_rng(5)
    kernel = rng.standard_normal((VOCAB, 8)).astype(np.float32)
    hidden = rng.standard_normal((4, 8)).astype(np.float32)
    hidden[2, 3] = np.nan
    rows = make_rows(3, row_ids=[3, 2, 0], slots=[1, 2, 3], temperature=0.0, shapes_logits=[True, False, True])
    output, state = jax.jit(sampler.sample)(kernel, hidden, rows, SamplerState.create(3, VOCAB))
    best = (kernel @ hidden[[3, 0]].T).argmax(axis=0)
    assert output.finite.tolist() == [True, False, True]
    assert output.tokens[0] == best[0] and output.tokens[2] == best[1]
    assert state.last_tokens[1] == best[0] and state.last_tokens[3] == best[1]
    assert state.token_counts[1, best[0]] == 1 and state.token_counts[3, best[1]] == 1
    assert state.token_counts.sum() == 2  # a row without penalties is not counted
