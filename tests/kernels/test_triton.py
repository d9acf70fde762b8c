"""What the Triton kernels alone promise: their limits by name, their configurations, splits, and products in full."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_problem import TOLERANCE, error, make_problem

from pallas_kernels import copy_blocks, paged_decode, reference, write_kv
from pallas_kernels.dispatch import choose
from pallas_kernels.triton import copy_blocks as copying
from pallas_kernels.triton import paged_attention as attending
from pallas_kernels.triton import paged_decode as decoding
from pallas_kernels.triton import refusal
from pallas_kernels.triton import write_kv as writing
from pallas_kernels.triton.tiles import Math

TRITON: dict[str, Any] = {"backend": "triton", "interpret": True}
OWN = {
    name: sys.modules[f"pallas_kernels.triton.{name}"] for name in ("copy_blocks", "paged_attention", "paged_decode")
}
OWN["write_kv"] = sys.modules["pallas_kernels.triton.write_kv"]


def _like(*shape: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


POOL = _like(100, 8, 16, 128)


@pytest.mark.parametrize(
    ("op", "arrays", "message"),
    [
        (
            "paged_decode",
            (_like(4, 8, 320), _like(9, 8, 16, 320)),
            "head_dim is 320; the triton kernels take at most 256",
        ),
        (
            "flash_attention",
            (_like(1, 4, 130, 64), _like(1, 4, 2, 64)),
            "q has 65 heads for each KV head; .* at most 64",
        ),
        (
            "write_kv",
            (_like(4, 8, 128), _like(2**18, 8, 16, 128, dtype="int8")),
            "4294967296 numbers; .* up to 2\\*\\*31",
        ),
        (
            "copy_blocks",
            (POOL, _like(4, 8, dtype="complex64")),
            "a pool is complex64; the triton kernel copies float32,",
        ),
    ],
)
def test_limits_are_named(op: str, arrays: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(op, "triton", True, *arrays)


@pytest.mark.parametrize(
    "arrays", [(_like(4, 32, 128), POOL), (_like(4, 32, 128), _like(2**17, 8, 16, 256)), (_like(4, 512, 128), POOL)]
)
def test_what_fits_is_taken(arrays: tuple[Any, ...]) -> None:
    assert refusal("paged_decode", arrays, "8.0") is None


@pytest.mark.parametrize(("capability", "taken"), [("8.0", False), ("8.6", False), ("8.9", True), ("10.0", True)])
@pytest.mark.parametrize("op", ["paged_attention", "write_kv", "copy_blocks"])
def test_float8_depends_on_the_chip(monkeypatch: pytest.MonkeyPatch, op: str, capability: str, taken: bool) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    arrays = (_like(4, 32, 128), _like(100, 8, 16, 128, dtype="float8_e4m3fn"))
    if taken:
        assert choose(op, "triton", False, *arrays) == "triton"
        return
    message = f"a pool is float8_e4m3fn and the GPU's compute capability {capability}; .* take float8 from 8.9 on"
    with pytest.raises(ValueError, match=message):
        choose(op, "triton", False, *arrays)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OWN["paged_decode"].Config(3, 2), "num_warps is 3; it must be one of 1, 2, 4, 8, 16"),
        (lambda: OWN["paged_decode"].Config(4, 0), "num_stages is 0; it must be an integer from 1 to 8"),
        (lambda: OWN["paged_attention"].Config(48, 4, 2), "rows is 48; it must be a power of two from 16 to 256"),
        (lambda: OWN["write_kv"].Config(512, 4), "rows is 512; it must be a power of two from 1 to 256"),
        (lambda: OWN["copy_blocks"].Config(100, 4), "chunk is 100; it must be a power of two from 128 to 65536"),
    ],
)
def test_a_configuration_checks_itself(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_jax_without_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("pallas_kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton")
    with pytest.raises(
        ImportError, match=r"JAX .* has no Triton backend in Pallas; the backends 'xla' and 'reference'"
    ):
        importlib.import_module("pallas_kernels.triton")


@pytest.mark.parametrize("pair", [("float32", "float32"), ("float32", "float16"), ("bfloat16", "float32")], ids=str)
def test_products_in_parts_are_float32_products(pair: tuple[str, str]) -> None:
    """Of numbers from 1e-9 to 1e9, which would show a part that is lost."""
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape, dtype in zip(((16, 64), (64, 32)), pair, strict=True)
    )
    if pair == ("float32", "float32"):
        a, b = a * 10.0 ** np.linspace(-9, 9, 64), b * 10.0 ** np.linspace(9, -9, 64)[:, None]
    right = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    assert error(Math(1.0, None, jnp.dtype(jnp.float32)).dot(a, b), right) < 3e-7


@pytest.mark.jax_matrix
@pytest.mark.parametrize("window", [None, 700])
def test_more_splits_than_are_merged_at_a_time(window: int | None) -> None:
    problem = make_problem([9000, 8300, 0, 512], [1] * 4, heads=(2, 1), head_dim=16, block_size=256)
    q, *arrays, _ = problem.arguments(rest=np.nan)
    out, lse = paged_decode(q, *arrays, sliding_window=window, return_lse=True, **TRITON)
    _, k, v, *batch, _ = problem.arguments()
    right, right_lse = paged_decode(q, k, v, *batch, sliding_window=window, return_lse=True, backend="reference")
    assert error(out, np.asarray(right, np.float64)) <= TOLERANCE["float32"]
    np.testing.assert_allclose(lse, right_lse, atol=1e-5)


def test_rows_of_a_query_tile_need_not_be_a_multiple_of_the_group() -> None:
    problem = make_problem([90, 70, 20], [37, 1, 20], heads=(7, 1), head_dim=32, num_tokens=64)
    out, lse = attending(*problem.arguments(rest=np.nan), scale=32**-0.5, interpret=True)
    config = OWN["paged_attention"].Config(rows=16, num_warps=4, num_stages=1)
    other, other_lse = attending(*problem.arguments(), scale=32**-0.5, interpret=True, config=config)
    assert error(out, problem.right()) <= TOLERANCE["float32"]
    np.testing.assert_allclose(other, out, atol=1e-6)
    np.testing.assert_allclose(other_lse[:58], lse[:58], atol=1e-6)


def _aliases(fn: Callable[..., Any], *arrays: Any) -> list[set[int]]:
    """The results of each kernel in a function that lie where an argument does."""
    calls = [eqn for eqn in jax.make_jaxpr(fn)(*arrays).eqns if eqn.primitive.name == "pallas_call"]
    return [{out for _, out in eqn.params["input_output_aliases"]} for eqn in calls]


@pytest.mark.jax_matrix
@pytest.mark.parametrize("pool", ["bfloat16", "int8"])
def test_tokens_are_written_in_place_by_one_launch(pool: str) -> None:
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((11, 3, 80)), jnp.float32) for _ in range(2))
    slots = jnp.array([0, 5 * 8 - 1, -1, 8, 5 * 8, 0, 9, 33, -8, 17, 24], jnp.int32)
    pools = tuple(jnp.full((5, 3, 8, 80), i, pool) for i in (1, 2))
    new: tuple[Any, ...] = (k, v)
    if pool == "int8":
        new = reference.quantize_kv(k, v, jnp.dtype(pool))
        pools += tuple(jnp.full((5, 3, 8), i, jnp.float32) for i in (3, 4))
    expected = reference.write_kv(new, pools, slots)
    for out, right in zip(writing(new, pools, slots, interpret=True), expected, strict=True):
        np.testing.assert_array_equal(out[1:], right[1:])  # which padding token stays in the null block is not said
        np.testing.assert_array_equal(out[0, :, 1:], right[0, :, 1:])
    assert _aliases(writing, new, pools, slots) == [set(range(len(pools)))]


@pytest.mark.jax_matrix
def test_blocks_of_any_dtype_and_rank_are_copied_in_place() -> None:
    src, dst = jnp.array([1, 0, 1, 3], jnp.int32), jnp.array([2, 0, 4, 5], jnp.int32)
    numbers = np.arange(6 * 3 * 8 * 80).reshape(6, 3, 8, 80)
    pools = {
        "k": jnp.asarray(numbers, jnp.bfloat16),
        "scale": jnp.asarray(numbers[..., 0], jnp.float32),
        "bytes": jnp.asarray(numbers[:, :2] % 100, jnp.int8),
        "flag": jnp.asarray(numbers[:, 0, 0, 0] % 3 == 0),
        "float8": jnp.asarray(numbers[:, 1, 1, :7] % 100, jnp.float8_e4m3fn),
    }
    out = copy_blocks(pools, src, dst, **TRITON)
    for name, pool in pools.items():
        expected = np.array(pool)
        expected[np.asarray(dst)] = expected[np.asarray(src)]
        np.testing.assert_array_equal(np.asarray(out[name]), expected)
    assert _aliases(copying, pools, src, dst) == [{0}] * len(pools)


def test_nothing_to_do_is_nothing_done() -> None:
    pool, none = jnp.zeros((2, 1, 8, 16)), jnp.zeros(0, jnp.int32)
    new = jnp.zeros((0, 1, 16))
    assert write_kv(new, new, pool, pool, none, **TRITON)[0] is pool
    np.testing.assert_array_equal(copy_blocks([pool], none, none, **TRITON)[0], pool)
    q = jnp.ones((1, 1, 16))
    out, lse = decoding(q, pool, pool, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), scale=1.0, interpret=True)
    assert not out.any()
    assert lse[0, 0] == jnp.float32(-1e30)
