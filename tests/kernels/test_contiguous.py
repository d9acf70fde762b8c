"""Attention over contiguous K and V, tiled and not, against float64; and partial results put together."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from backends import Backend
from paged_problem import TOLERANCE, error, make_problem

from pallas_kernels import flash_attention, merge_partials, paged_decode, standard_attention


def _arrays(q_len: int, kv_len: int, dtype: str, head_dim: int = 64, batch: int = 2) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    shapes = ((batch, q_len, 6, head_dim), (batch, kv_len, 2, head_dim), (batch, kv_len, 2, head_dim))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def _right(q: Any, k: Any, v: Any, lens: list[int], causal: bool, window: int | None, cap: float | None) -> np.ndarray:
    """From the definition, query by query."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, i, h in itertools.product(range(q.shape[0]), range(q.shape[1]), range(q.shape[2])):
        end = lens[b] - q.shape[1] + i + 1 if causal else lens[b]
        begin = max(0, end - window) if window else 0
        if end <= begin:
            continue
        scores = k[b, begin:end, h // 3] @ q[b, i, h] * q.shape[-1] ** -0.5
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights / weights.sum() @ v[b, begin:end, h // 3]
    return out


@pytest.mark.parametrize(
    ("q_len", "kv_len", "options"),
    [
        (1, 150, {"kv_lens": [150, 37]}),
        (70, 70, {"causal": True}),
        (70, 150, {"causal": True, "kv_lens": [150, 100]}),
        (33, 200, {"causal": True, "sliding_window": 20, "soft_cap": 2.0}),
        (130, 65, {}),
        (5, 64, {"kv_lens": [0, 3]}),
        (5, 9, {"kv_lens": [100, 3], "causal": True}),
    ],
    ids=str,
)
def test_flash_attention_is_right(backend: Backend, q_len: int, kv_len: int, options: dict[str, Any]) -> None:
    q, k, v = _arrays(q_len, kv_len, backend.dtype, 128 if backend.stored_multiple > 1 else 64)
    lens = [min(n, kv_len) for n in options.get("kv_lens", [kv_len] * 2)]
    right = _right(q, k, v, lens, "causal" in options, options.get("sliding_window"), options.get("soft_cap"))
    given = {**options, "kv_lens": jnp.array(options["kv_lens"], jnp.int32)} if "kv_lens" in options else options
    for i, n in enumerate(lens):  # what lies behind a sequence is anybody's
        k, v = k.at[i, n:].set(np.nan), v.at[i, n:].set(np.nan)
    assert error(backend.run("flash_attention", q, k, v, **given), right) <= TOLERANCE[backend.dtype]
    assert error(standard_attention(q, k, v, **given), right) <= TOLERANCE[backend.dtype]


def test_flash_attention_of_one_query_is_a_decode() -> None:
    """The two that are compared with each other compute the same."""
    problem = make_problem([200, 64], [1, 1])
    q, k_pool, v_pool, tables, lens, _ = problem.arguments()
    k, v = (np.zeros((2, 200, 3, 64), np.float32) for _ in "kv")
    for i in range(2):
        k[i, : lens[i]], v[i, : lens[i]] = problem.keys[i], problem.values[i]
    flash = flash_attention(q[:, None], jnp.asarray(k), jnp.asarray(v), kv_lens=lens)
    assert error(flash[:, 0], np.asarray(paged_decode(q, k_pool, v_pool, tables, lens), np.float64)) <= 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 3, 64))}, r"q is \(2, 3, 64\); it must have 4 axes, \[batch, tokens, heads, head_dim\]"),
        (
            {"k": jnp.zeros((2, 5, 2, 32))},
            r"k is \(2, 5, 2, 32\); it must be \(2, 5, 2, 64\): batch and head_dim",
        ),
        ({"v": jnp.zeros((2, 6, 2, 64))}, r"v is float32 \(2, 6, 2, 64\); it must be as k"),
        ({"q": jnp.zeros((2, 3, 5, 64))}, "q has 5 heads; they must be a multiple of the 2 KV heads of k"),
        ({"q": jnp.zeros((2, 9, 6, 64)), "causal": True}, "q has 9 tokens, but k has 5; with causal, the queries are"),
        ({"sliding_window": 3}, "sliding_window is 3 without causal"),
        ({"sliding_window": 0, "causal": True}, "sliding_window is 0; it must be an integer >= 1"),
        ({"soft_cap": 0}, "soft_cap is 0; it must be a finite number above 0"),
        ({"causal": "no"}, "causal is 'no'; it must be True or False"),
        ({"kv_lens": [1, 2]}, r"kv_lens is \[1, 2\]; it must be an array"),
        ({"kv_lens": jnp.zeros(3, jnp.int32)}, r"kv_lens is \(3,\); it must be \(2,\)"),
        ({"k": jnp.zeros((2, 0, 2, 64)), "v": jnp.zeros((2, 0, 2, 64))}, "no axis may be empty"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    kv = jnp.zeros((2, 5, 2, 64))
    arguments = {"q": jnp.zeros((2, 3, 6, 64)), "k": kv, "v": kv, **changes}
    for op in (flash_attention, standard_attention):
        with pytest.raises(ValueError, match=message):
            op(**arguments)


def test_parts_merge_to_the_whole(backend: Backend) -> None:
    """A sequence of 200 tokens as its first 128 and the rest, and one that the second part has nothing of."""
    problem = make_problem([200, 90], [1, 1])
    q, k_pool, v_pool, tables, lens, _ = backend.arguments(problem)
    whole, whole_lse = backend.run("paged_decode", q, k_pool, v_pool, tables, lens, return_lse=True)
    parts = [
        backend.run("paged_decode", q, k_pool, v_pool, part, part_lens, return_lse=True)
        for part, part_lens in (
            (tables[:, :8], jnp.minimum(lens, 128)),
            (jnp.pad(tables[:, 8:], ((0, 0), (0, 1))), jnp.maximum(lens - 128, 0)),
        )
    ]
    outs, lses = (jnp.stack(x) for x in zip(*parts, strict=True))
    outs = outs.at[1, 1].set(jnp.nan)  # counts for nothing
    out, lse = merge_partials(outs, lses)
    assert error(out, np.asarray(whole, np.float64)) <= TOLERANCE[backend.dtype]
    np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=1e-5)


def test_parts_without_keys_merge_to_zeros() -> None:
    out, lse = merge_partials(jnp.full((2, 3, 4), jnp.nan), jnp.array([[-1e30] * 3, [-jnp.inf] * 3]))
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == np.float32(-1e30)).all()


def test_scores_of_any_size_merge() -> None:
    outs = jnp.array([[[1.0]], [[3.0]]])
    out, lse = merge_partials(outs, jnp.array([[5000.0], [5000.0]]))
    assert float(out[0, 0]) == 2.0
    assert float(lse[0]) == pytest.approx(5000 + np.log(2))


def test_parts_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"outs is \(2, 3, 4\) and lses is \(3, 2\); they must be"):
        merge_partials(jnp.zeros((2, 3, 4)), jnp.zeros((3, 2)))
    with pytest.raises(ValueError, match="with one part at least"):
        merge_partials(jnp.zeros((0, 3, 4)), jnp.zeros((0, 3)))
    with pytest.raises(ValueError, match="outs is int32; it must be float32 or"):
        merge_partials(jnp.zeros((2, 3, 4), jnp.int32), jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="lses is bfloat16; it must be float32"):
        merge_partials(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3), jnp.bfloat16))
