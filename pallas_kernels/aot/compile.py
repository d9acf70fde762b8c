"""Compiles one op for one chip that is not there, and puts what the compiler says into one row."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pallas_kernels.aot import child, llo, ptx, traffic
from pallas_kernels.bench import problems
from pallas_kernels.bench.cases import Case, model_case
from pallas_kernels.bench.records import first_line
from pallas_kernels.chips import Chip
from pallas_kernels.dispatch import PALLAS, load, resolve_backend

TIMEOUT = 900  # seconds for one compilation
COLUMNS = (
    "chip",
    "backend",
    "op",
    "shape",
    "dtype",
    "verdict",
    "registers",
    "spills",
    "on_chip_kib",
    "occupancy",
    "tensor_core",
    "async_copies",
    "loads_128",
    "temp_mib",
    "in_place",
    "moved_mib",
    "moved/fewest",
    "at_512",
    "roofline_us",
)


def missing(chips: list[Chip]) -> list[str]:
    """What is not installed, of what compiling for these chips takes."""
    lacking = []
    if any(chip.platform == "gpu" for chip in chips):
        if not any(_installed(f"jax-cuda{version}-plugin") for version in (12, 13)):
            lacking.append("JAX's CUDA plugin")
        if ptxas() is None:
            lacking.append("ptxas")
    if any(chip.platform == "tpu" for chip in chips) and not _installed("libtpu"):
        lacking.append("libtpu")
    return lacking


def ptxas() -> str | None:
    """NVIDIA's assembler: out of its wheel, or on the path."""
    for package in ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc"):
        for file in (importlib.metadata.files(package) or ()) if _installed(package) else ():
            if file.name == "ptxas":
                return str(file.locate())
    return shutil.which("ptxas")


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def compile_row(chip: Chip, op: str, model: str, pool_dtype: str) -> dict[str, Any]:
    """The row of one op, chip and model: `COLUMNS`, and behind them each kernel's own figures and the error in full."""
    head_dim = model_case(model, op, pool_dtype, 0).head_dim
    stored_dim = -(-head_dim // 128) * 128 if chip.platform == "tpu" else head_dim
    case = model_case(model, op, pool_dtype, stored_dim)
    backend, reason = backend_for(chip, case)
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "chip": chip.name,
        "backend": backend,
        "op": op,
        "shape": f"{model} {case.seqs}x{case.context}" if case.options() else model,
        "dtype": pool_dtype,
        "case": dataclasses.asdict(case),
        "config": None,
        "kernels": [],
        "error": None,
    }
    if refusal := reason or refused(chip, case):
        return row | {"verdict": f"refused: {refusal}"}
    with tempfile.TemporaryDirectory(prefix="pallas_kernels_aot_") as folder:
        return row | _compile(chip, backend, case, Path(folder))


def backend_for(chip: Chip, case: Case) -> tuple[str, str | None]:
    """Whose kernel runs this op on a chip, as `dispatch.choose` has it; and where there is none, why not.

    `gather_blocks` and `scatter_blocks` are XLA's everywhere.
    """
    if case.op in ("gather_blocks", "scatter_blocks"):
        return "xla", None
    capability = chip.compute_capability and ".".join(map(str, chip.compute_capability))
    operands = problems.operands(case, case.arguments()[0])
    reason = None
    for name in reversed(PALLAS):  # the special ones before Triton
        try:
            resolve_backend(name, platform=chip.platform, compute_capability=capability)
        except ValueError:
            continue
        reason = load(name).unsupported(case.op, *operands)
        if reason is None:
            return name, None
    return "xla", reason or resolve_backend(platform=chip.platform, compute_capability=capability)[1]


def refused(chip: Chip, case: Case) -> str | None:
    """What must not even be tried."""
    capability = chip.compute_capability
    if case.pool_dtype == "float8_e4m3fn" and capability is not None and capability < (8, 9):
        return f"float8_e4m3fn needs compute capability 8.9; {chip.architecture} ends the compiler's process"
    return None


def environment(folder: Path) -> dict[str, str]:
    """Of the process that compiles: no accelerator is looked for, and all compilers leave dumps in `folder`."""
    root = str(Path(__file__).resolve().parents[2])
    own = {
        "JAX_PLATFORMS": "cpu",  # or topologies are "not implemented"
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes out of a cache dumps nothing
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx",
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={llo.DUMPED_PASSES}",
        "TPU_SKIP_MDS_QUERY": "1",  # no search for the TPU machine's metadata on the network
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LLVM_DISABLE_SYMBOLIZATION": "1",  # of a crashed compiler: minutes, and nobody reads its stack
    }
    return os.environ | own


def _compile(chip: Chip, backend: str, case: Case, folder: Path) -> dict[str, Any]:
    """The columns that follow from compiling."""
    dump = folder / "dump"
    dump.mkdir()
    (folder / "request.json").write_text(child.request_text(chip, backend, case))
    command = [sys.executable, "-m", "pallas_kernels.aot.child", str(folder)]
    try:
        done = subprocess.run(command, env=environment(dump), capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"verdict": f"failed: no answer within {TIMEOUT} s"}
    if not (folder / "answer.json").exists():
        return {"verdict": f"crashed: {death(done.returncode)}", "error": done.stderr[-4000:]}
    answer = json.loads((folder / "answer.json").read_text())
    if answer["verdict"] != "ok":
        return {"verdict": f"failed: {first_line(answer['error'])[:100]}", "error": answer["error"]}
    hlo = (folder / "module.txt").read_text()
    try:
        figures = (
            _gpu(chip, ptx.read_kernels(dump, hlo, ptxas() or "ptxas"))
            if chip.platform == "gpu"
            else _tpu(llo.read_kernels(dump, hlo))
        )
    except ValueError as error:
        return {"verdict": f"failed: {error}"}
    merges = any("merge" in kernel["name"] for kernel in figures.get("kernels", ()))
    return {"verdict": "ok", "config": answer["config"]} | figures | memory_figures(chip, case, answer, merges)


def death(status: int) -> str:
    """What a process ended with."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def memory_figures(chip: Chip, case: Case, answer: dict[str, Any], merges: bool) -> dict[str, Any]:
    """The columns about main memory; `merges`: a kernel of ours merges the splits of the KV axis."""
    temporary = answer["temporary_bytes"]
    in_place = None if case.updated is None else answer["aliased_bytes"] >= traffic.pool_bytes(case)
    tile = traffic.query_tokens(case, answer["config"])
    moved = traffic.moved_bytes(case, temporary, in_place is not False, tile)
    return {
        "temp_mib": temporary / 2**20,
        "in_place": in_place,
        "moved_mib": moved / 2**20,
        "moved/fewest": moved / case.fewest_bytes(),
        "at_512": traffic.at_context(case, 512, temporary, merges) if case.op == "paged_decode" else None,
        "roofline_us": traffic.roofline_seconds(chip, case, moved) * 1e6,
    }


def _gpu(chip: Chip, kernels: list[ptx.GpuKernel]) -> dict[str, Any]:
    """Of several kernels, the worst of each figure and the sum of their instructions."""
    if not kernels:
        return {}
    shared = [kernel.shared_memory for kernel in kernels]
    occupancies = [kernel.occupancy(chip) for kernel in kernels]
    known = [x for x in occupancies if x is not None]
    return {
        "registers": max(kernel.registers for kernel in kernels),
        "spills": sum(kernel.spills for kernel in kernels),
        "on_chip_kib": None if None in shared else max(x for x in shared if x is not None) / 1024,
        "occupancy": min(known) if len(known) == len(kernels) else None,
        "tensor_core": _text([kernel.tensor_core for kernel in kernels]),
        "async_copies": _text([kernel.async_copies for kernel in kernels]),
        "loads_128": sum(kernel.wide_loads for kernel in kernels),
        "kernels": [dataclasses.asdict(kernel) for kernel in kernels],
    }


def _tpu(kernels: list[llo.TpuKernel]) -> dict[str, Any]:
    if not kernels:
        return {}
    return {
        "registers": max(kernel.registers for kernel in kernels),
        "spills": sum(kernel.spills for kernel in kernels),
        "on_chip_kib": max(kernel.vmem for kernel in kernels) / 1024,
        "tensor_core": _text([{"mxu": kernel.matmuls} for kernel in kernels]),
        "async_copies": _text([{"dma": kernel.dmas} for kernel in kernels]),
        "kernels": [dataclasses.asdict(kernel) for kernel in kernels],
    }


def _text(counts: list[dict[str, int]]) -> str | None:
    """Instructions of all kernels by name; None if there are none."""
    names = dict.fromkeys(name for count in counts for name in count)
    totals = {name: sum(count.get(name, 0) for count in counts) for name in names}
    return " ".join(f"{name}:{total}" for name, total in totals.items() if total) or None
