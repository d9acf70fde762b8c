"""Runs a traced program in part: whole numbers are computed, all others stay unknown, and who touches memory is told.

What a kernel loads depends on its loop bounds, masks and indices, which are whole numbers made of program ids, lengths
and tables, and never on what it computes from K and V. So its jaxpr is walked in NumPy, program by program.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


class _Unknown:
    """Of a number that is not computed."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """An array that a kernel refers to.

    Attributes:
        shape: of the whole.
        main: whether it is in the device's main memory, whose traffic counts.
        value: what it holds, if that is known.
        label: who it is, to whoever is told.
    """

    shape: tuple[int, ...]
    main: bool = False
    value: np.ndarray | None = None
    label: Any = None


Told = Callable[[Memory, int, bool], None]
"""Called with an array in main memory, how many of its elements are accessed, and whether they are written."""


class Uncountable(NotImplementedError):
    """The program does something that is not understood here, or that depends on unknown numbers."""


@dataclasses.dataclass(frozen=True)
class Walk:
    """One program on its way through a jaxpr.

    Attributes:
        told: of every access to main memory.
        axes: the program's place, by number or by name of the grid's axis.
        launch: called with an equation that launches a kernel and its operands; None inside of kernels.
    """

    told: Told
    axes: Mapping[int | str, int] = dataclasses.field(default_factory=dict)
    launch: Callable[[Any, list[Any]], list[Any]] | None = None

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The outputs of a jaxpr: arrays of whole numbers, `Memory`, or `UNKNOWN`."""
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            values = [atom.val if hasattr(atom, "val") else env[atom] for atom in eqn.invars]
            env.update(zip(eqn.outvars, self._step(eqn, values), strict=True))
        return [atom.val if hasattr(atom, "val") else env[atom] for atom in jaxpr.outvars]

    def _step(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if rule := _RULES.get(name):
            return rule(self, eqn, values)
        if self.launch and name in LAUNCHES:
            return self.launch(eqn, values)
        unknown = [UNKNOWN] * len(eqn.outvars)
        if any(isinstance(value, Memory) for value in values):
            if any(isinstance(value, Memory) and value.main for value in values):
                raise Uncountable(f"{name} on an array in main memory")
            return unknown
        whole = bool(eqn.outvars) and all(_whole(var.aval) for var in eqn.outvars)
        if not whole or any(value is UNKNOWN for value in values):
            return unknown
        if fast := _NUMPY.get(name):
            return [fast(eqn, *values)]
        with jax.ensure_compile_time_eval():
            found = eqn.primitive.bind(*values, **eqn.params)
        return [np.asarray(x) for x in (found if eqn.primitive.multiple_results else [found])]

    def closed(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """`run` for a closed jaxpr."""
        return self.run(closed.jaxpr, closed.consts, args)

    def tell(self, memory: Memory, elements: int, written: bool) -> None:
        """Of an access, if it is one to main memory."""
        if memory.main:
            self.told(memory, elements, written)


LAUNCHES = ("pallas_call", "mpmd_map", "core_map")


def known(value: Any, what: str) -> Any:
    """A number that decides something. Raises Uncountable if it is unknown."""
    if value is UNKNOWN:
        raise Uncountable(f"{what} depends on numbers that are not known")
    return value


def region(memory: Memory, transforms: Sequence[Any]) -> np.ndarray:
    """The part of an array that transforms select, cut off at the array's end: its content, or ones."""
    part = memory.value if memory.value is not None else np.broadcast_to(np.int8(1), memory.shape)
    for transform in transforms:
        indices = getattr(transform, "indices", None)
        if indices is None:
            raise Uncountable(f"an array in main memory is seen through {type(transform).__name__}")
        part = part[tuple(_index(index) for index in indices)]
    return part


def _index(index: Any) -> Any:
    if not hasattr(index, "size") or not hasattr(index, "start"):
        return np.asarray(known(index, "an index"))
    start, stride = int(known(index.start, "an index")), int(index.stride)
    return slice(start, start + (index.size - 1) * stride + 1, stride)


def _whole(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and dtype.kind in "iub"


# ------------------------------------------------------------------ control


def _call(name: str) -> Callable[..., Any]:
    return lambda walk, eqn, values: walk.closed(eqn.params[name], values)


def _while(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    split, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    asked, fixed, state = values[:split], values[split:start], values[start:]
    while bool(known(walk.closed(params["cond_jaxpr"], [*asked, *state])[0], "the end of a loop")):
        state = walk.closed(params["body_jaxpr"], [*fixed, *state])
    return state


def _scan(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    body = eqn.params["jaxpr"]
    given, taken = ([getattr(atom.aval, "shape", ()) for atom in atoms] for atoms in (eqn.invars, body.jaxpr.invars))
    made, left = ([atom.aval.shape for atom in atoms] for atoms in (eqn.outvars, body.jaxpr.outvars))
    if given != taken or made != left:  # slices go in, or come out
        raise Uncountable("a loop over an array")
    split = len(values) - len(made)
    fixed, state = values[:split], values[split:]
    for _ in range(eqn.params["length"]):
        state = walk.closed(body, [*fixed, *state])
    return state


def _cond(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    branches = eqn.params["branches"]
    chosen = int(known(values[0], "a branch"))
    return walk.closed(branches[min(max(chosen, 0), len(branches) - 1)], values[1:])


def _run_scoped(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    jaxpr = eqn.params["jaxpr"]
    return walk.run(jaxpr, values, [Memory(tuple(var.aval.shape)) for var in jaxpr.invars])


def _run_state(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    jaxpr = eqn.params["jaxpr"]
    inside = [
        value if isinstance(value, Memory) else Memory(tuple(var.aval.shape))
        for value, var in zip(values, jaxpr.invars, strict=True)
    ]
    walk.run(jaxpr, [], inside)
    return [value if isinstance(value, Memory) else UNKNOWN for value in values]


def _axis(name: str) -> Callable[..., Any]:
    return lambda walk, eqn, _: [np.int32(walk.axes[eqn.params[name]])]


# ------------------------------------------------------------------ memory


def _get(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    memory = values[0]
    walk.tell(memory, math.prod(eqn.outvars[0].aval.shape), False)
    if memory.value is None:
        return [UNKNOWN]
    return [region(memory, jax.tree.unflatten(eqn.params["tree"], values[1:]))]


def _swap(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    _forbid_known(values[0])
    walk.tell(values[0], math.prod(eqn.outvars[0].aval.shape), True)  # what is swapped out is not looked at
    return [UNKNOWN]


def _masked_load(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    memory, transforms, mask, other = jax.tree.unflatten(eqn.params["args_tree"], values)
    walk.tell(memory, _lanes(mask, eqn.outvars[0].aval.shape), False)
    if memory.value is None:
        return [UNKNOWN]
    if mask is None:
        return [region(memory, transforms)]
    # What is masked out may lie outside.
    (indices,) = (transform.indices for transform in transforms)
    inside = tuple(np.where(mask, index, 0) for index in indices)
    return [np.where(mask, memory.value[inside], 0 if other is None else other).astype(memory.value.dtype)]


def _masked_swap(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    memory, _, _, mask = jax.tree.unflatten(eqn.params["args_tree"], values)
    _forbid_known(memory)
    walk.tell(memory, _lanes(mask, eqn.outvars[0].aval.shape), True)
    return [UNKNOWN]


def _lanes(mask: Any, shape: tuple[int, ...]) -> int:
    if mask is None:
        return math.prod(shape)
    return int(np.count_nonzero(np.broadcast_to(known(mask, "a mask"), shape)))


def _copy_in(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    tree = eqn.params["src_transforms_treedef"]
    transforms = jax.tree.unflatten(tree, values[3 : 3 + tree.num_leaves])
    walk.tell(values[0], region(values[0], transforms).size, False)
    return []


def _copy_out(walk: Walk, eqn: Any, values: list[Any]) -> list[Any]:
    if eqn.params["has_user_predicate"] or eqn.params["reduction_op"] is not None:
        raise Uncountable("a copy to main memory with a predicate or a reduction")
    skipped = 2 + eqn.params["src_transforms_treedef"].num_leaves
    tree = eqn.params["dst_transforms_treedef"]
    transforms = jax.tree.unflatten(tree, values[skipped : skipped + tree.num_leaves])
    _forbid_known(values[1])
    walk.tell(values[1], region(values[1], transforms).size, True)
    return []


def _forbid_known(memory: Memory) -> None:
    if memory.value is not None:
        raise Uncountable("an array of known content is written")


_RULES: dict[str, Callable[[Walk, Any, list[Any]], Sequence[Any]]] = {
    "jit": _call("jaxpr"),
    "pjit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_vmap_call": _call("call"),
    "while": _while,
    "scan": _scan,
    "cond": _cond,
    "run_scoped": _run_scoped,
    "run_state": _run_state,
    "program_id": _axis("axis"),
    "axis_index": _axis("axis_name"),
    "get": _get,
    "swap": _swap,
    "masked_load": _masked_load,
    "masked_swap": _masked_swap,
    "copy_gmem_to_smem": _copy_in,
    "copy_smem_to_gmem": _copy_out,
}


# ------------------------------------------------------------------ arithmetic, as in `jax.lax`, where it is often met


def _div(_: Any, a: Any, b: Any) -> Any:
    quotient = np.floor_divide(a, b)  # rounds down, lax.div towards zero
    return quotient + ((np.remainder(a, b) != 0) & ((np.less(a, 0)) != (np.less(b, 0))))


def _rem(_: Any, a: Any, b: Any) -> Any:
    return np.fmod(a, b)


def _broadcast(eqn: Any, x: Any, *_: Any) -> Any:
    shape = [1] * len(eqn.params["shape"])
    for axis, size in zip(eqn.params["broadcast_dimensions"], np.shape(x), strict=True):
        shape[axis] = size
    return np.broadcast_to(np.reshape(x, shape), eqn.params["shape"])


def _iota(eqn: Any) -> Any:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    run = np.arange(shape[axis], dtype=eqn.params["dtype"])
    return np.broadcast_to(run.reshape([-1 if at == axis else 1 for at in range(len(shape))]), shape)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *values: function(*values)


_NUMPY: dict[str, Callable[..., Any]] = {
    **{name: _plain(getattr(operator, name)) for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")},
    "and": _plain(np.bitwise_and),
    "or": _plain(np.bitwise_or),
    "not": _plain(np.invert),
    "max": _plain(np.maximum),
    "min": _plain(np.minimum),
    "sign": _plain(np.sign),
    "div": _div,
    "rem": _rem,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda eqn, x: np.reshape(x, eqn.params["new_sizes"]),
    "convert_element_type": lambda eqn, x: np.asarray(x).astype(eqn.params["new_dtype"]),
    "select_n": lambda _, which, *cases: np.choose(np.asarray(which).astype(np.int8), cases),
    "iota": _iota,
    "layout_cast": lambda _, x: x,
}
