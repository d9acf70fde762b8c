"""Which backend runs an op: chosen by platform and chip, or by name; `auto` falls back where a kernel does not fit."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

BACKENDS = ("auto", "reference", "xla", "triton", "mosaic_gpu", "tpu")
_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")
PALLAS = ("triton", "mosaic_gpu", "tpu")
Interpret = Any  # False; True; or a Pallas backend's own interpreter parameters, such as pltpu.InterpretParams()


def resolve_backend(
    backend: str = "auto",
    *,
    interpret: Interpret = False,
    platform: str | None = None,
    compute_capability: str | None = None,
) -> tuple[str, str]:
    """The backend that `backend` stands for, and why, as half a sentence.

    Args:
        backend: one of `BACKENDS`.
        interpret: a Pallas kernel is to be interpreted, which works anywhere; `auto` is `triton` then.
        platform: "cpu", "gpu" or "tpu"; by default JAX's own choice here.
        compute_capability: of the GPU, "8.0" for instance; by default that of the first one here.

    Raises:
        ValueError: an unknown backend, or one that this platform cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if not isinstance(interpret, bool) and not type(interpret).__module__.startswith("jax"):
        raise ValueError(
            f"interpret is {interpret!r}; it must be True, False, or parameters of the backend's interpreter, such as "
            "pltpu.InterpretParams()"
        )
    if platform not in (None, *_PLATFORMS):
        raise ValueError(f"platform is {platform!r}; it must be one of {', '.join(_PLATFORMS)}")
    if interpret:
        if backend not in ("auto", *PALLAS):
            raise ValueError(
                f"interpret is set with backend {backend!r}; only a Pallas backend is interpreted: {', '.join(PALLAS)}"
            )
        name = "triton" if backend == "auto" else backend
        if missing := _missing(name):
            raise ValueError(f"backend is {name!r}, but {missing}")
        return name, "interpret=True asks for a Pallas kernel" if backend == "auto" else "asked for by name"
    if backend in ("reference", "xla"):
        return backend, "asked for by name"
    platform = "gpu" if platform in ("cuda", "rocm") else platform or jax.default_backend()
    if backend != "auto":
        if obstacle := _obstacle(backend, platform, compute_capability):
            raise ValueError(
                f"backend is {backend!r}, but {obstacle}; use 'auto', 'xla' or 'reference', or interpret=True"
            )
        return backend, "asked for by name"
    obstacle = f"there is no Pallas kernel for the platform {platform}"
    for name in _CANDIDATES.get(platform, ()):
        obstacle = _obstacle(name, platform, compute_capability)
        if obstacle is None:
            return name, _REASONS[name]
    return "xla", obstacle


def choose(op: str, backend: str, interpret: Interpret, *arrays: Any) -> str:
    """The backend for an op on these arrays: `auto` falls back where a kernel does not take them, a named one refuses.

    Args:
        op: name of the public op.
        backend, interpret: as the op was given them.
        arrays: what decides, or their shapes (`jax.ShapeDtypeStruct`): of the attention ops q and the pool of K, of
            `write_kv` k and that pool, of `copy_blocks` all pools.

    Raises:
        ValueError: as `resolve_backend`, or a limit of the kernel, by name.
    """
    name, _ = resolve_backend(backend, interpret=interpret)
    if backend == "auto" and not interpret:
        platform = jax.default_backend()
        fitting = (
            candidate
            for candidate in _CANDIDATES.get(platform, ())
            if _obstacle(candidate, platform, None) is None and load(candidate).unsupported(op, *arrays) is None
        )
        return next(fitting, "xla")
    if name in PALLAS and (problem := load(name).unsupported(op, *arrays)):
        raise ValueError(problem)
    return name


def load(backend: str) -> ModuleType:
    """The package of a backend, imported when it is needed: a JAX that lacks one still has the others."""
    return importlib.import_module(f"pallas_kernels.{backend}")


def kernel(backend: str, op: str) -> Callable[..., Any]:
    """An op of a Pallas backend. Kernels count in 32 bits, whatever `jax_enable_x64` says."""
    function = getattr(load(backend), op)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with jax.enable_x64(False):
            return function(*args, **options)

    return call


_CANDIDATES = {"gpu": ("mosaic_gpu", "triton"), "tpu": ("tpu",)}  # the first that fits is taken
_REASONS = {
    "mosaic_gpu": "an NVIDIA GPU of compute capability 9.0",
    "triton": "an NVIDIA GPU of compute capability 8.0 or more",
    "tpu": "a TPU",
}


def _obstacle(name: str, platform: str, compute_capability: str | None) -> str | None:
    """Why a Pallas backend cannot run on this platform; None if it can."""
    if platform != ("tpu" if name == "tpu" else "gpu"):
        return f"there is no {name} kernel for the platform {platform}"
    if name != "tpu":
        capability = compute_capability or str(getattr(jax.devices()[0], "compute_capability", None))
        if capability == "None":
            return (
                f"compute_capability is not given, and there is no GPU here to ask for it: the {name} kernels need it"
            )
        try:
            version = float(capability)
        except ValueError:  # an AMD GPU: "gfx90a"
            return f"the {name} kernels are for NVIDIA GPUs, and this one is {capability}"
        if name == "triton" and version < 8.0:
            return f"compute capability {capability} is below 8.0, which the triton kernels need"
        if name == "mosaic_gpu" and not 9.0 <= version < 10.0:
            return f"compute capability {capability} is not 9.x: the mosaic_gpu kernels need Hopper's wgmma"
    return _missing(name)


def _missing(name: str) -> str | None:
    """What this JAX lacks for a Pallas backend."""
    try:
        load(name)
    except ImportError as missing:
        return str(missing)
    return None
