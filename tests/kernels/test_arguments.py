"""Wrong arguments are named, with what was given and what is allowed; backends are chosen for a stated reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_problem import make_problem

from pallas_kernels import paged_attention, paged_decode, resolve_backend, write_kv
from pallas_kernels.dispatch import choose

NAMES = ("q", "k_pool", "v_pool", "block_tables", "seq_lens", "query_start_loc")


def _arguments(**changes: Any) -> dict[str, Any]:
    problem = make_problem([5, 20], [1, 4])  # q [5, 9, 64], pools [9, 3, 16, 64], tables [2, 2]
    return {**dict(zip(NAMES, problem.arguments(), strict=True)), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((5, 64))}, r"q is \(5, 64\); it must have 3 axes, \[tokens or seqs, heads, head_dim\]"),
        ({"q": jnp.zeros((5, 9, 64), jnp.int32)}, r"q is int32; it must be float32 or bfloat16 or float16"),
        ({"q": jnp.zeros((5, 9, 32))}, r"q has head_dim 32, but k_pool has 64; they must be equal, or"),
        ({"q": jnp.zeros((5, 8, 64))}, r"q has 8 heads; they must be a multiple of the 3 KV heads"),
        ({"k_pool": jnp.zeros((9, 3, 64))}, r"k_pool is \(9, 3, 64\); it must have 4 axes"),
        ({"k_pool": jnp.zeros((9, 3, 16, 64), jnp.int32)}, r"k_pool is int32; it must be float32 or"),
        (
            {"k_pool": jnp.zeros((9, 3, 12, 64)), "v_pool": jnp.zeros((9, 3, 12, 64))},
            r"k_pool has block_size 12 \(its axis 2\); it must be a power of two",
        ),
        (
            {"k_pool": jnp.zeros((0, 3, 16, 64)), "v_pool": jnp.zeros((0, 3, 16, 64))},
            r"k_pool is \(0, 3, 16, 64\); no axis may be empty",
        ),
        (
            {"v_pool": jnp.zeros((8, 3, 16, 64))},
            r"v_pool is float32 \(8, 3, 16, 64\); it must be as k_pool, float32 \(9, 3, 16, 64\)",
        ),
        ({"block_tables": jnp.zeros(2, jnp.int32)}, r"block_tables is \(2,\); it must have 2 axes"),
        ({"block_tables": jnp.zeros((2, 2))}, r"block_tables is float32; it must be int32"),
        ({"block_tables": jnp.zeros((2, 0), jnp.int32)}, r"block_tables is \(2, 0\); it must hold a row and a column"),
        ({"seq_lens": jnp.zeros(3, jnp.int32)}, r"seq_lens is \(3,\); it must be \(2,\): one length for each row"),
        ({"seq_lens": jnp.zeros(2, jnp.uint32)}, r"seq_lens is uint32; it must be int32"),
        (
            {"query_start_loc": jnp.zeros(2, jnp.int32)},
            r"query_start_loc is \(2,\); it must be \(3,\): one more than there are rows of block_tables",
        ),
        ({"query_start_loc": np.zeros(3, np.int64)}, r"query_start_loc is int64; it must be int32"),
        ({"scale": float("nan")}, r"scale is nan; it must be a finite number"),
        ({"sliding_window": 0}, r"sliding_window is 0; it must be an integer >= 1"),
        ({"sliding_window": 2.5}, r"sliding_window is 2.5; it must be an integer >= 1"),
        ({"sliding_window": 2**31}, r"sliding_window is 2147483648; it must be .* below 2\*\*31"),
        ({"sliding_window": True}, r"sliding_window is True; it must be an integer >= 1"),
        ({"scale": 1e39}, r"scale is 1e\+39; it must be a finite number, in float32 too"),
        ({"soft_cap": 1e39}, r"soft_cap is 1e\+39; it must be a finite number above 0, in float32 too"),
        ({"q": None}, r"q is None; it must be an array"),
        ({"seq_lens": [5, 20]}, r"seq_lens is \[5, 20\]; it must be an array"),
        ({"k_scale": 1.0}, r"k_scale is 1.0; it must be an array"),
        ({"validate": "no"}, r"validate is 'no'; it must be True or False"),
        ({"return_lse": 2}, r"return_lse is 2; it must be True or False"),
        ({"interpret": "no"}, r"interpret is 'no'; it must be True, False, or parameters of the backend's interpreter"),
        ({"interpret": {}}, r"interpret is \{\}; it must be True, False, or"),
        ({"soft_cap": 0.0}, r"soft_cap is 0.0; it must be a finite number above 0"),
        ({"soft_cap": -1.0}, r"soft_cap is -1.0; it must be a finite number above 0"),
        ({"backend": "cuda"}, r"backend is 'cuda'; it must be one of auto, reference, xla, triton, mosaic_gpu, tpu"),
    ],
)
def test_wrong_arguments_of_paged_attention(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(**_arguments(**changes))


def test_numpy_scalars_are_numbers() -> None:
    options: dict[str, Any] = {"scale": 0.5, "sliding_window": 4, "soft_cap": 3.0}
    same = {"scale": np.float32(0.5), "sliding_window": np.int64(4), "soft_cap": np.float64(3)}
    out, other = (paged_attention(**_arguments(), **x, backend="reference") for x in (options, same))
    np.testing.assert_array_equal(out, other)


def test_numpy_arrays_are_arrays() -> None:
    new, pool = np.ones((4, 3, 64), np.float32), np.zeros((9, 3, 16, 64), np.float32)
    k_pool, _ = write_kv(new, new, pool, pool, np.arange(16, 20, dtype=np.int32))
    assert float(k_pool.sum()) == new.sum()


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_kernels_count_in_32_bits(backend: str) -> None:
    """A user may have enabled 64 bits for all of JAX."""
    arguments = _arguments(backend=backend, interpret=backend == "triton")
    expected = np.asarray(paged_attention(**arguments))
    with jax.enable_x64(True):
        out = paged_attention(**arguments)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, expected)


def test_paged_decode_takes_one_query_a_sequence() -> None:
    arguments = _arguments()
    del arguments["query_start_loc"]
    with pytest.raises(ValueError, match=r"q has 5 rows; paged_decode takes one for each row of block_tables"):
        paged_decode(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": jnp.zeros((4, 64))}, r"k is \(4, 64\); it must have 3 axes, \[tokens, kv_heads, head_dim\]"),
        ({"k": jnp.zeros((4, 2, 64))}, r"k is \(4, 2, 64\); it must be \(4, 3, 64\): heads as in k_pool"),
        ({"v": jnp.zeros((5, 3, 64))}, r"v is \(5, 3, 64\); it must be \(4, 3, 64\)"),
        ({"v": jnp.zeros((4, 3, 64), jnp.int32)}, r"v is int32; it must be float32 or"),
        ({"slot_mapping": jnp.zeros(3, jnp.int32)}, r"slot_mapping is \(3,\); it must be \(4,\): one slot for each"),
        ({"slot_mapping": jnp.zeros(4)}, r"slot_mapping is float32; it must be int32"),
        ({"k_pool": jnp.zeros((9, 3, 16, 64), jnp.int32)}, r"k_pool is int32; it must be float32 or"),
    ],
)
def test_wrong_arguments_of_write_kv(changes: dict[str, Any], message: str) -> None:
    new, pool = jnp.zeros((4, 3, 64)), jnp.zeros((9, 3, 16, 64))
    arguments = {"k": new, "v": new, "k_pool": pool, "v_pool": pool, "slot_mapping": jnp.zeros(4, jnp.int32)}
    with pytest.raises(ValueError, match=message):
        write_kv(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("backend", "chip", "expected"),
    [
        ("auto", {"platform": "cpu"}, ("xla", "no Pallas kernel for the platform cpu")),
        ("auto", {"platform": "tpu"}, ("tpu", "a TPU")),
        ("auto", {"platform": "gpu", "compute_capability": "9.0"}, ("mosaic_gpu", "compute capability 9.0")),
        ("mosaic_gpu", {"platform": "gpu", "compute_capability": "9.0"}, ("mosaic_gpu", "asked for by name")),
        ("auto", {"platform": "gpu", "compute_capability": "8.0"}, ("triton", "compute capability 8.0 or more")),
        ("auto", {"platform": "gpu", "compute_capability": "10.0"}, ("triton", "compute capability 8.0 or more")),
        ("auto", {"platform": "gpu", "compute_capability": "7.5"}, ("xla", "compute capability 7.5 is below 8.0")),
        ("auto", {"platform": "gpu", "compute_capability": "gfx90a"}, ("xla", "this one is gfx90a")),
        ("triton", {"platform": "gpu", "compute_capability": "9.0"}, ("triton", "asked for by name")),
        ("reference", {"platform": "gpu"}, ("reference", "asked for by name")),
        ("auto", {"interpret": True, "platform": "cpu"}, ("triton", "interpret=True asks for a Pallas kernel")),
    ],
)
def test_backend_and_reason(backend: str, chip: dict[str, Any], expected: tuple[str, str]) -> None:
    name, reason = resolve_backend(backend, **chip)
    assert name == expected[0]
    assert expected[1] in reason


@pytest.mark.parametrize(
    ("backend", "chip", "message"),
    [
        ("tpu", {"platform": "gpu", "compute_capability": "9.0"}, "there is no tpu kernel for the platform gpu"),
        ("mosaic_gpu", {"platform": "gpu", "compute_capability": "8.0"}, "compute capability 8.0 is not 9.x"),
        ("mosaic_gpu", {"platform": "gpu", "compute_capability": "10.0"}, "compute capability 10.0 is not 9.x"),
        ("triton", {"platform": "gpu", "compute_capability": "7.5"}, "compute capability 7.5 is below 8.0"),
        ("triton", {"platform": "tpu"}, "there is no triton kernel for the platform tpu"),
    ],
)
def test_a_chip_that_is_too_old_or_another_is_refused(backend: str, chip: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"backend is '{backend}', but {message}"):
        resolve_backend(backend, **chip)


def test_a_chip_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="platform is 'quantum'; it must be one of cpu, gpu"):
        resolve_backend(platform="quantum")
    name, reason = resolve_backend(platform="gpu")
    assert name == "xla" and "compute_capability is not given, and there is no GPU here to ask" in reason


def test_auto_takes_the_next_backend_where_the_first_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, Mosaic GPU takes no float32, Triton does; neither takes a head of 512."""
    monkeypatch.setattr("pallas_kernels.dispatch.jax.default_backend", lambda: "gpu")
    monkeypatch.setattr("pallas_kernels.dispatch.jax.devices", lambda: [SimpleNamespace(compute_capability="9.0")])

    def chosen(dtype: str, head_dim: int) -> str:
        q, k_pool = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((8, 4, head_dim), (9, 2, 16, head_dim)))
        return choose("paged_attention", "auto", False, q, k_pool)

    assert [chosen("bfloat16", 128), chosen("float32", 128), chosen("bfloat16", 512)] == ["mosaic_gpu", "triton", "xla"]


def test_auto_falls_back_where_jax_has_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError("JAX 9 has no Triton backend in Pallas")

    monkeypatch.setattr("pallas_kernels.dispatch.load", missing)
    chip: dict[str, Any] = {"platform": "gpu", "compute_capability": "8.0"}
    assert resolve_backend("auto", **chip) == ("xla", "JAX 9 has no Triton backend in Pallas")
    with pytest.raises(ValueError, match="backend is 'triton', but JAX 9 has no Triton backend in Pallas"):
        resolve_backend("triton", **chip)


def test_a_backend_that_cannot_run_here_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend is 'triton', but there is no triton kernel for the platform cpu"):
        paged_attention(**_arguments(backend="triton"))
    with pytest.raises(
        ValueError, match=r"interpret is set with backend .xla.; only a Pallas backend is interpreted: triton,"
    ):
        paged_attention(**_arguments(backend="xla", interpret=True))


def test_the_triton_kernel_names_its_limits() -> None:
    problem = make_problem([5], [1], heads=(1, 1), head_dim=257)
    with pytest.raises(ValueError, match="head_dim is 257; the triton kernels take at most 256"):
        paged_attention(*problem.arguments(), backend="triton", interpret=True)
