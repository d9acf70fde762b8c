"""Tries the kernels' configurations on the chip that is here, and writes the winners into `tuned.json`.

    python -m pallas_kernels.tune [--op paged_decode] [--json FILE]

A kernel that can be tuned takes `config=`, and the module it stands in has a frozen dataclass `Config`, which refuses
what cannot be with a ValueError. Every combination of `VALUES` that `Config` takes is tried; a field that is not listed
there keeps the default of the class. What a chip or compiler refuses, and what computes something else, is passed over.
Exit status: 1 without a chip that is in the table of chips, 2 for arguments that are not understood.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels import tuning
from pallas_kernels.bench import problems
from pallas_kernels.bench.arguments import Parser, names, writable_argument
from pallas_kernels.bench.cases import MODELS, Case, model_case
from pallas_kernels.bench.records import first_line, format_table, provenance, write_json
from pallas_kernels.bench.timing import Call, alternate
from pallas_kernels.chips import CHIPS, Chip, chip_here
from pallas_kernels.dispatch import PALLAS, choose, load

# What is worth trying, by the name of a configuration's field.
VALUES: dict[str, tuple[int, ...]] = {
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
    "stages": (2, 3, 4, 6),
    "consumers": (1, 2),
    "query_tokens": (1, 16, 32, 64, 128),
    "rows": (4, 16, 32, 64, 128, 256),
    "chunk": (2048, 4096, 8192, 16384, 32768),
    "in_flight": (4, 8, 16, 32),
    "kv_heads": (1, 2, 3, 4, 8),
}
ROUNDS = 15
TOLERANCE = 2e-2  # of 16-bit results; a configuration that is further off is wrong
WORTH = 0.98  # a winner that is not 2 % faster than the default is noise
COLUMNS = ("op", "model", "backend", "config", "us", "default_us", "tried")


def candidates(config: type[Any]) -> list[Any]:
    """Every configuration of this class whose listed fields have values of `VALUES`, those it refuses left out."""
    fields = [field.name for field in dataclasses.fields(config) if field.name in VALUES]
    found = []
    for values in itertools.product(*(VALUES[name] for name in fields)):
        try:
            found.append(config(**dict(zip(fields, values, strict=True))))
        except ValueError:
            continue
    return found


def difference(result: Any, right: Any) -> float:
    """The largest norm-wise distance between two results, array by array."""
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(right), strict=True)
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in wide)


def best(call: Callable[[Any], Call], configs: Sequence[Any], rounds: int = ROUNDS) -> tuple[Any, dict[Any, float]]:
    """The fastest of these configurations and None, the default; and the median seconds of each that runs.

    Args:
        call: gives what to time for a configuration.
        configs: what to try; what is refused, or computes something else, is passed over.
        rounds: samples of each.
    """
    right = jax.device_get(call(None)())
    running: dict[Any, Call] = {None: call(None)}
    for config in configs:
        try:
            off = difference(jax.device_get(call(config)()), right)
        except Exception as error:  # too much shared memory, say
            print(f"{config}: {first_line(error)}", file=sys.stderr)
            continue
        if off > TOLERANCE:
            print(f"{config}: its result is {off:.2g} off the default's", file=sys.stderr)
            continue
        running[config] = call(config)
    keys = list(running)
    samples = alternate({str(i): running[config] for i, config in enumerate(keys)}, rounds)
    seconds = {config: statistics.median(samples[str(i)]) for i, config in enumerate(keys)}
    fastest = min(seconds, key=lambda config: seconds[config])
    return (fastest if seconds[fastest] <= WORTH * seconds[None] else None), seconds


def kernel_config(backend: str, op: str) -> type[Any] | None:
    """The class of a kernel's configurations, out of the module that the kernel stands in; None without one."""
    function = getattr(load(backend), op)
    return getattr(sys.modules[function.__module__], "Config", None)


def tune(chip: Chip, op: str, model: str) -> tuple[tuple[tuning.Key, tuning.Winner | None] | None, dict[str, Any]]:
    """What came out for one op of one model: for the table, if there is anything to tune, and for people."""
    head_dim = MODELS[model][2]
    stored_dim = -(-head_dim // 128) * 128 if chip.platform == "tpu" else head_dim
    case = model_case(model, op, "bfloat16", stored_dim)
    arrays, named = problems.internal_arguments(case)
    operands = problems.operands(case, arrays)
    backend = choose(op, "auto", False, *operands)
    row: dict[str, Any] = {"op": op, "model": model, "backend": backend}
    config = kernel_config(backend, op) if backend in PALLAS else None
    if config is None:
        return None, row
    winner, seconds = best(
        functools.partial(_call, getattr(load(backend), op), case, arrays, named), candidates(config)
    )
    row |= {
        "config": "default" if winner is None else str(dataclasses.asdict(winner)),
        "us": seconds[winner] * 1e6,
        "default_us": seconds[None] * 1e6,
        "tried": len(seconds),
    }
    place = tuning.key(chip.name, backend, op, tuning.shape_of(op, *operands))
    if winner is None:
        return (place, None), row
    return (place, tuning.Winner(dataclasses.asdict(winner), row["us"], row["default_us"])), row


def _call(
    kernel: Callable[..., Any], case: Case, arrays: tuple[Any, ...], named: Mapping[str, Any], config: Any
) -> Call:
    function = functools.partial(kernel, **case.options(), config=config)
    if case.updated is None:
        return functools.partial(jax.jit(function), *arrays, **named)
    step = jax.jit(function, donate_argnums=case.updated)
    before, pools, after = arrays[: case.updated], arrays[case.updated], arrays[case.updated + 1 :]
    pools = jax.tree.map(lambda pool: pool.copy(), pools)  # each configuration gives its own away

    def call() -> Any:
        nonlocal pools
        pools = step(*before, pools, *after, **named)
        return pools

    return call


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m pallas_kernels.tune", description=__doc__.splitlines()[0] if __doc__ else None)
    ops = tuple(tuning.SHAPE_FIELDS)
    parser.add_argument("--op", type=names("op", ops), default=list(ops), help=", ".join(ops))
    parser.add_argument("--chips", choices=("here", *CHIPS), default="here", help="the chip that is here, by any name")
    parser.add_argument(
        "--json", type=writable_argument, metavar="FILE", default=tuning.TUNED, help="the table (the package's own)"
    )
    options = parser.parse_args(arguments)
    chip = chip_here()
    if chip is None or options.chips not in ("here", chip.name):
        here = jax.devices()[0].device_kind
        print(f"{parser.prog}: this needs {_wanted(options.chips)}; JAX runs on {here} here", file=sys.stderr)
        return 1
    return _tune_all(chip, options.op, Path(options.json))


def _wanted(chips: str) -> str:
    return f"one of the chips {', '.join(CHIPS)}" if chips == "here" else f"the chip {chips}"


def _tune_all(chip: Chip, ops: Sequence[str], target: Path) -> int:
    table = tuning.load(target) if target.exists() else {}
    rows = []
    for op, model in itertools.product(ops, MODELS):
        found, row = tune(chip, op, model)
        rows.append(row)
        if found is None:
            continue
        table = tuning.merged(table, [found])
        # after each op: what was measured stays, whatever ends the next one
        write_json(target, {"provenance": provenance(), "entries": tuning.entries(table)})
    print(format_table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
