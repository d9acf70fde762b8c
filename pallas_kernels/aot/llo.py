"""What libtpu's dumps say of compiled TPU kernels: LLO, its last form before machine code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

# Only these of the seventy passes are dumped.
DUMPED_PASSES = "(original|final_bundles)$"

_PALLAS = re.compile(r"%(\S+) = [^\n]*? custom-call\([^\n]*?custom_call_target=\"tpu_custom_call\"")
_VMEM = re.compile(r"^\s*#allocation\d+ \[.*space=vmem, size = 0x([0-9a-f]+)", re.MULTILINE)
_REGISTER = re.compile(r"%v\d+_v(\d+)")
_SPILL = re.compile(r"\bvst\S* \[vmem:\[#allocation\d+_spill\]")
_SCALAR_SPILL = re.compile(r"\bsst\S* \[smem:\[#allocation\d+_spill\]")
_MATMUL = re.compile(r"\bvmatmul\b")
_DMA = re.compile(r"(?<!for )%\w+ = dma\.(?:hbm_to_\w+|\w+_to_hbm|general)\b")


@dataclasses.dataclass(frozen=True)
class TpuKernel:
    """One compiled kernel.

    Attributes:
        name: of the operation in the compiled module.
        registers: different vector registers that it uses, of 64.
        spills: vector registers stored to VMEM for want of registers, counted in the code.
        scalar_spills: scalars stored to SMEM, which costs little.
        vmem: bytes of VMEM that it reserves: windows (twice, where they are double-buffered), scratch and the
            compiler's own.
        matmuls: matrix-unit instructions in the code.
        dmas: copies from or to HBM started in the code.
    """

    name: str
    registers: int
    spills: int
    scalar_spills: int
    vmem: int
    matmuls: int
    dmas: int


def read_kernels(dump: Path, hlo: str) -> list[TpuKernel]:
    """The Pallas kernels among what libtpu left in `dump`; XLA's own fusions are passed over.

    Kernels that are alike, such as that of K and that of V, are compiled, dumped and listed once.

    Raises:
        ValueError: a kernel of the module is not among the dumps.
    """
    kernels: dict[str, TpuKernel] = {}
    names = sorted(set(_PALLAS.findall(hlo)))
    for name in names:
        original, bundles = (_last_dump(dump, name, label) for label in ("original", "final_bundles"))
        if original is not None and bundles is not None:
            kernels[name] = describe(name, original.read_text(), bundles.read_text())
    dumped = {_stem(name) for name in kernels}
    for name in names:
        if _stem(name) not in dumped:
            raise ValueError(f"libtpu dumped nothing of {name}")
    return list(kernels.values())


def _stem(name: str) -> str:
    """A kernel's name without the number that tells it from others of that name."""
    return re.sub(r"\.\d+$", "", name)


def _last_dump(dump: Path, name: str, label: str) -> Path | None:
    """One pass of one kernel; of one that was compiled twice, as it came out at last: names begin with the time."""
    wanted = re.compile(rf"\d+-{re.escape(name)}-\d+-{label}\.txt")
    return max((path for path in dump.iterdir() if wanted.fullmatch(path.name)), default=None)


def describe(name: str, original: str, bundles: str) -> TpuKernel:
    """A kernel from its LLO before and after all passes."""
    return TpuKernel(
        name=name,
        registers=len(set(_REGISTER.findall(bundles))),
        spills=len(_SPILL.findall(bundles)),
        scalar_spills=len(_SCALAR_SPILL.findall(bundles)),
        vmem=sum(int(size, 16) for size in _VMEM.findall(original)),
        matmuls=len(_MATMUL.findall(bundles)),
        dmas=len(_DMA.findall(bundles)),
    )
