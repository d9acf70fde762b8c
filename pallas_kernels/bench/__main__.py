"""Measures the kernels on the chip that is there, against contiguous attention and the attention that JAX brings.

    python -m pallas_kernels.bench [--op paged_decode] [--grid batch=8,32 context=512,2048] [--json FILE]

Times are medians of calls taken in turn, ratios the medians of one round's times over one another: above 1, ours takes
longer. Bandwidths count the fewest bytes an op could move. Exit status: 1 if an op of ours failed, 2 for arguments that
are not understood.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from pallas_kernels.bench import ceilings, problems
from pallas_kernels.bench.arguments import Parser, names, writable_argument
from pallas_kernels.bench.cases import ATTENTION, MODELS, OPS, POOL_DTYPES, Case
from pallas_kernels.bench.records import first_line, format_table, provenance, write_json
from pallas_kernels.bench.timing import alternate, paired_ratio
from pallas_kernels.dispatch import choose

RIVALS = ("flash", "jax", "cudnn")
COLUMNS = (
    "op",
    "model",
    "batch",
    "context",
    "block_size",
    "dtype",
    "backend",
    "us",
    "gb_s",
    "of_copy",
    "tflop_s",
    "of_matmul",
    *(f"{name}_us" for name in RIVALS),
    *(f"vs_{name}" for name in RIVALS),
)
ROUNDS = 15
CHUNK = 512  # query tokens of a prefill chunk, where there are as many

Grid = dict[str, list[Any]]

_GRIDS: dict[str, Grid] = {
    "cpu": {"batch": [8, 32], "context": [128, 512, 1024, 2048], "block_size": [16]},
    "gpu": {"batch": [1, 8, 64], "context": [512, 2048, 8192], "block_size": [16, 64]},
    "tpu": {"batch": [1, 8, 64], "context": [512, 2048, 8192], "block_size": [16, 64]},
}


def grid_axis(text: str) -> tuple[str, list[Any]]:
    """One axis of the grid, `name=value,value`."""
    name, equals, values = text.partition("=")
    if name == "model" and equals:
        return name, names("model", MODELS)(values)
    if name not in _GRIDS["cpu"] or not equals:
        allowed = ", ".join(("model", *_GRIDS["cpu"]))
        raise argparse.ArgumentTypeError(f"{text!r} is no axis of the grid; allowed: NAME=VALUE,... of {allowed}")
    given = values.split(",")
    wrong = [value for value in given if not value.isdecimal() or int(value) < 1]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no {name}; allowed: integers >= 1")
    sizes = [int(value) for value in given]
    if name == "block_size" and any(size & (size - 1) for size in sizes):
        raise argparse.ArgumentTypeError(f"{values} is no block_size; allowed: powers of two")
    return name, sizes


def cases(platform: str, ops: Sequence[str], dtype: str, axes: Mapping[str, list[Any]]) -> Iterator[tuple[str, Case]]:
    """Every model and case of the grid. Prefill is a chunk of 512 query tokens, `flash_attention` whole prompts."""
    grid: Grid = {"model": list(MODELS), **_GRIDS[platform], **axes}
    for op, model, batch, context, block_size in itertools.product(
        ops, grid["model"], grid["batch"], grid["context"], grid["block_size"]
    ):
        if op == "flash_attention" and (block_size != grid["block_size"][0] or dtype in ("int8", "float8_e4m3fn")):
            continue  # it has no blocks, and no quantised K and V
        heads, kv_heads, head_dim = MODELS[model]
        queries = {"paged_attention": min(CHUNK, context), "flash_attention": context}.get(op, 1)
        stored_dim = -(-head_dim // 128) * 128 if platform == "tpu" else head_dim
        yield model, Case(op, heads, kv_heads, head_dim, batch, context, queries, dtype, block_size, stored_dim)


def backend_of(case: Case) -> str:
    """Which one `auto` is; blocks are gathered and scattered by XLA everywhere."""
    if case.op in ("gather_blocks", "scatter_blocks"):
        return "xla"
    return choose(case.op, "auto", False, *problems.operands(case, case.arguments()[0]))


def measure(model: str, case: Case, limits: Mapping[str, float], rounds: int) -> dict[str, Any]:
    """The row of one case. What fails is named on standard error and leaves its columns empty."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "op": case.op,
        "model": model,
        "batch": case.seqs,
        "context": case.context,
        "block_size": case.block_size if case.op != "flash_attention" else None,
        "dtype": case.pool_dtype,
        "backend": backend_of(case),
    }
    calls = {}
    for name, call in problems.calls(case).items():
        try:
            jax.block_until_ready(call())
            calls[name] = call
        except Exception as error:  # a rival that this chip or JAX has not; ours says so in its row too
            print(f"{case.op} {name}: {first_line(error)}", file=sys.stderr)
    if "ours" not in calls:
        return row
    samples = alternate(calls, rounds)
    seconds = {name: statistics.median(times) for name, times in samples.items()}
    rates = case.fewest_bytes() / seconds["ours"], case.flops() / seconds["ours"]
    row |= {"us": seconds["ours"] * 1e6, "gb_s": rates[0] / 1e9, "of_copy": rates[0] / limits["copy_bytes_per_second"]}
    if case.op in ATTENTION:
        row |= {"tflop_s": rates[1] / 1e12, "of_matmul": rates[1] / limits["matmul_flops_per_second"]}
    for name in RIVALS:
        if name in seconds:
            row |= {
                f"{name}_us": seconds[name] * 1e6,
                f"vs_{name}": paired_ratio(samples["ours"], samples[name]),
            }
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m pallas_kernels.bench", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--op", type=names("op", OPS), help=f"{', '.join(OPS)} (all of them; on a CPU paged_decode)")
    parser.add_argument(
        "--grid",
        type=grid_axis,
        nargs="+",
        default=[],
        metavar="NAME=VALUE,...",
        help="batch, context, block_size, model",
    )
    parser.add_argument(
        "--dtype", choices=POOL_DTYPES, help="of the pools: bfloat16, on a CPU float32, if nothing else is said"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"samples of each call ({ROUNDS})")
    parser.add_argument("--json", type=writable_argument, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"argument --rounds: {options.rounds} is less than 1")
    platform = jax.default_backend()
    ops = options.op or (["paged_decode"] if platform == "cpu" else list(OPS))
    dtype = options.dtype or ("float32" if platform == "cpu" else "bfloat16")
    limits = ceilings.measure(Case("paged_decode", 1, 1, 1, 1, 1, 1, dtype).dtype, options.rounds)
    rows = []
    for model, case in cases(platform, ops, dtype, dict(options.grid)):
        rows.append(measure(model, case, limits, options.rounds))
        print(*(rows[-1][name] for name in COLUMNS[:6]), file=sys.stderr, flush=True)
    kind = jax.devices()[0].device_kind
    print(
        f"{kind}: copies {limits['copy_bytes_per_second'] / 1e9:,.1f} GB/s, "
        f"multiplies {limits['matmul_flops_per_second'] / 1e12:,.2f} TFLOP/s"
    )
    print(format_table(rows, [name for name in COLUMNS if any(row[name] is not None for row in rows)]))
    if options.json:
        write_json(options.json, {"provenance": provenance(), "device": kind, "ceilings": limits, "rows": rows})
    return int(any(row["us"] is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
