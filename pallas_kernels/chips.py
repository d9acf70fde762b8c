"""The accelerators that the kernels are built for: what JAX calls them, and what their makers say they can do.

Figures are of one device as JAX counts them. They bound a kernel's tiling and turn bytes and operations into the least
time they could take; none was measured here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Attributes:
        name: as the command lines take it.
        device_kinds: what `jax.Device.device_kind` may say for it.
        platform: "gpu" or "tpu".
        cores: streaming multiprocessors of a GPU, TensorCores of a TPU device.
        memory_bytes: of the device's main memory.
        bandwidth: of that memory, in bytes a second.
        peak_flops: floating-point (int8: integer) operations a second by dtype of the operands, without sparsity;
            float32 in full precision, not TF32. A dtype that the matrix units do not take is absent.
        fast_memory_bytes: what one kernel instance may hold on the chip: opt-in shared memory of a thread block on a
            GPU, VMEM of a core on a TPU.
        compute_capability: of a GPU, (9, 0) for instance; None for a TPU.
        shared_memory_bytes: shared memory of one multiprocessor, for all its thread blocks together; 0 on a TPU.
        cache_bytes: of a GPU's L2 cache; 0 on a TPU.
        fp32_lanes: float32 units of one multiprocessor; 0 on a TPU.
        topology: what libtpu calls the smallest slice of this TPU, to compile for; None for a GPU.
    """

    name: str
    device_kinds: tuple[str, ...]
    platform: str
    cores: int
    memory_bytes: int
    bandwidth: float
    peak_flops: Mapping[str, float]
    fast_memory_bytes: int
    compute_capability: tuple[int, int] | None = None
    shared_memory_bytes: int = 0
    cache_bytes: int = 0
    fp32_lanes: int = 0
    topology: str | None = None

    @property
    def architecture(self) -> str:
        """What ptxas calls a GPU, with the instructions of that chip alone from Hopper on; the name of a TPU."""
        if self.compute_capability is None:
            return self.name
        major, minor = self.compute_capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _flops(float32: float, bfloat16: float, int8: float | None = None, float8: float | None = None) -> dict[str, float]:
    rates = {"float32": float32, "bfloat16": bfloat16, "float16": bfloat16, "int8": int8, "float8_e4m3fn": float8}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


def _tpu_flops(bfloat16: float, int8: float | None = None, float8: float | None = None) -> dict[str, float]:
    # The matrix unit takes bfloat16: a float32 product in full precision is six of those, and float16 is widened.
    rates = _flops(bfloat16 / 6, bfloat16, int8, float8)
    rates["float16"] = rates["float32"]
    return rates


_GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10

# A100: NVIDIA A100 Tensor Core GPU data sheet (June 2021) and the Ampere tuning guide (shared memory, L2).
# H100, H200: their data sheets (SXM; figures with sparsity halved) and the Hopper tuning guide.
# B200: NVIDIA HGX B200 data sheet (an eighth of a system; figures with sparsity halved) and the Blackwell tuning guide.
# TPUs: cloud.google.com/tpu/docs, page by page (v4, v5e, v5p, v6e, tpu7x); cores and VMEM as JAX's own
# `pltpu.get_tpu_info` has them. A v4 or v5p device is two TensorCores that share a memory; a v7 chip is two devices, so
# half of a chip's figures stand here.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="a100-40gb",
            device_kinds=("NVIDIA A100-SXM4-40GB",),
            platform="gpu",
            cores=108,
            memory_bytes=40 * _GIB,
            bandwidth=1.555e12,
            peak_flops=_flops(19.5e12, 312e12, 624e12),
            fast_memory_bytes=163 * _KIB,
            compute_capability=(8, 0),
            shared_memory_bytes=164 * _KIB,
            cache_bytes=40 * _MIB,
            fp32_lanes=64,
        ),
        Chip(
            name="a100-80gb",
            device_kinds=("NVIDIA A100-SXM4-80GB",),
            platform="gpu",
            cores=108,
            memory_bytes=80 * _GIB,
            bandwidth=2.039e12,
            peak_flops=_flops(19.5e12, 312e12, 624e12),
            fast_memory_bytes=163 * _KIB,
            compute_capability=(8, 0),
            shared_memory_bytes=164 * _KIB,
            cache_bytes=40 * _MIB,
            fp32_lanes=64,
        ),
        Chip(
            name="h100",
            device_kinds=("NVIDIA H100 80GB HBM3",),
            platform="gpu",
            cores=132,
            memory_bytes=80 * _GIB,
            bandwidth=3.35e12,
            peak_flops=_flops(67e12, 989.5e12, 1979e12, 1979e12),
            fast_memory_bytes=227 * _KIB,
            compute_capability=(9, 0),
            shared_memory_bytes=228 * _KIB,
            cache_bytes=50 * _MIB,
            fp32_lanes=128,
        ),
        Chip(
            name="h200",
            device_kinds=("NVIDIA H200",),
            platform="gpu",
            cores=132,
            memory_bytes=141 * _GIB,
            bandwidth=4.8e12,
            peak_flops=_flops(67e12, 989.5e12, 1979e12, 1979e12),
            fast_memory_bytes=227 * _KIB,
            compute_capability=(9, 0),
            shared_memory_bytes=228 * _KIB,
            cache_bytes=50 * _MIB,
            fp32_lanes=128,
        ),
        Chip(
            name="b200",
            device_kinds=("NVIDIA B200",),
            platform="gpu",
            cores=148,
            memory_bytes=180 * _GIB,
            bandwidth=8.0e12,
            peak_flops=_flops(75e12, 2250e12, 4500e12, 4500e12),
            fast_memory_bytes=227 * _KIB,
            compute_capability=(10, 0),
            shared_memory_bytes=228 * _KIB,
            cache_bytes=126 * _MIB,
            fp32_lanes=128,
        ),
        Chip(
            name="v4",
            device_kinds=("TPU v4",),
            platform="tpu",
            cores=2,
            memory_bytes=32 * _GIB,
            bandwidth=1.2e12,
            peak_flops=_tpu_flops(275e12),
            fast_memory_bytes=16 * _MIB,
            topology="v4:2x2x1",
        ),
        Chip(
            name="v5e",
            device_kinds=("TPU v5 lite", "TPU v5e"),
            platform="tpu",
            cores=1,
            memory_bytes=16 * _GIB,
            bandwidth=0.819e12,
            peak_flops=_tpu_flops(197e12, 394e12),
            fast_memory_bytes=128 * _MIB,
            topology="v5e:2x2",
        ),
        Chip(
            name="v5p",
            device_kinds=("TPU v5", "TPU v5p"),
            platform="tpu",
            cores=2,
            memory_bytes=95 * _GIB,
            bandwidth=2.765e12,
            peak_flops=_tpu_flops(459e12, 918e12),
            fast_memory_bytes=64 * _MIB,
            topology="v5p:2x2x1",
        ),
        Chip(
            name="v6e",
            device_kinds=("TPU v6 lite", "TPU v6e"),
            platform="tpu",
            cores=1,
            memory_bytes=32 * _GIB,
            bandwidth=1.64e12,
            peak_flops=_tpu_flops(918e12, 1836e12, 918e12),
            fast_memory_bytes=128 * _MIB,
            topology="v6e:2x2",
        ),
        Chip(
            name="v7",
            device_kinds=("TPU7x",),
            platform="tpu",
            cores=1,
            memory_bytes=96 * _GIB,
            bandwidth=3.69e12,
            peak_flops=_tpu_flops(1153.5e12, None, 2307e12),
            fast_memory_bytes=64 * _MIB,
            topology="tpu7x:2x2x1",
        ),
    )
}


def chip_named(name: str) -> Chip:
    """The chip of that name.

    Raises:
        ValueError: no such chip, with the names there are.
    """
    if name not in CHIPS:
        raise ValueError(f"chip is {name!r}; it must be one of {', '.join(CHIPS)}")
    return CHIPS[name]


def chip_here() -> Chip | None:
    """The chip that JAX runs on here; None for a CPU, and for an accelerator that is not in the table."""
    import jax  # here: the figures need none

    kind = jax.devices()[0].device_kind
    return next((chip for chip in CHIPS.values() if kind in chip.device_kinds), None)
