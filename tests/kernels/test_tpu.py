"""What is the TPU kernels' own: their DMAs race with nothing, their limits are named, their moves are in place."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import RACE
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from paged_problem import TOLERANCE, error, make_problem

from pallas_kernels import copy_blocks, flash_attention, paged_attention, write_kv
from pallas_kernels.dispatch import load
from pallas_kernels.tpu.config import Config, default_config

pytestmark = pytest.mark.jax_matrix

# Memory that nobody wrote is NaN there, and a race prints a line or raises, as the JAX version has it.
TPU: dict[str, Any] = {"backend": "tpu", "interpret": pltpu.InterpretParams(detect_races=True)}


@pytest.fixture(autouse=True)
def quick_to_compile() -> Iterator[None]:
    """An interpreted kernel is a large program that runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_programs_that_share_the_kv_heads_and_small_query_tiles_change_no_bit() -> None:
    problem = make_problem([90, 33], [40, 5], heads=(8, 4), head_dim=128)
    options = {"scale": 0.1, "interpret": TPU["interpret"]}
    outs = [
        jax.jit(functools.partial(load("tpu").paged_attention, config=config, **options))(*problem.arguments())[0]
        for config in (Config(4, 64), Config(2, 16))
    ]
    np.testing.assert_array_equal(outs[0], outs[1])


def test_flash_attention_over_several_steps() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, h, 80), np.float32)) for n, h in ((150, 6), (600, 2), (600, 2)))
    options: dict[str, Any] = {"causal": True, "sliding_window": 40, "soft_cap": 2.0}
    options["kv_lens"] = jnp.array([600, 150], jnp.int32)
    right = flash_attention(q, k, v, backend="reference", **options)
    k, v = (x.at[1, 150:].set(np.nan) for x in (k, v))
    assert error(flash_attention(q, k, v, **TPU, **options), np.asarray(right, np.float64)) <= TOLERANCE["float32"]


def test_blocks_are_copied_many_at_a_time_and_others_left_alone() -> None:
    rng = np.random.default_rng(0)
    pools = {
        "k": jnp.asarray(rng.standard_normal((40, 2, 16, 128)), jnp.bfloat16),
        "ids": jnp.asarray(rng.integers(0, 9, (40, 3)), jnp.int32),
        "scale": jnp.asarray(rng.standard_normal((40, 3, 16)), jnp.float32),
    }
    src = np.array([1, 1, 2, 0, *range(3, 15), 0], np.int32)
    dst = np.array([20, 21, 22, 0, *range(23, 35), 0], np.int32)
    copied = copy_blocks(pools, jnp.asarray(src), jnp.asarray(dst), **TPU)
    for name, pool in pools.items():
        np.testing.assert_array_equal(copied[name], pool.at[dst].set(pool[src]))
    nothing = jnp.zeros(0, jnp.int32)
    np.testing.assert_array_equal(copy_blocks(pools, nothing, nothing, **TPU)["k"], pools["k"])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_tokens_are_written_where_they_belong(dtype: str) -> None:
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((6, 2, 128)), jnp.float32) for _ in range(2))
    pool, scale = jnp.full((3, 2, 128, 128), 5, dtype), jnp.full((3, 2, 128), 7.0)
    slots = jnp.array([128, 383, 200, -1, 384, 0], jnp.int32)
    options: dict[str, Any] = {"k_scale": scale, "v_scale": scale} if dtype == "int8" else {}
    arguments = (k, v, pool, pool, slots)
    for out, right in zip(write_kv(*arguments, **options, **TPU), write_kv(*arguments, **options), strict=True):
        np.testing.assert_array_equal(out[1:], right[1:])


def test_the_detector_finds_a_planted_race(capsys: pytest.CaptureFixture[str]) -> None:
    """So we know that it looks: a buffer is read while its DMA is under way."""

    def hasty(x_ref, out_ref, buffer, arrived):
        copy = pltpu.make_async_copy(x_ref, buffer, arrived)
        copy.start()
        out_ref[...] = buffer[...]
        copy.wait()

    x = jnp.ones((8, 128))
    call = pl.pallas_call(
        hasty,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=TPU["interpret"],
    )
    message = ""
    try:
        jax.block_until_ready(call(x))
    except Exception as race:  # JAX 0.12 raises what its callback raised, 0.10 prints
        message = str(race)
        pltpu.reset_tpu_interpret_mode_state()
    assert RACE in message + capsys.readouterr().out


def _pool(shape: tuple[int, ...], dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("op", "arrays", "message"),
    [
        ("paged_decode", [_pool((4, 8, 64)), _pool((9, 2, 16, 64))], "rows of 64 numbers.*multiple of 128"),
        ("write_kv", [_pool((4, 2, 64)), _pool((9, 2, 16, 64))], "rows of 64 numbers.*multiple of 128"),
        ("paged_decode", [_pool((4, 8, 128)), _pool((9, 2, 4, 128))], "block_size 4.*8 to 256"),
        ("paged_attention", [_pool((4, 8, 128)), _pool((9, 2, 512, 128))], "block_size 512.*8 to 256"),
        ("paged_attention", [_pool((4, 8, 128), "float16"), _pool((9, 2, 16, 128))], "^q is float16"),
        ("paged_decode", [_pool((4, 8, 128)), _pool((9, 2, 16, 128), "float16")], "^k_pool is float16"),
        ("flash_attention", [_pool((1, 4, 8, 64)), _pool((1, 4, 8, 64), "float16")], "^k is float16"),
        ("paged_decode", [_pool((4, 8, 128)), _pool((9, 2, 64, 128), "int8")], "int8 with block_size 64.*of 128"),
    ],
)
def test_limits_are_named(op: str, arrays: list[Any], message: str) -> None:
    problem = load("tpu").unsupported(op, *arrays)
    assert problem is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem)


def test_what_is_within_the_limits_is_taken() -> None:
    unsupported = load("tpu").unsupported
    for block_size in (8, 16, 32, 64, 128, 256):
        assert unsupported("paged_decode", _pool((4, 6, 128)), _pool((9, 3, block_size, 128), "bfloat16")) is None
    assert unsupported("paged_attention", _pool((4, 8, 128)), _pool((9, 8, 128, 128), "int8")) is None
    assert unsupported("flash_attention", _pool((1, 4, 8, 80)), _pool((1, 4, 8, 80))) is None
    assert unsupported("copy_blocks", _pool((4,), "bool"), _pool((4, 3, 5), "float16")) is None


def test_a_limit_reaches_the_caller_by_name() -> None:
    q, *arrays = make_problem([5], [1], head_dim=64).arguments()
    with pytest.raises(ValueError, match="rows of 64 numbers"):
        paged_attention(q, *arrays, **TPU)


@pytest.mark.parametrize(
    ("config", "op"), [(Config(1, 16), "paged_decode"), (Config(1, 1), "paged_attention")], ids=str
)
def test_a_config_of_the_other_op_is_refused(config: Config, op: str) -> None:
    q, *arrays, starts = make_problem([5], [2], head_dim=128).arguments()
    batch = (q[:1], *arrays) if op == "paged_decode" else (q, *arrays, starts)
    with pytest.raises(ValueError, match=f"query_tokens {config.query_tokens}; {op} takes 1"):
        getattr(load("tpu"), op)(*batch, scale=1.0, config=config)


def test_a_config_must_divide_the_pools_heads() -> None:
    q, *arrays, _ = make_problem([5], [1], heads=(6, 3), head_dim=128).arguments()
    with pytest.raises(ValueError, match="kv_heads 2; it must divide the 3 of the pool"):
        load("tpu").paged_decode(q, *arrays, scale=1.0, config=Config(2, 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_heads": 0, "query_tokens": 1}, "kv_heads is 0"),
        ({"kv_heads": 1, "query_tokens": 24}, "query_tokens is 24"),
        ({"kv_heads": 1, "query_tokens": 16, "kv_tokens": 128}, "kv_tokens is 128"),
    ],
)
def test_a_config_checks_itself(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)


def test_many_wide_heads_are_shared_out_among_programs() -> None:
    small = default_config(8, 4, 128, jnp.bfloat16, jnp.bfloat16, decode=True)
    large = default_config(32, 1, 256, jnp.float32, jnp.float32, decode=True)
    assert small.kv_heads == 8
    assert large.kv_heads < 32 and 32 % large.kv_heads == 0
