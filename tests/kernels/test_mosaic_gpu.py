"""What is Mosaic GPU's own: its interpreter looks for races, its layouts hold at every width, its limits have names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_problem import TOLERANCE, PagedProblem, error, make_problem

from pallas_kernels import copy_blocks, flash_attention, mosaic_gpu, paged_attention, paged_decode, reference
from pallas_kernels.mosaic_gpu.attend import Config
from pallas_kernels.mosaic_gpu.paged_decode import paged_decode as decode_kernel

PARAMS: Any = getattr(plgpu, "InterpretGPUParams", None)
interpreted = pytest.mark.skipif(PARAMS is None, reason="JAX below 0.11 cannot interpret Mosaic GPU kernels")
DTYPE = "bfloat16"
pytestmark = pytest.mark.jax_matrix  # the newest JAX is where the interpreter is


@pytest.fixture(autouse=True)
def fresh_interpreter() -> Iterator[None]:
    """A kernel that fails leaves the interpreter's state behind."""
    yield
    if PARAMS is not None:
        from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

        reset_gpu_interpret_mode_state()


def _backend() -> dict[str, Any]:
    return {"backend": "mosaic_gpu", "interpret": PARAMS(detect_races=True)}


def _decode(problem: PagedProblem, max_blocks: int | None = None, **options: Any) -> np.ndarray:
    *arrays, _ = problem.arguments(DTYPE, rest=np.nan, max_blocks=max_blocks)
    return np.asarray(paged_decode(*arrays, **_backend(), **options))


@interpreted
def test_decode_is_right_and_neither_garbage_nor_blocks_change_a_bit() -> None:
    lens = [70, 0]
    problem = make_problem(lens, [1] * 2, heads=(3, 1))
    out = _decode(problem)
    assert error(out, problem.right(DTYPE)) <= TOLERANCE[DTYPE]
    small, large = (make_problem(lens, [1] * 2, heads=(3, 1), block_size=size) for size in (8, 256))
    np.testing.assert_array_equal(_decode(small, max_blocks=70), out)  # two splits, where there was one
    np.testing.assert_array_equal(_decode(large), out)


@interpreted
@pytest.mark.parametrize(("head_dim", "heads"), [(80, (1, 1)), (256, (16, 1))])
def test_decode_at_every_swizzle_and_over_splits(head_dim: int, heads: tuple[int, int]) -> None:
    problem = make_problem([530], [1], heads=heads, head_dim=head_dim, block_size=32)
    out = _decode(problem, sliding_window=60, soft_cap=3.0)
    assert error(out, problem.right(DTYPE, window=60, cap=3.0)) <= TOLERANCE[DTYPE]


@interpreted
def test_prefill_with_two_consumers_and_a_window() -> None:
    problem = make_problem([90, 5, 0, 70], [80, 5, 0, 1], heads=(3, 1), num_seqs=5, num_tokens=90)
    arrays = problem.arguments(DTYPE, rest=np.nan)
    options: dict[str, Any] = {"sliding_window": 30, "soft_cap": 3.0}
    out, lse = paged_attention(*arrays, **options, return_lse=True, **_backend())
    assert error(out, problem.right(DTYPE, window=30, cap=3.0)) <= TOLERANCE[DTYPE]
    assert not np.asarray(out[86:]).any()
    _, right = reference.paged_attention(*problem.arguments(DTYPE), scale=64**-0.5, **options)
    np.testing.assert_allclose(lse, right, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("pool", "head_dim"), [("int8", 64), ("float8_e4m3fn", 96)])
def test_quantised_pools_are_widened_and_their_garbage_is_not_seen(pool: str, head_dim: int) -> None:
    problem = make_problem([70, 0, 30], [1, 0, 30], heads=(2, 1), head_dim=head_dim)
    q, k, v, *rest = problem.arguments()
    unused = jnp.isnan(problem.arguments(rest=np.nan)[1])

    def quantize(array: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = array.reshape(-1, 1, head_dim)
        numbers, _, scale, _ = reference.quantize_kv(tokens, tokens, dtype)
        return numbers.reshape(array.shape), scale.reshape(array.shape[:3])

    dtype = jnp.dtype(pool)
    (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
    right = reference.paged_attention(
        q.astype(DTYPE), k, v, *rest, scale=head_dim**-0.5, k_scale=k_scale, v_scale=v_scale
    )[0]
    k_scale, v_scale = (jnp.where(unused[..., 0], jnp.nan, scale) for scale in (k_scale, v_scale))
    if pool != "int8":
        k, v = (jnp.where(unused, jnp.asarray(jnp.nan, dtype), numbers) for numbers in (k, v))
    out = paged_attention(q.astype(DTYPE), k, v, *rest, k_scale=k_scale, v_scale=v_scale, **_backend())
    assert error(out, np.asarray(right, np.float64)) <= TOLERANCE[DTYPE]


@interpreted
@pytest.mark.parametrize(("causal", "kv_lens"), [(True, [100, 61]), (False, [100, 0])])
def test_flash_attention(causal: bool, kv_lens: list[int]) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, tokens, heads, 32)), "float16")
        for tokens, heads in ((40, 4), (100, 2), (100, 2))
    )
    lens = jnp.asarray(kv_lens, jnp.int32)
    out = flash_attention(q, k, v, kv_lens=lens, causal=causal, **_backend())
    right = reference.standard_attention(q, k, v, lens, causal=causal, scale=32**-0.5)
    assert error(out, np.asarray(right, np.float64)) <= TOLERANCE["float16"]


@interpreted
def test_copy_blocks_copies_what_it_is_told_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    pools = {
        "k": jnp.asarray(rng.standard_normal((9, 2, 8, 64)), DTYPE),
        "k_scale": jnp.asarray(rng.standard_normal((9, 2, 8)), "float32"),
        "v": jnp.asarray(rng.standard_normal((9, 3, 16)), "float8_e4m3fn"),
    }
    src, dst = (jnp.asarray(ids, jnp.int32) for ids in ([3, 3, 0, 5, 0], [1, 7, 0, 8, 0]))
    after = copy_blocks(pools, src, dst, **_backend())
    for name, pool in pools.items():
        np.testing.assert_array_equal(after[name], pool.at[dst].set(pool[src]))


@interpreted
def test_the_interpreter_finds_a_race() -> None:
    """Shared memory is overwritten while a copy out of it may still be reading."""

    def body(x_ref, out_ref, smem, ready):
        for i in range(2):
            plgpu.copy_gmem_to_smem(x_ref.at[i], smem, ready)
            plgpu.barrier_wait(ready)
            plgpu.copy_smem_to_gmem(smem, out_ref.at[i])
            if i == 1 or wait:
                plgpu.wait_smem_to_gmem(0)

    x = jnp.arange(256, dtype=jnp.float32).reshape(2, 128)
    for wait in (True, False):
        run = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=(plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()),
            interpret=PARAMS(detect_races=True),
        )
        if wait:
            np.testing.assert_array_equal(run(x), x)
        else:
            with pytest.raises(Exception, match="[Rr]ace"):
                jax.block_until_ready(run(x))


@pytest.mark.skipif(PARAMS is not None, reason="JAX 0.11 and newer interpret Mosaic GPU kernels")
def test_a_jax_that_cannot_interpret_says_so() -> None:
    problem = make_problem([5], [1], heads=(2, 1))
    with pytest.raises(ValueError, match=r"interpret is True; JAX .* cannot interpret Mosaic GPU, 0.11 can"):
        paged_attention(*problem.arguments(DTYPE), backend="mosaic_gpu", interpret=True)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"block_size": 4}, "k_pool has block_size 4; the mosaic_gpu kernels take 8 or more"),
        ({"head_dim": 72}, "head_dim is 72; the mosaic_gpu kernels take multiples of 16 up to 256 for bfloat16"),
        ({"head_dim": 272}, "head_dim is 272; the mosaic_gpu kernels take multiples of 16 up to 256 for bfloat16"),
        ({"heads": (65, 1)}, "q has 65 heads for each KV head; the mosaic_gpu kernels take at most 64"),
    ],
)
@pytest.mark.parametrize("op", ["paged_decode", "paged_attention"])
def test_limits_of_shapes(op: str, shape: dict[str, Any], message: str) -> None:
    q, k_pool, *_ = make_problem([5], [1], **{"heads": (2, 1), **shape}).arguments(DTYPE)
    assert mosaic_gpu.unsupported(op, q, k_pool) == message


def test_limits_of_dtypes() -> None:
    q, k_pool, *_ = make_problem([5], [1], heads=(2, 1)).arguments(DTYPE)
    assert mosaic_gpu.unsupported("paged_decode", q, k_pool) is None
    for query, pool in (("float32", "float32"), ("float32", DTYPE), ("float16", DTYPE)):
        assert mosaic_gpu.unsupported("paged_decode", q.astype(query), k_pool.astype(pool)) == (
            f"q is {query} and k_pool {pool}; the mosaic_gpu kernels take both as bfloat16 or both as float16, or such "
            "a q and a k_pool of int8 or float8_e4m3fn"
        )
    narrow = jnp.zeros((9, 1, 16, 80), "int8")
    assert mosaic_gpu.unsupported("paged_decode", q, narrow) == (
        "head_dim is 80; the mosaic_gpu kernels take multiples of 32 up to 256 for int8"
    )
    leaves = k_pool, jnp.zeros((9, 3), "int8")
    assert mosaic_gpu.unsupported("copy_blocks", *leaves) == (
        "pools holds an array int8 (9, 3), of 3 bytes a block; the mosaic_gpu kernel copies multiples of 16"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 0}, "stages is 0; it must be from 1 to 8"),
        ({"consumers": 3}, "consumers is 3; it must be from 1 to 2"),
    ],
)
def test_config_checks_itself(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Config(), **changes)


def test_8_bit_pools_have_one_consumer() -> None:
    q, k_pool, v_pool, tables, lens, _ = make_problem([5], [1], heads=(2, 1)).arguments(DTYPE)
    scale = jnp.ones(k_pool.shape[:3])
    with pytest.raises(ValueError, match="consumers is 2; it must be 1 for a pool of int8"):
        decode_kernel(
            *(q, k_pool.astype("int8"), v_pool.astype("int8"), tables, lens),
            scale=1.0,
            k_scale=scale,
            v_scale=scale,
            config=Config(consumers=2),
        )
