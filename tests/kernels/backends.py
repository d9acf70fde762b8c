"""Every backend as the tests drive it: what it takes, and how it runs on a machine without an accelerator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from paged_problem import MIXED, SMALL, STEPS, PagedProblem

import pallas_kernels

_MOSAIC_GPU_INTERPRETER: Any = getattr(plgpu, "InterpretGPUParams", None)  # JAX 0.11 or newer


@dataclasses.dataclass(frozen=True)
class Backend:
    """One backend.

    Attributes:
        name: as `backend=` takes it.
        interpret: how its kernels run here.
        dtypes: of queries and pools, the first one for tests that need just one.
        smallest_block: the least block size of its kernels, in tokens.
        stored_multiple: what the width of a stored row must be a multiple of.
        obstacle: why its kernels cannot be interpreted with this JAX, if they cannot.
        mixed: arguments of a problem with a bit of everything, as large as its interpreter can bear.
        quantized_block: a block size, in tokens, that its kernels take with int8 and float8 pools.
    """

    name: str
    interpret: Any = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    smallest_block: int = 1
    stored_multiple: int = 1
    quantized_block: int = 32
    mixed: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MIXED, hash=False)
    obstacle: str | None = None

    @property
    def dtype(self) -> str:
        """Of tests that need just one."""
        return self.dtypes[0]

    @property
    def chosen(self) -> dict[str, Any]:
        """The arguments of an op that choose this backend."""
        return {"backend": self.name, "interpret": self.interpret}

    def run(self, op: str, *arrays: Any, **options: Any) -> Any:
        """An op of `pallas_kernels`, by name, and its results: nothing else may be dispatched while an interpreter
        computes. Options that are arrays count as arrays. What was compiled once is used again at the same shapes."""
        static = {name: value for name, value in options.items() if not isinstance(value, jax.Array)}
        traced = {name: value for name, value in options.items() if name not in static}
        return jax.block_until_ready(_jitted(self.name, op, tuple(static.items()))(*arrays, **traced))

    def stored_dim(self, head_dim: int) -> int:
        """How wide a row of the pool is."""
        return -(-head_dim // self.stored_multiple) * self.stored_multiple

    def arguments(self, problem: PagedProblem, dtype: str | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """The arguments of `paged_attention`, in this backend's own dtype unless one is given."""
        return problem.arguments(dtype or self.dtype, stored_dim=self.stored_dim(problem.head_dim), **kwargs)

    def attention(
        self,
        problem: PagedProblem,
        dtype: str | None = None,
        rest: float = 0.0,
        max_blocks: int | None = None,
        **options: Any,
    ) -> np.ndarray:
        """`paged_attention` of the problem; `rest` is in all slots that are no sequence's."""
        arguments = self.arguments(problem, dtype, rest=rest, max_blocks=max_blocks)
        return np.asarray(self.attention_and_lse(*arguments, **options)[0])

    def attention_and_lse(self, *arguments: Any, **options: Any) -> Any:
        """`paged_attention` and the log-sum-exp, which most tests leave: so they share one program."""
        return self.run("paged_attention", *arguments, return_lse=True, **options)

    def decode(self, problem: PagedProblem, dtype: str | None = None, **options: Any) -> np.ndarray:
        """`paged_decode` of the problem, whose sequences have one query token each."""
        q, *arrays, _ = self.arguments(problem, dtype)
        return np.asarray(self.run("paged_decode", q, *arrays, return_lse=True, **options)[0])


RACE = "RACE DETECTED"  # what Pallas' interpreters print

# Of interpreted kernels and the reference: large programs that run a few times.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference"),
        Backend("xla"),
        Backend("triton", interpret=True),
        Backend(
            "mosaic_gpu",
            interpret=_MOSAIC_GPU_INTERPRETER and _MOSAIC_GPU_INTERPRETER(detect_races=True),
            dtypes=("bfloat16", "float16"),
            smallest_block=8,
            mixed=SMALL,
            obstacle=None if _MOSAIC_GPU_INTERPRETER else "JAX below 0.11 cannot interpret Mosaic GPU kernels",
        ),
        Backend(
            "tpu",
            interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
            dtypes=("float32", "bfloat16"),
            smallest_block=8,
            stored_multiple=128,
            quantized_block=128,
            mixed=STEPS,
        ),
    )
}


@functools.cache
def _jitted(backend: str, op: str, options: tuple[tuple[str, Any], ...]) -> Any:
    chosen = BACKENDS[backend].chosen
    call = functools.partial(getattr(pallas_kernels, op), **dict(options), **chosen)
    return jax.jit(call, compiler_options=None if backend == "xla" else QUICK_TO_COMPILE)
