"""Traffic counted from traced programs, against loads that are watched, loops over the tiles, and arithmetic."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import reference
from pallas_kernels.aot.counted import Launch, Uncountable, count
from pallas_kernels.aot.partial import UNKNOWN, Walk
from pallas_kernels.dispatch import kernel

pytestmark = pytest.mark.jax_matrix
tiles = pytest.importorskip("pallas_kernels.triton.tiles")
plgpu = tiles.plgpu


def _shape(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _flash(backend: str, q: Any, kv: Any, kv_lens: Any = None, **options: Any) -> Launch:
    options = {"causal": False, "scale": 1.0} | options
    function = functools.partial(kernel(backend, "flash_attention"), **options)
    if kv_lens is None:
        (launch,) = count(lambda q, k, v: function(q, k, v, None), q, kv, kv)
    else:
        (launch,) = count(lambda *args: function(*args), q, kv, kv, kv_lens)
    return launch


def _traffic(launch: Launch) -> list[tuple[int, int]]:
    return [(operand.read, operand.written) for operand in launch.operands]


# ------------------------------------------------------------------ triton


@pytest.mark.parametrize(
    ("q_len", "kv_len", "lens", "causal", "window"),
    [
        (70, 150, [150, 90], False, None),
        (70, 150, [150, 90], True, None),
        (40, 40, [40, 0], False, None),
        (40, 40, [40, 0], True, None),
        (50, 200, [9, 200], True, 30),
    ],
)
def test_triton_loads_as_many_as_are_watched_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, q_len: int, kv_len: int, lens: list[int], causal: bool, window: int | None
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, n, h, 40)), jnp.bfloat16) for n, h in ((q_len, 6), *2 * [(kv_len, 2)])
    )
    options = {"causal": causal, "scale": 0.1, "sliding_window": window}
    launch = _flash("triton", *(_shape(*x.shape) for x in (q, k)), np.array(lens, np.int32), **options)

    watched = {"read": 0, "written": 0}
    loaded, stored = plgpu.load, plgpu.store

    def add(what: str, lanes: Any) -> None:
        watched[what] += int(lanes)

    def watch(what: str, shape: tuple[int, ...], mask: Any) -> None:
        lanes = jnp.int32(np.prod(shape)) if mask is None else jnp.broadcast_to(mask, shape).sum()
        jax.debug.callback(functools.partial(add, what), lanes)

    def load(ref: Any, *, mask: Any = None, **rest: Any) -> Any:
        found = loaded(ref, mask=mask, **rest)
        watch("read", found.shape, mask)
        return found

    def store(ref: Any, value: Any, *, mask: Any = None, **rest: Any) -> None:
        watch("written", value.shape, mask)
        stored(ref, value, mask=mask, **rest)

    monkeypatch.setattr(plgpu, "load", load)
    monkeypatch.setattr(plgpu, "store", store)
    out = kernel("triton", "flash_attention")(q, k, v, jnp.array(lens, jnp.int32), interpret=True, **options)
    jax.block_until_ready(out)
    jax.effects_barrier()

    traffic = _traffic(launch)
    assert sum(read for read, _ in traffic[:3]) == watched["read"] > 0
    assert traffic[4] == (0, watched["written"])
    right = reference.standard_attention(q, k, v, jnp.array(lens), **options)
    assert jnp.abs(out - right).max() < 0.05


def test_triton_by_hand():
    # Two tiles of 128 queries, of 130: the second has two rows. The diagonal ends at 128 and at 130.
    launch = _flash("triton", _shape(1, 130, 1, 64), _shape(1, 130, 1, 64), causal=True)
    keys = (128 + 130) * 64
    assert launch.grid == (2, 1, 1)
    assert _traffic(launch) == [(130 * 64, 0), (keys, 0), (keys, 0), (2, 0), (0, 130 * 64)]
    assert launch.bytes == 2 * (2 * 130 * 64 + 2 * keys) + 2 * 4


def test_a_larger_tile_reads_keys_less_often():
    from pallas_kernels.triton.paged_attention import Config

    q = _shape(1, 1024, 1, 64)
    small, large = (_flash("triton", q, q, config=Config(rows, 4, 2)) for rows in (64, 128))
    assert small.operands[1].read == 2 * large.operands[1].read == 16 * 1024 * 64


def test_triton_paged_decode_follows_the_lengths():
    table = np.arange(1, 9, dtype=np.int32).reshape(2, 4)
    decode = functools.partial(kernel("triton", "paged_decode"), scale=1.0)
    pool = _shape(9, 2, 16, 128)
    (launch,) = count(lambda *args: decode(*args), _shape(2, 4, 128), pool, pool, table, np.array([50, 20], np.int32))
    pools = [operand for operand in launch.operands if operand.shape == pool.shape]
    assert [pool.read for pool in pools] == 2 * [70 * 2 * 128]


# ------------------------------------------------------------------ tpu and mosaic_gpu


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_len", [300, 512, 1000, 1536])
def test_tpu_fetches_a_block_when_it_is_another(seq_len: int, causal: bool) -> None:
    head_dim, query_tokens, kv_tokens = 64, 128, 512  # stored 128 wide
    launch = _flash("tpu", _shape(2, seq_len, 2, head_dim), _shape(2, seq_len, 2, head_dim), causal=causal)
    q_tiles, kv_tiles = -(-seq_len // query_tokens), -(-seq_len // kv_tokens)
    fetched, there = 0, None
    for head, q_tile, kv_tile in itertools.product(range(4), range(q_tiles), range(kv_tiles)):
        end = min((q_tile + 1) * query_tokens, seq_len) if causal else seq_len
        wanted = head, min(kv_tile, (end - 1) // kv_tokens)
        fetched, there = fetched + (wanted != there), wanted
    queries, keys = 4 * q_tiles * query_tokens * 128, fetched * kv_tokens * 128
    assert _traffic(launch) == [(2, 0), (queries, 0), (keys, 0), (keys, 0), (0, queries)]


def test_mosaic_gpu_by_hand():
    pytest.importorskip("pallas_kernels.mosaic_gpu")
    # Three tiles of 128 queries, the last one padded; tiles of 64 keys, the last cut off at 300, up to multiples of 8.
    launch = _flash("mosaic_gpu", _shape(1, 300, 1, 64), _shape(1, 300, 1, 64), causal=True)
    keys = (128 + 256 + 304) * 64
    by_shape = {(operand.shape, operand.itemsize): operand for operand in launch.operands if operand.itemsize == 2}
    assert [(x.read, x.written) for x in launch.operands if x.shape == (1, 304, 1, 64)] == 2 * [(keys, 0)]
    assert [x.shape for x in launch.operands if x.written] == [(3, 1, 128, 64), (3, 1, 128)]
    assert [x.written for x in launch.operands if x.written] == [384 * 64, 384]
    assert len(by_shape) == 2


# ------------------------------------------------------------------ what cannot be counted


def test_what_depends_on_unknown_numbers_is_refused():
    q = _shape(1, 128, 1, 64)
    for backend in ("triton", "tpu"):
        with pytest.raises(Uncountable, match="not known"):
            _flash(backend, q, q, _shape(1, dtype="int32"))


def test_a_mask_made_of_floats_is_refused():
    def body(x_ref: Any, out_ref: Any) -> None:
        x = plgpu.load(x_ref.at[jnp.arange(16)])
        plgpu.store(out_ref.at[jnp.arange(16)], x, mask=x > 0)

    call = pl.pallas_call(body, out_shape=_shape(16, dtype="float32"), compiler_params=plgpu.CompilerParams())
    with pytest.raises(Uncountable, match="a mask"):
        count(call, _shape(16, dtype="float32"))


def test_what_is_not_understood_is_refused():
    def body(x_ref: Any, out_ref: Any) -> None:
        plgpu.atomic_add(out_ref, (0,), x_ref[0])

    call = pl.pallas_call(body, out_shape=_shape(4, dtype="float32"), compiler_params=plgpu.CompilerParams())
    with pytest.raises(Uncountable, match="atomic"):
        count(call, _shape(4, dtype="float32"))


def test_copies_that_a_tpu_kernel_makes_by_itself_are_refused():
    decode = functools.partial(kernel("tpu", "paged_decode"), scale=1.0)
    pool = _shape(9, 2, 16, 128)
    table = np.arange(1, 9, dtype=np.int32).reshape(2, 4)
    with pytest.raises(Uncountable, match="by itself"):
        count(lambda *args: decode(*args), _shape(2, 4, 128), pool, pool, table, np.array([50, 20], np.int32))


# ------------------------------------------------------------------ the walk


def test_loads_in_loops_and_branches_count_as_often_as_they_run():
    def body(x_ref: Any, n_ref: Any, out_ref: Any) -> None:
        program = pl.program_id(0)

        def add(i: Any, total: Any) -> Any:
            part = plgpu.load(x_ref.at[i * 8 + jnp.arange(8)], mask=jnp.arange(8) < i, other=0.0)
            return total + part.sum() + lax.fori_loop(0, 2, lambda j, rest: rest + x_ref[j], 0.0)

        total = lax.fori_loop(program, n_ref[program], add, 0.0)

        @pl.when(program == 1)
        def _():
            out_ref[0] = total

    call = pl.pallas_call(body, out_shape=_shape(1, dtype="float32"), grid=(3,), compiler_params=plgpu.CompilerParams())
    (launch,) = count(call, _shape(64, dtype="float32"), np.array([4, 3, 0], np.int32))
    # 0 + 1 + 2 + 3 lanes and 1 + 2 lanes; two elements in each of 4 and 2 rounds.
    assert _traffic(launch) == [(6 + 3 + 2 * 6, 0), (3, 0), (0, 1)]


def test_a_loop_over_an_array_is_refused():
    with pytest.raises(Uncountable, match="over an array"):
        count(lambda x: lax.scan(lambda total, row: (total + row, total), 0, x), np.arange(4))


def test_whole_numbers_are_those_of_jax():
    def function(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        table = jnp.where(x[:, None] > y[None], x[:, None] // y[None], lax.div(x[:, None], y[None]))
        rest = x % y, lax.rem(x, y), jnp.clip(x, -2, 3), jnp.sign(x) ^ y, jnp.cumsum(x), ~(x < y)
        return table, *rest, lax.broadcasted_iota(jnp.int32, (3, 2), 0), x.astype(jnp.int8).reshape(2, -1)

    x, y = np.array([-7, 7, -6, 0, 5, -1], np.int32), np.array([2, -2, -3, 5, 3, 7], np.int32)
    closed = jax.make_jaxpr(function)(x, y)
    found = Walk(lambda *_: None).closed(closed, [x, y])
    for ours, right in zip(found, function(jnp.asarray(x), jnp.asarray(y)), strict=True):
        np.testing.assert_array_equal(ours, right)
        assert ours.dtype == right.dtype
    assert Walk(lambda *_: None).closed(closed, [UNKNOWN, y])[0] is UNKNOWN
