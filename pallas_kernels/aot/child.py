"""One compilation, in a process of its own: a compiler that ends its process ends one row of the table, not the tool.

Run as `python -m pallas_kernels.aot.child FOLDER`, with the request in FOLDER/request.json; leaves FOLDER/answer.json,
and the compiled module in FOLDER/module.txt.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import blocks
from pallas_kernels.bench.cases import Case
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.dispatch import load

# Of all NVIDIA GPUs since Ampere; the text is XLA's `GpuTargetConfigProto`.
_GPU_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  core_count: {cores} fpus_per_core: {lanes} clock_rate_ghz: 1.7 pcie_bandwidth: 34359738368 device_address_bits: 64
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: {cache}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_vendor: "NVIDIA Corporation" name: "{device}" platform_version: "Compute Capability {major}.{minor}{suffix}"
  driver_version: "12.8.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{device}"
"""


def gpu_target(chip: Chip) -> str:
    """What XLA wants to know of a GPU to compile for it."""
    assert chip.compute_capability is not None
    major, minor = chip.compute_capability
    return _GPU_TARGET.format(
        shared=chip.shared_memory_bytes,
        optin=chip.fast_memory_bytes,
        cores=chip.cores,
        lanes=chip.fp32_lanes,
        bandwidth=int(chip.bandwidth),
        memory=chip.memory_bytes,
        cache=chip.cache_bytes,
        major=major,
        minor=minor,
        features="ACCELERATED_FEATURES" if major >= 9 else "NONE",
        suffix="a" if major >= 9 else "",
        device=chip.device_kinds[0],
    )


def device(chip: Chip) -> Any:
    """A device of this kind that is not there, which can be compiled for."""
    if chip.platform == "gpu":
        options = {"target_config": gpu_target(chip), "topology": "1x1x1"}
        return topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices[0]
    assert chip.topology is not None
    return topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]


def compile_case(chip: Chip, backend: str, case: Case) -> tuple[jax.stages.Compiled, Any]:
    """The op on one backend, compiled for a chip, and the `Config` it chose; what it updates in place is donated."""
    arrays, named = case.arguments()
    function = getattr(blocks if backend == "xla" else load(backend), case.op)
    chosen = _watch_default_config(sys.modules[function.__module__])
    mesh = Mesh(np.array([device(chip)]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    arrays, named = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), (arrays, named)
    )
    jitted = jax.jit(
        functools.partial(function, **case.options()), donate_argnums=() if case.updated is None else case.updated
    )
    with jax.set_mesh(mesh):  # tells Pallas which chip it lowers for
        traced = jitted.trace(*arrays, **named)
        compiled = traced.lower(lowering_platforms=("tpu" if chip.platform == "tpu" else "cuda",)).compile()
    return compiled, chosen[-1] if chosen else None


def _watch_default_config(module: ModuleType) -> list[Any]:
    """What a kernel's module says when it asks itself for its default configuration, from now on."""
    chosen: list[Any] = []

    def watched(default_config: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any, **options: Any) -> Any:
            chosen.append(default_config(*arguments, **options))
            return chosen[-1]

        return ask

    for name in ("default_config", "_default_config"):
        if hasattr(module, name):
            setattr(module, name, watched(getattr(module, name)))
    return chosen


def main(folder: Path) -> None:
    """Answers the request in `folder`."""
    request = json.loads((folder / "request.json").read_text())
    answer: dict[str, Any] = {"verdict": "ok"}
    try:
        compiled, config = compile_case(CHIPS[request["chip"]], request["backend"], Case(**request["case"]))
        memory = compiled.memory_analysis()
        assert memory is not None
        answer["temporary_bytes"] = memory.temp_size_in_bytes
        answer["aliased_bytes"] = memory.alias_size_in_bytes
        answer["config"] = None if config is None else dataclasses.asdict(config)
        (folder / "module.txt").write_text(compiled.as_text() or "")
    except Exception as error:  # whatever the compiler says is the row's verdict
        answer = {"verdict": "failed", "error": str(error) or type(error).__name__}
    (folder / "answer.json").write_text(json.dumps(answer))


def request_text(chip: Chip, backend: str, case: Case) -> str:
    """What `main` reads."""
    return json.dumps({"chip": chip.name, "backend": backend, "case": dataclasses.asdict(case)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
