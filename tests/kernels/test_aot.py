"""The tool that compiles for chips that are not there: what it reads and counts; with compilers, all kernels too."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from pallas_kernels.aot import __main__ as program
from pallas_kernels.aot import child, compile, llo, ptx, traffic
from pallas_kernels.bench.cases import ATTENTION, OPS, Case, model_case
from pallas_kernels.bench.records import format_table, provenance, writable, write_json
from pallas_kernels.chips import CHIPS

PTX = """
.version 8.8
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry paged_decode(
    .param .u64 .ptr .global .align 16 paged_decode_param_0
)
.reqntid 128, 1, 1
{
    @%p1 ld.global.v4.b32 { %r30, %r31, %r32, %r33 }, [ %rd56 + 0 ];
    ld.global.b32 %r1, [%rd1];
    ld.global.L1::evict_last.v2.b64 { %rd2, %rd3 }, [%rd4];
    mov.u32 %r5, 0; cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r5;
    cp.async.commit_group;
    cp.async.wait_group 2;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1, %r2, %r3, %r4 }, { %r5, %r6 };
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1, %r2, %r3, %r4 }, { %r5, %r6 };
    ret;
}
.visible .entry paged_decode_1(
)
.maxntid 128, 2, 1
{
    wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
    cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];
    cp.async.bulk.commit_group;
    tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, p;
    ret;
}
.visible .entry loop_select_fusion(
)
.reqntid 128, 1, 1
{
    ret;
}
"""

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode' for 'sm_80'
ptxas info    : Function properties for paged_decode
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 416 bytes cmem[0]
ptxas info    : Compile time = 71.350 ms
ptxas info    : Compiling entry function 'paged_decode_1' for 'sm_80'
ptxas info    : Function properties for paged_decode_1
    48 bytes stack frame, 40 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 16 bytes smem, 416 bytes cmem[0]
ptxas info    : Compiling entry function 'loop_select_fusion' for 'sm_80'
ptxas info    : Function properties for loop_select_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 0 barriers, 376 bytes cmem[0]
"""

TRITON_HLO = (
    '%pallas_call.4 = (f32[16]{0}) custom-call(%bitcast.8), custom_call_target="__gpu$xla.gpu.triton", '
    'backend_config={debug = false, grid_x = 64 : i32, name = "paged_decode", num_stages = 2 : i32}\n'
    "%loop_select_fusion = f32[4]{0} fusion(%pallas_call.4), kind=kLoop, calls=%f\n"
)

THUNKS = (
    "001: kCustomKernel [source       | next=002 (1)] paged_decode grid: [64, 8, 8] threads: [128, 1, 1]  "
    "shared_memory: 38912 bytes\n"
    "002: kCustomKernel [prev=001 (1) | sink        ] loop_select_fusion grid: [128, 1, 1] threads: [128, 1, 1]  "
    "shared_memory: 0 bytes\n"
)

LLO_ORIGINAL = """
$region0: #{paged_attention.1}
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'smem constant byte address']
  #allocation1 [shape = 'u32[72,128]{1,0:T(1,128)}', space=vmem, size = 0x9000, scoped, tag = 'internal scratch']
  #allocation2 [shape = 's32[1]{0}', space=sflag, size = 0x4, scoped, tag = 'scoped memory for paged_attention.1']
    #allocation11 [shape = 'u8[4096]{0}', space=vmem, size = 0x1000, scoped, tag = 'input window allocation']
"""

LLO_BUNDLES = """
 0 : { %s15 = smov 0 ;; %v10_v3 = vld [vmem:[%s1]] ;; %4394 = sst [smem:[#allocation100_spill]] %s3438_s19 }
 1 : { %4076 = vst [vmem:[#allocation8_spill] sm:$0xff] /*vst_source=*/%v2262_v8 ;; %v2_v3 = vadd.f32 %v10_v3, %v10_v3 }
 2 : { %s9 = sld [smem:[#allocation100_spill]] ;; %v4_v8 = vld [vmem:[#allocation8_spill] sm:$0xff] }
 3 : { %1887 = dma.hbm_to_vmem [thread:$0] (%p1948), %s377, 128, %s4, %s5 ;; %v7_v8 = vmatmul.mubr.bf16.vlgmr %v4_v8 }
 4 : { %5 = boundsCheck 14 [deref of %s377] for %1887 = dma.hbm_to_vmem [thread:$0] ;; %6 = dma.done.wait %s4, 128 }
 5 : { %8 = dma.vmem_to_hbm [thread:$0] %s3, 128, %s4, %s5 ;; %9 = dma.vmem_to_smem %s1, %s2 }
"""


def described(name: str, shared: int | None = 38912) -> ptx.GpuKernel:
    return ptx.describe(name, ptx.entries(PTX)[name], PTXAS, shared)


def test_ptx_is_taken_apart_by_entry():
    assert list(ptx.entries(PTX)) == ["paged_decode", "paged_decode_1", "loop_select_fusion"]
    assert "wgmma" not in ptx.entries(PTX)["paged_decode"]


def test_a_kernel_of_ampere():
    kernel = described("paged_decode")
    assert (kernel.registers, kernel.spills, kernel.shared_memory, kernel.threads) == (128, 0, 38912, 128)
    assert kernel.tensor_core == {"mma.sync": 2} and kernel.async_copies == {"cp.async": 1}
    assert kernel.wide_loads == 3  # v4.b32, v2.b64 and cp.async.cg


def test_a_kernel_of_hopper_that_spills():
    kernel = described("paged_decode_1", 1000)
    assert (kernel.registers, kernel.spills, kernel.shared_memory, kernel.threads) == (255, 64, 1016, 256)
    assert kernel.tensor_core == {"wgmma": 1, "tcgen05": 1} and kernel.async_copies == {"cp.async.bulk": 1}
    assert kernel.wide_loads == 0


def test_a_kernel_that_ptxas_did_not_report_is_an_error():
    with pytest.raises(ValueError, match="ptxas reported nothing of other"):
        ptx.describe("other", "", PTXAS, 0)


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "expected"),
    [
        (128, 38912, 128, 4 / 16),  # registers and shared memory allow 4 blocks of 4 warps each
        (32, 0, 128, 1.0),
        (16, 0, 32, 0.5),  # 32 blocks are the most
        (32, 160 * 1024, 256, 8 / 64),  # one block, for its shared memory
        (32, 170 * 1024, 256, 0.0),  # more than there is
    ],
)
def test_occupancy(registers, shared, threads, expected):
    kernel = ptx.GpuKernel("k", registers, 0, shared, threads, {}, {}, 0)
    assert kernel.occupancy(CHIPS["a100-40gb"]) == expected


def test_occupancy_is_unknown_without_shared_memory():
    assert described("paged_decode", None).occupancy(CHIPS["a100-40gb"]) is None


def test_only_pallas_kernels_of_a_dump_are_read(tmp_path, monkeypatch):
    (tmp_path / "module_0001.jit_f.1.ptx").write_text(PTX)
    (tmp_path / "module_0001.jit_f.2.ptx").write_text(".version 8.8\n")  # XLA's constants: no target, no kernel
    (tmp_path / "module_0001.jit_f.thunk_sequence.txt").write_text(THUNKS)
    monkeypatch.setattr(ptx, "assemble", lambda path, ptxas: PTXAS)
    kernels = ptx.read_kernels(tmp_path, TRITON_HLO, "ptxas")
    assert [kernel.name for kernel in kernels] == ["paged_decode", "paged_decode_1"]
    assert [kernel.shared_memory for kernel in kernels] == [38912, None]


def test_mosaic_gpu_brings_its_own_report(tmp_path, monkeypatch):
    (tmp_path / "entry_0.ptx").write_text(PTX)
    (tmp_path / "entry_0.ptxas").write_text(PTXAS)
    (tmp_path / "entry_0.mlir-passes.log").write_text("x\ngpu.launch dynamic_shared_memory_size %c92200_i32 {\n")
    monkeypatch.delattr(ptx, "assemble")
    kernels = {kernel.name: kernel for kernel in ptx.read_kernels(tmp_path, "", "ptxas")}
    assert kernels["paged_decode_1"].shared_memory == 92216 and kernels["paged_decode"].shared_memory == 92200


def test_a_kernel_of_a_tpu():
    kernel = llo.describe("paged_attention.1", LLO_ORIGINAL, LLO_BUNDLES)
    assert kernel == llo.TpuKernel(
        "paged_attention.1", registers=2, spills=1, scalar_spills=1, vmem=0xA000, matmuls=1, dmas=2
    )


def test_only_pallas_kernels_of_libtpus_dump_are_read(tmp_path):
    hlo = "%fusion.2 = f32[4]{0} fusion(%x), kind=kLoop\n"
    hlo += '%k.1 = (f32[4]) custom-call(%x), custom_call_target="tpu_custom_call"\n'
    for stamp, bundles in (("17", ""), ("18", LLO_BUNDLES)):  # compiled twice: the later counts
        (tmp_path / f"{stamp}-k.1-00-original.txt").write_text(LLO_ORIGINAL)
        (tmp_path / f"{stamp}-k.1-02-schedule-analysis_final_bundles.txt").write_text("vmatmul")
        (tmp_path / f"{stamp}-k.1-03-final_bundles.txt").write_text(bundles)
    (tmp_path / "18-fusion.2-03-final_bundles.txt").write_text(LLO_BUNDLES)
    assert [(kernel.name, kernel.matmuls) for kernel in llo.read_kernels(tmp_path, hlo)] == [("k.1", 1)]
    twice = hlo + hlo.replace("k.1", "k.2")  # the same kernel for another array
    assert [kernel.name for kernel in llo.read_kernels(tmp_path, twice)] == ["k.1"]
    with pytest.raises(ValueError, match=r"libtpu dumped nothing of other\.3"):
        llo.read_kernels(tmp_path, hlo.replace("k.1", "other.3"))


def small(op: str, **changes: Any) -> Case:
    fields: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "seqs": 3,
        "context": 20,
        "queries": 1,
        "block_size": 16,
    }
    return Case(op, **(fields | changes))


def test_fewest_bytes_of_decoding_are_whole_blocks_as_stored():
    blocks = 3 * 2 * 16 * 2 * 2 * 8 * 2  # seqs, blocks, tokens, K and V, heads, head_dim, bytes
    rest = 3 * 4 * (8 * 2 + 8 * 2 + 4) + 4 * 3 * (2 + 1)  # queries, results, log-sum-exp; tables and lengths
    assert small("paged_decode").fewest_bytes() == blocks + rest
    stored = small("paged_decode", stored_dim=128).fewest_bytes()
    assert stored == 16 * blocks + rest
    quantized = small("paged_decode", pool_dtype="int8").fewest_bytes()
    assert quantized == blocks // 2 + 3 * 2 * 16 * 2 * 2 * 4 + rest  # a byte a number, and the scales


def test_fewest_bytes_of_moving():
    assert small("copy_blocks", blocks=5).fewest_bytes() == 5 * (2 * 16 * 2 * 2 * 8 * 2 + 4)
    assert small("write_kv").fewest_bytes() == 3 * (2 * 2 * 2 * 8 * 2 + 4)


def test_operations_are_those_of_seen_tokens():
    assert small("paged_decode").flops() == 4 * 3 * 4 * 8 * 20
    assert small("paged_attention", queries=3).flops() == 4 * 3 * 4 * 8 * (18 + 19 + 20)
    assert small("write_kv").flops() == 0


def test_each_query_tile_reads_what_it_sees_again():
    case = small("paged_attention", queries=20)
    once = traffic.moved_bytes(case, 0, True, query_tokens=20)
    assert once == case.fewest_bytes()
    tiles = traffic.moved_bytes(case, 0, True, query_tokens=8)  # these see 8, 16 and 20 tokens: 1 + 1 + 2 blocks
    assert tiles - once == 3 * (1 + 1) * 16 * case.token_bytes


def test_temporaries_and_copied_pools_are_moved_twice():
    case = small("copy_blocks")
    in_place = traffic.moved_bytes(case, 100, True)
    assert in_place == case.fewest_bytes() + 200
    assert traffic.moved_bytes(case, 100, False) == in_place + 2 * traffic.pool_bytes(case)


def test_short_contexts_in_a_wide_program():
    case = small("paged_decode", context=4096)
    short = small("paged_decode", context=512).fewest_bytes()
    assert traffic.at_context(case, 512, 8000, skips_empty_splits=False) == (short + 16000) / short
    assert traffic.at_context(case, 512, 8000, skips_empty_splits=True) == (short + 2000) / short


@pytest.mark.parametrize(
    ("config", "tokens"),
    [({"query_tokens": 32}, 32), ({"consumers": 2, "stages": 4}, 64), ({"rows": 64}, 32), (None, 1)],
)
def test_tokens_of_a_query_tile(config, tokens):
    assert traffic.query_tokens(small("paged_attention", queries=2), config) == tokens


def test_roofline_is_the_longer_of_memory_and_arithmetic():
    chip, case = CHIPS["h100"], small("paged_decode")
    assert traffic.roofline_seconds(chip, case, 335 * 10**10) == 1.0
    prefill = model_case("llama3-8b", "flash_attention", "bfloat16", 128)
    assert traffic.roofline_seconds(chip, prefill, 1) == prefill.flops() / 989.5e12


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_arguments_fit_the_public_op(op, dtype):
    arrays, named = model_case("smollm2", op, "bfloat16" if op == "flash_attention" else dtype, 128).arguments()
    assert bool(named) == (dtype == "int8" and op in ("paged_decode", "paged_attention"))
    if op == "write_kv":
        assert [new.dtype for new in arrays[0]][:2] == [pool.dtype for pool in arrays[1]][:2]


def test_float8_on_ampere_is_refused_before_a_compiler_sees_it(monkeypatch):
    monkeypatch.delattr(compile, "_compile")
    row = compile.compile_row(CHIPS["a100-40gb"], "paged_decode", "smollm2", "float8_e4m3fn")
    assert row["verdict"].startswith("refused: float8_e4m3fn needs compute capability 8.9; sm_80 ends")


@pytest.mark.parametrize(("chip", "backend"), [("a100-40gb", "triton"), ("b200", "triton")])
def test_the_backend_is_what_auto_takes(chip, backend):
    case = model_case("llama3-8b", "paged_decode", "bfloat16", 128)
    assert compile.backend_for(CHIPS[chip], case) == (backend, None)
    blocks = model_case("llama3-8b", "gather_blocks", "bfloat16", 128)
    assert compile.backend_for(CHIPS[chip], blocks) == ("xla", None)


def stand_in(monkeypatch, code: str) -> None:
    """Puts a program of our own where the compiling process would be."""
    run = subprocess.run

    def instead(command, **options):
        return run([sys.executable, "-c", code, command[-1]], **options)

    monkeypatch.setattr(compile.subprocess, "run", instead)


def row_of(monkeypatch, code: str) -> dict:
    stand_in(monkeypatch, code)
    return compile.compile_row(CHIPS["v5e"], "gather_blocks", "smollm2", "bfloat16")


def test_a_compiler_that_ends_its_process_is_one_rows_verdict(monkeypatch):
    row = row_of(monkeypatch, "import os, sys; print('LLVM ERROR', file=sys.stderr, flush=True); os.abort()")
    assert row["verdict"] == "crashed: SIGABRT" and row["error"] == "LLVM ERROR\n"


def test_what_a_compiler_says_is_the_verdict(monkeypatch):
    answer = json.dumps({"verdict": "failed", "error": "\n  out of VMEM\nat line 3"})
    row = row_of(monkeypatch, f"import sys; open(sys.argv[1] + '/answer.json', 'w').write({answer!r})")
    assert row["verdict"] == "failed: out of VMEM" and row["error"].endswith("at line 3")


def test_a_compiler_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(compile, "TIMEOUT", 0.2)
    assert row_of(monkeypatch, "import time; time.sleep(60)")["verdict"] == "failed: no answer within 0.2 s"


def test_a_pool_that_is_not_aliased_shows(monkeypatch):
    case = model_case("smollm2", "scatter_blocks", "bfloat16", 64)
    whole = {"temporary_bytes": 0, "aliased_bytes": traffic.pool_bytes(case), "config": None}
    figures = compile.memory_figures(CHIPS["v5e"], case, whole, False)
    assert figures["in_place"] is True and figures["moved/fewest"] == 1.0
    half = compile.memory_figures(CHIPS["v5e"], case, whole | {"aliased_bytes": 1}, False)
    assert half["in_place"] is False and half["moved/fewest"] > 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chips", "h100,h300"], "'h300' is no chip; allowed: a100-40gb"),
        (["--op", "decode"], "'decode' is no op; allowed: paged_decode"),
        (["--shapes", ""], "'' is no shape; allowed: llama3-8b, smollm2"),
        (["--dtypes", "float64"], "'float64' is no dtype; allowed: float32"),
        (["--json", "/nowhere/rows.json"], "/nowhere/rows.json cannot be written: No such file or directory"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(capsys, monkeypatch, arguments, words):
    monkeypatch.delattr(program, "compile_all")
    with pytest.raises(SystemExit) as stop:
        program.main(arguments)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and words in message and message.count("\n") == 1


def test_without_compilers_one_line_says_what_installs_them(capsys, monkeypatch):
    monkeypatch.setattr(compile, "_installed", lambda package: False)
    monkeypatch.setattr(compile.shutil, "which", lambda name: None)
    assert program.main(["--chips", "h100,v5e"]) == 1
    message = capsys.readouterr().err
    assert message == (
        "python -m pallas_kernels.aot: JAX's CUDA plugin and ptxas and libtpu not installed; "
        "pip install 'pagedjax[aot]'\n"
    )


@pytest.mark.parametrize(
    ("verdict", "status"), [("ok", 0), ("refused: float8", 0), ("failed: x", 1), ("crashed: y", 1)]
)
def test_rows_are_printed_and_written(tmp_path, capsys, monkeypatch, verdict, status):
    row = dict.fromkeys(compile.COLUMNS) | {"chip": "v5e", "op": "write_kv", "verdict": verdict, "spills": 0}
    monkeypatch.setattr(program, "missing", lambda chips: [])
    monkeypatch.setattr(program, "compile_all", lambda *wanted: [row])
    assert program.main(["--json", str(tmp_path / "rows.json")]) == status
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["rows"] == [row] and written["provenance"]["versions"]["jax"]
    assert verdict in capsys.readouterr().out and [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_a_table_aligns_numbers_to_the_right():
    rows = [{"op": "a", "us": 1234.5, "in_place": True}, {"op": "long", "us": 0.5}]
    assert format_table(rows, ["op", "us", "in_place"]).splitlines() == [
        "op         us  in_place",
        "----  -------  --------",
        "a     1,234.5       yes",
        "long      0.5         -",
    ]


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    target = writable(str(tmp_path / "rows.json"))
    write_json(target, {"rows": []})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(target, {"rows": [float("nan")]})
    assert json.loads(target.read_text()) == {"rows": []} and list(tmp_path.iterdir()) == [target]
    with pytest.raises(ValueError, match="is a folder"):
        writable(str(tmp_path))


def test_provenance_has_versions_and_neither_date_nor_machine():
    said = provenance()
    assert set(said) == {"versions", "commit", "clean"} and said == provenance()
    assert {"python", "jax", "jaxlib"} <= set(said["versions"])


def test_every_gpu_can_be_described_to_xla():
    for chip in CHIPS.values():
        if chip.platform == "gpu":
            text = child.gpu_target(chip)
            assert (
                text.count("{") == text.count("}")
                and chip.device_kinds[0] in text
                and f"core_count: {chip.cores}" in text
            )


# What follows compiles: minutes for each chip.

OWN = {"a100-40gb": "triton", "h100": "mosaic_gpu", "h200": "mosaic_gpu", "b200": "triton"}
MATRIX = {"a100-40gb": "mma.sync", "h100": "wgmma", "h200": "wgmma", "b200": "mma.sync tcgen05"}
COPIES = {"triton": "cp.async:", "mosaic_gpu": "cp.async.bulk:", "tpu": "dma:"}


@pytest.mark.aot
@pytest.mark.parametrize("model", ["llama3-8b", "smollm2"])
@pytest.mark.parametrize("chip", ["a100-40gb", "b200", "h100", "h200", "v4", "v5e", "v5p", "v6e", "v7"])
def test_every_op_compiles(chip, model, tmp_path):
    target = tmp_path / "rows.json"
    command = [sys.executable, "-m", "pallas_kernels.aot", "--chips", chip, "--shapes", model, "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert target.exists(), done.stderr
    rows = json.loads(target.read_text())["rows"]
    assert [row["op"] for row in rows] == list(OPS)
    for row in rows:
        _check(row)


def _check(row: dict[str, Any]) -> None:
    """What every op must hold on every chip."""
    chip, op = row["chip"], row["op"]
    told = tuple(row[name] for name in compile.COLUMNS) + (row["error"],)
    assert row["verdict"] == "ok", told
    assert row["in_place"] in (True, None), told
    if op != "flash_attention":
        assert row["temp_mib"] * 2**20 < traffic.pool_bytes(Case(**row["case"])) / 2, told  # neither K nor V is copied
    if row["kernels"]:  # else XLA serves the op there
        assert row["on_chip_kib"] * 1024 <= CHIPS[chip].fast_memory_bytes, told
        # A TPU's vector registers spill to VMEM, on the chip: the table counts that.
        assert row["spills"] == 0 or chip not in OWN, told
    if op in ATTENTION:
        assert row["backend"] == OWN.get(chip, "tpu"), told
        assert any(name in row["tensor_core"] for name in MATRIX.get(chip, "mxu").split()), told
        # What XLA has put into VMEM beforehand, as it may with K and V of a small model, is not copied again.
        if op != "flash_attention" or chip in OWN:
            assert COPIES[row["backend"]] in row["async_copies"], told
    if op == "paged_decode":
        assert row["moved/fewest"] <= 1.1 and row["at_512"] <= 1.1, told
