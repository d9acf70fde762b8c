"""The bench of the kernels: what it runs, what it divides by what, and its command line. No time is asserted."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import standard_attention
from pallas_kernels.bench import __main__ as program
from pallas_kernels.bench import ceilings, problems, shared_prefix
from pallas_kernels.bench.cases import OPS, Case

COMMON: dict[str, Any] = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "seqs": 2,
    "context": 40,
    "queries": 1,
    "blocks": 3,
}


def tiny(op: str, **changes: Any) -> Case:
    return Case(op, **(COMMON | changes))


@pytest.mark.parametrize(("op", "queries"), [("paged_decode", 1), ("paged_attention", 8)])
def test_paged_and_contiguous_attention_see_the_same_tokens(op, queries):
    calls = problems.calls(tiny(op, queries=queries, pool_dtype="float32"))
    ours, flash = calls["ours"](), calls["flash"]()
    assert set(calls) == {"ours", "flash"}  # neither JAX's paged attention nor cuDNN is there for a CPU
    np.testing.assert_allclose(ours, np.reshape(flash, ours.shape), rtol=2e-5, atol=2e-6)


def test_whole_prompts():
    case = tiny("flash_attention", queries=40, pool_dtype="float32")
    call = problems.calls(case)["ours"]
    q, k, v = call.args
    np.testing.assert_allclose(call(), standard_attention(q, k, v, causal=True), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("flash_attention", "paged_decode")])
def test_every_op_runs_on_a_quantized_pool(op):
    call = problems.calls(tiny(op, pool_dtype="int8"))["ours"]
    first = jax.tree.map(jnp.shape, call())
    assert jax.tree.map(jnp.shape, jax.block_until_ready(call())) == first  # what is updated in place is handed on


def test_copies_have_one_destination_each_and_no_source_among_them():
    pools = problems.random_pools(tiny("copy_blocks"))
    src, dst = problems.internal_arguments(tiny("copy_blocks"))[0][1:]
    assert len({*src.tolist(), *dst.tolist()}) == 6 and 0 not in src and 0 not in dst
    assert int(max(src.max(), dst.max())) < len(pools[0])


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("gather_blocks", "scatter_blocks")])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_internal_arguments_are_as_the_case_says(op, dtype):
    case = tiny(op, pool_dtype="bfloat16" if op == "flash_attention" else dtype, stored_dim=128)
    arrays = jax.tree.map(lambda x: (x.shape, x.dtype), problems.internal_arguments(case))
    assert arrays == jax.tree.map(lambda x: (x.shape, x.dtype), case.arguments())


def test_rows_of_the_pool_are_padded_with_zeros():
    k, _ = problems.random_pools(tiny("paged_decode", stored_dim=128))
    assert k.shape[-1] == 128 and bool((k[..., 16:] == 0).all()) and bool((k[..., :16] != 0).any())


def test_the_grid_of_a_cpu():
    cases = list(program.cases("cpu", ["paged_decode"], "float32", {}))
    assert {(case.seqs, case.context) for _, case in cases} == {(b, c) for b in (8, 32) for c in (128, 512, 1024, 2048)}
    assert {model for model, _ in cases} == {"llama3-8b", "smollm2"} and len(cases) == 16
    assert {(case.heads, case.kv_heads, case.head_dim) for _, case in cases} == {(9, 3, 64), (32, 8, 128)}


def test_the_grid_can_be_narrowed():
    axes = dict(map(program.grid_axis, ["batch=4", "context=64,128", "model=smollm2", "block_size=8,32"]))
    cases = [case for _, case in program.cases("tpu", ["paged_attention", "flash_attention"], "bfloat16", axes)]
    assert [(c.op, c.context, c.queries, c.block_size) for c in cases[:3]] == [
        ("paged_attention", 64, 64, 8),
        ("paged_attention", 64, 64, 32),
        ("paged_attention", 128, 128, 8),
    ]
    assert [c.context for c in cases if c.op == "flash_attention"] == [64, 128]  # it has no blocks
    assert {c.stored_dim for c in cases} == {128}


def fixed_times(monkeypatch, seconds):
    def alternate(calls, rounds):
        return {name: list(seconds[name]) for name in calls}

    monkeypatch.setattr(program, "alternate", alternate)


def test_a_row_divides_what_it_says(monkeypatch):
    fixed_times(monkeypatch, {"ours": [1e-3, 2e-3, 9e-3], "flash": [1e-3, 1e-3, 3e-3]})
    case = tiny("paged_decode", pool_dtype="float32")
    limits = {"copy_bytes_per_second": case.fewest_bytes() * 1000.0, "matmul_flops_per_second": case.flops() * 250.0}
    row = program.measure("tiny", case, limits, 3)
    assert row["us"] == 2000 and row["flash_us"] == 1000
    assert row["vs_flash"] == 2.0  # of the rounds' 1, 2 and 3
    assert row["gb_s"] == case.fewest_bytes() / 2e-3 / 1e9 and row["of_copy"] == 0.5 and row["of_matmul"] == 2.0
    assert row["jax_us"] is None and row["backend"] == "xla"


def test_a_rival_that_fails_is_named_and_left_out(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(problems, "calls", lambda case: {"ours": lambda: jnp.zeros(1), "cudnn": broken})
    fixed_times(monkeypatch, {"ours": [1.0]})
    row = program.measure("tiny", tiny("paged_decode"), {"copy_bytes_per_second": 1, "matmul_flops_per_second": 1}, 1)
    assert row["us"] == 1e6 and row["cudnn_us"] is None
    assert capsys.readouterr().err == "paged_decode cudnn: no such kernel\n"


def test_the_command_prints_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 32)
    target = tmp_path / "bench.json"
    grid = ["--grid", "batch=2", "context=40", "model=smollm2"]
    assert program.main([*grid, "--op", "paged_decode,write_kv", "--rounds", "2", "--json", str(target)]) == 0
    written = json.loads(target.read_text())
    assert [row["op"] for row in written["rows"]] == ["paged_decode", "write_kv"]
    assert written["device"] == "cpu" and set(written["ceilings"]) == {
        "copy_bytes_per_second",
        "matmul_flops_per_second",
    }
    assert written["provenance"]["versions"]["jax"] == jax.__version__
    assert written["rows"][0]["vs_flash"] > 0 and written["rows"][1]["vs_flash"] is None
    table = capsys.readouterr().out
    assert "vs_flash" in table and "cudnn" not in table


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "decode"], "'decode' is no op; allowed: paged_decode"),
        (["--grid", "batch=0"], "'0' is no batch; allowed: integers >= 1"),
        (["--grid", "batch"], "'batch' is no axis of the grid; allowed: NAME=VALUE"),
        (["--grid", "heads=8"], "'heads=8' is no axis of the grid; allowed: NAME=VALUE,... of model, batch"),
        (["--grid", "model=gpt"], "'gpt' is no model; allowed: llama3-8b, smollm2"),
        (["--grid", "block_size=12"], "12 is no block_size; allowed: powers of two"),
        (["--rounds", "0"], "--rounds: 0 is less than 1"),
        (["--json", "/nowhere/rows.json"], "/nowhere/rows.json cannot be written"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        program.main(arguments)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and words in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "decode"}, "op is 'decode'; it must be one of paged_decode"),
        ({"pool_dtype": "float64"}, "pool_dtype is 'float64'; it must be one of float32"),
        ({"queries": 41}, "queries is 41; it must be 1 to 40, the context"),
    ],
)
def test_a_case_checks_itself(change, words):
    with pytest.raises(ValueError, match=words):
        Case(**(COMMON | {"op": "paged_decode"} | change))


def test_a_shared_prefix_attended_to_once_gives_the_same():
    row = shared_prefix.measure("smollm2", batch=3, prefix=80, rounds=1)
    assert tuple(row) == shared_prefix.COLUMNS and row["saves"] > 0  # it compares both ways itself


def test_the_shared_prefix_bench_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit) as caught:
        shared_prefix.main(["--rounds", "0"])
    assert caught.value.code == 2 and "--rounds" in capsys.readouterr().err
