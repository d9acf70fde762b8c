"""The elements that a kernel moves to and from main memory, counted from its traced program.

Not from its tiling, as `traffic` does: the program itself is walked, load by load. Caches count for nothing, and
neither does what XLA does around the kernel (padding, transposing).

How a kernel reaches main memory depends on the backend:

- `tpu`: through blocks that the grid's pipeline brings. A block is read, or written back, whenever its index map's
  value changes from one grid step to the next.
- `triton`: by loads and stores of single elements. A masked lane is not read; lanes that read the same element count
  as often as they are.
- `mosaic_gpu`: by copies of tiles to and from shared memory. What lies outside of the array is not read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.aot.partial import UNKNOWN, Memory, Uncountable, Walk, known

__all__ = ["Launch", "Operand", "Uncountable", "count"]


@dataclasses.dataclass
class Operand:
    """One array of a kernel.

    Attributes:
        shape: of the array.
        itemsize: bytes of one element.
        read: elements read, as often as they are.
        written: elements written.
    """

    shape: tuple[int, ...]
    itemsize: int
    read: int = 0
    written: int = 0


@dataclasses.dataclass(frozen=True)
class Launch:
    """What one launch of a kernel moves.

    Attributes:
        name: of the kernel.
        grid: programs along each axis.
        operands: inputs, and behind them outputs.
    """

    name: str
    grid: tuple[int, ...]
    operands: tuple[Operand, ...]

    @property
    def bytes(self) -> int:
        """Read and written."""
        return sum((operand.read + operand.written) * operand.itemsize for operand in self.operands)


def count(function: Callable[..., Any], *args: Any) -> list[Launch]:
    """The traffic of all kernels that a function launches.

    Args:
        function: traced, not run.
        args: arrays, whose numbers the kernels' loops and masks may depend on, or `jax.ShapeDtypeStruct`.

    Raises:
        Uncountable: a kernel does what is not understood here, or what it loads depends on floating-point numbers.
    """
    closed = jax.make_jaxpr(function)(*args)
    launches: list[Launch] = []
    values = [UNKNOWN if isinstance(arg, jax.ShapeDtypeStruct) else np.asarray(arg) for arg in jax.tree.leaves(args)]

    def launch(eqn: Any, values: list[Any]) -> list[Any]:
        launches.append(_launch(eqn, values))
        return [UNKNOWN] * len(eqn.outvars)

    Walk(_told, launch=launch).closed(closed, values)
    return launches


def _told(memory: Memory, elements: int, written: bool) -> None:
    operand: Operand = memory.label
    if written:
        operand.written += elements
    else:
        operand.read += elements


def _launch(eqn: Any, values: list[Any]) -> Launch:
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    operands = tuple(Operand(tuple(aval.shape), aval.dtype.itemsize) for aval in avals)
    contents = [*values, *([UNKNOWN] * len(eqn.outvars))]
    if eqn.primitive.name == "pallas_call":
        return _pallas_call(eqn, operands, contents)
    if eqn.primitive.name == "mpmd_map" and len(eqn.params["meshes"]) == 1:
        return _threads(eqn, operands, contents)
    raise Uncountable(f"a kernel launched by {eqn.primitive.name}")


def _memory(operand: Operand, content: Any) -> Memory:
    return Memory(operand.shape, True, None if content is UNKNOWN else np.asarray(content), operand)


def _pallas_call(eqn: Any, operands: tuple[Operand, ...], contents: list[Any]) -> Launch:
    mapping = eqn.params["grid_mapping"]
    if eqn.params["input_output_aliases"]:
        raise Uncountable("an output that aliases an input")
    if isinstance(eqn.params["compiler_params"], pltpu.CompilerParams):
        _pipeline(mapping, operands, contents)
    else:
        _programs(eqn.params["jaxpr"], mapping, operands, contents)
    return Launch(eqn.params["name"], tuple(mapping.grid), operands)


def _programs(jaxpr: Any, mapping: Any, operands: tuple[Operand, ...], contents: list[Any]) -> None:
    """Triton: each program has the whole arrays."""
    for operand, block in zip(operands, mapping.block_mappings, strict=True):
        if _sizes(block) != operand.shape:
            raise Uncountable("a block of an array")
    memories = [_memory(*pair) for pair in zip(operands, contents, strict=True)]
    for place in np.ndindex(*mapping.grid):
        Walk(_told, dict(enumerate(place))).run(jaxpr, [], memories)


def _pipeline(mapping: Any, operands: tuple[Operand, ...], contents: list[Any]) -> None:
    """TPU: the pipeline brings a block, or writes it back, when another one was there before."""
    num_scalars = mapping.num_index_operands
    scalars = [
        Memory(operand.shape, value=known(content, "a block's index"))
        for operand, content in zip(operands[:num_scalars], contents[:num_scalars], strict=True)
    ]
    for operand in operands[:num_scalars]:
        operand.read += math.prod(operand.shape)
    for number, (operand, block) in enumerate(zip(operands[num_scalars:], mapping.block_mappings, strict=True)):
        if str(block.block_aval.memory_space) == "any":
            raise Uncountable("an array that the kernel copies from by itself")
        sizes, before, moved = _sizes(block), None, 0
        for place in np.ndindex(*mapping.grid):
            found = Walk(_told).closed(block.index_map_jaxpr, [*map(np.int32, place), *scalars])
            index = tuple(int(known(at, "a block's index")) for at in found)
            if index != before:
                parts = zip(index, sizes, operand.shape, strict=True)
                moved += math.prod(min(size, whole - at * size) for at, size, whole in parts)
            before = index
        if number < mapping.num_inputs:
            operand.read += moved
        else:
            operand.written += moved


def _sizes(block: Any) -> tuple[int, ...]:
    sizes = tuple(getattr(size, "block_size", size) for size in block.block_shape)
    if not all(isinstance(size, int) for size in sizes):
        raise Uncountable(f"a block of the shape {block.block_shape}")
    return sizes


def _threads(eqn: Any, operands: tuple[Operand, ...], contents: list[Any]) -> Launch:
    """Mosaic GPU: some warpgroups for each program."""
    (mesh,), (jaxpr,) = eqn.params["meshes"], eqn.params["jaxprs"]
    if math.prod(mesh.cluster) != 1:
        raise Uncountable("a cluster of programs")
    names = (*mesh.grid_names, mesh.thread_name)
    memories = [_memory(*pair) for pair in zip(operands, contents, strict=True)]
    for place in np.ndindex(*mesh.grid, mesh.num_threads or 1):
        Walk(_told, dict(zip(names, place, strict=True))).run(jaxpr, [], memories)
    return Launch(eqn.params["name"], tuple(mesh.grid), operands)
