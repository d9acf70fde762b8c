"""Compiles the kernels for chips that are not there, and prints what the compilers say of them.

    python -m pallas_kernels.aot [--chips a100-40gb,v5e] [--op paged_decode] [--shapes llama3-8b] [--json FILE]

Exit status: 0 if every op compiled or was refused by name, 1 if one did not or something is not installed, 2 for
arguments that are not understood.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.aot.compile import COLUMNS, compile_row, missing
from pallas_kernels.bench.arguments import Parser, names, writable_argument
from pallas_kernels.bench.cases import MODELS, OPS, POOL_DTYPES
from pallas_kernels.bench.records import format_table, provenance, write_json
from pallas_kernels.chips import CHIPS

INSTALL = "pip install 'pagedjax[aot]'"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m pallas_kernels.aot", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chips", type=names("chip", CHIPS), default=list(CHIPS), help=", ".join(CHIPS))
    parser.add_argument("--op", type=names("op", OPS), default=list(OPS), help=", ".join(OPS))
    parser.add_argument("--shapes", type=names("shape", MODELS), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument(
        "--dtypes",
        type=names("dtype", POOL_DTYPES),
        default=["bfloat16"],
        help=f"of the pools: {', '.join(POOL_DTYPES)} (default bfloat16)",
    )
    parser.add_argument("--json", type=writable_argument, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    if lacking := missing([CHIPS[name] for name in options.chips]):
        print(f"{parser.prog}: {' and '.join(lacking)} not installed; {INSTALL}", file=sys.stderr)
        return 1
    rows = compile_all(options.chips, options.op, options.shapes, options.dtypes)
    print(format_table(rows, COLUMNS))
    if options.json:
        write_json(options.json, {"provenance": provenance(), "rows": rows})
    return int(any(row["verdict"].startswith(("failed", "crashed")) for row in rows))


def compile_all(
    chips: Sequence[str], ops: Sequence[str], models: Sequence[str], dtypes: Sequence[str]
) -> list[dict[str, Any]]:
    """A row for each combination, in order; as many compilations at a time as half the processors."""
    # flash_attention takes no pool, so no quantised one either
    wanted = [
        (chip, op, model, dtype)
        for chip, op, model, dtype in itertools.product(chips, ops, models, dtypes)
        if not (op == "flash_attention" and dtype in ("int8", "float8_e4m3fn"))
    ]
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        pending = [pool.submit(compile_row, CHIPS[chip], *rest) for chip, *rest in wanted]
        for count, done in enumerate(concurrent.futures.as_completed(pending), 1):
            row = done.result()
            words = (f"{count}/{len(wanted)}", row["chip"], row["op"], row["shape"], row["dtype"], row["verdict"])
            print(*words, file=sys.stderr, flush=True)
        return [each.result() for each in pending]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # what is here does not matter, and is not to be started
    sys.exit(main())
