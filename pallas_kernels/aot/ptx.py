"""What NVIDIA's assembler and XLA's dumps say of compiled GPU kernels."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

from pallas_kernels.chips import Chip

# What one multiprocessor of compute capability 8.0, 9.0 or 10.0 holds at a time (CUDA programming guide, table of
# technical specifications per compute capability).
REGISTERS_PER_CORE = 65536
WARPS_PER_CORE = 64
BLOCKS_PER_CORE = 32
RESERVED_SHARED_MEMORY = 1024  # of each thread block, the system's own
REGISTER_UNIT = 256  # registers are handed out to a warp in such pieces

_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_FUNCTION = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STATIC = re.compile(r"(\d+) bytes smem")
_THREADS = re.compile(r"\.(?:req|max)ntid (\d+)(?:, (\d+))?(?:, (\d+))?")
_LAUNCH = re.compile(r"\bkCustomKernel\b.*\] (\w+) grid: .* threads: .* shared_memory: (\d+) bytes")
_TRITON_NAME = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton".*?\bname = "(\w+)"')
_MOSAIC_SHARED = re.compile(r"dynamic_shared_memory_size %c(\d+)_i32")

# Instructions that feed the tensor cores; that copy without holding a register; that load 16 bytes or more a thread.
_MMA = {
    "mma.sync": re.compile(r"\bmma\.sync\b"),
    "wgmma": re.compile(r"\bwgmma\.mma_async\b"),
    "tcgen05": re.compile(r"\btcgen05\.mma\b"),
}
_COPIES = {
    "cp.async": re.compile(r"\bcp\.async\.c[ag]\b"),
    "cp.async.bulk": re.compile(r"\bcp\.async\.bulk\.(?:tensor|shared)\b"),
}
_WIDE = re.compile(r"\bld\.global\b\S*\.(?:v4\.[bsuf]32|v2\.[bsuf]64|v8\.[bsuf]32|v4\.[bsuf]64|b128)\b")
_WIDE_COPY = re.compile(r"\bcp\.async\.cg\b")  # always 16 bytes


@dataclasses.dataclass(frozen=True)
class GpuKernel:
    """One compiled kernel.

    Attributes:
        name: of its entry.
        registers: a thread's.
        spills: bytes a thread stores to, and loads from, memory for want of registers.
        shared_memory: bytes a thread block takes, static and dynamic; None where no dump tells.
        threads: of a thread block; None where no dump tells.
        tensor_core: how often each kind of matrix instruction stands in the code.
        async_copies: likewise each kind of asynchronous copy.
        wide_loads: loads and copies from memory of 16 bytes or more at once.
    """

    name: str
    registers: int
    spills: int
    shared_memory: int | None
    threads: int | None
    tensor_core: dict[str, int]
    async_copies: dict[str, int]
    wide_loads: int

    def occupancy(self, chip: Chip) -> float | None:
        """The part of a multiprocessor's warps that may be there at once; None where shared memory is not known."""
        if self.shared_memory is None or self.threads is None:
            return None
        warps = -(-self.threads // 32)
        warp_registers = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        blocks = min(
            BLOCKS_PER_CORE,
            WARPS_PER_CORE // warps,
            REGISTERS_PER_CORE // (warp_registers * warps),
            chip.shared_memory_bytes // (self.shared_memory + RESERVED_SHARED_MEMORY),
        )
        return blocks * warps / WARPS_PER_CORE


def read_kernels(dump: Path, hlo: str, ptxas: str) -> list[GpuKernel]:
    """The Pallas kernels among what a compilation left in `dump`; XLA's own fusions are passed over.

    Args:
        dump: where XLA and Mosaic GPU were told to dump to.
        hlo: the compiled module, as text.
        ptxas: the assembler, to be run on what was dumped.
    """
    launches: dict[str, int] = {}
    for path in dump.glob("*.thunk_sequence.txt"):
        launches |= {name: int(shared) for name, shared in _LAUNCH.findall(path.read_text())}
    triton_names = set(_TRITON_NAME.findall(hlo))
    kernels = []
    for path in sorted(dump.glob("*.ptx")):
        bodies = entries(path.read_text())
        if path.name.startswith("module_"):
            # Where two kernels of a module have one name, XLA numbers them.
            ours = {name for name in bodies if triton_names & {name, re.sub(r"_\d+$", "", name)}}
            shared = {name: launches[name] for name in ours if name in launches}
        else:
            ours = set(bodies)
            dynamic = _mosaic_shared(path.with_suffix(".mlir-passes.log"))
            shared = {} if dynamic is None else dict.fromkeys(ours, dynamic)
        # Mosaic GPU dumps the report of its own assembler, which may be newer than the one installed.
        own = path.with_suffix(".ptxas")
        report = own.read_text() if own.exists() else assemble(path, ptxas) if ours else ""
        kernels += [describe(name, bodies[name], report, shared.get(name)) for name in sorted(ours)]
    return kernels


def assemble(path: Path, ptxas: str) -> str:
    """What ptxas reports of a PTX file, for the chip that the file names.

    Raises:
        ValueError: ptxas refuses the file.
    """
    target = re.search(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
    assert target is not None, path
    command = [ptxas, "-v", f"-arch={target[1]}", str(path), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"ptxas: {done.stderr.strip().splitlines()[0] if done.stderr.strip() else done.returncode}")
    return done.stderr


def entries(text: str) -> dict[str, str]:
    """The text of each kernel of a PTX file, by name."""
    _, *parts = _ENTRY.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def describe(name: str, body: str, report: str, dynamic_shared: int | None) -> GpuKernel:
    """A kernel from its PTX and from what ptxas reported of the file it stands in.

    Raises:
        ValueError: the report says nothing of this kernel.
    """
    parts = dict(zip(*[iter(_FUNCTION.split(report)[1:])] * 2, strict=True))
    spills, used = _SPILLS.search(parts.get(name, "")), _USED.search(parts.get(name, ""))
    if spills is None or used is None:
        raise ValueError(f"ptxas reported nothing of {name}")
    static = _STATIC.search(parts[name])
    threads = _THREADS.search(body)
    return GpuKernel(
        name=name,
        registers=int(used[1]),
        spills=sum(map(int, spills.groups())),
        shared_memory=None if dynamic_shared is None else dynamic_shared + (int(static[1]) if static else 0),
        threads=threads and int(threads[1]) * int(threads[2] or 1) * int(threads[3] or 1),
        tensor_core=_count(_MMA, body),
        async_copies=_count(_COPIES, body),
        wide_loads=len(_WIDE.findall(body)) + len(_WIDE_COPY.findall(body)),
    )


def _count(patterns: dict[str, re.Pattern[str]], body: str) -> dict[str, int]:
    counts = {name: len(pattern.findall(body)) for name, pattern in patterns.items()}
    return {name: count for name, count in counts.items() if count}


def _mosaic_shared(log: Path) -> int | None:
    """The dynamic shared memory of a Mosaic GPU kernel, out of the first pass in its log (of tens of megabytes)."""
    if not log.exists():
        return None
    with log.open() as lines:
        for line in lines:
            if match := _MOSAIC_SHARED.search(line):
                return int(match[1])
    return None
