"""The size of blocks (Fig. 18b): memory in use and lost, what a prefix cache finds, tables, latency, kernel time.

Part `memory`: OPT-13B in the simulator, overloaded as for Fig. 2 (as many sequences as memory holds), so that the
pool is full; then at the rates of the artifact's Fig. 18b (ShareGPT 2.01, Alpaca 30.1 requests a second) for latency;
then with a prefix of 341 tokens, for what is found of it. The engine runs SmolLM2 with the same lengths divided by 8:
its tokens must be the same with all sizes. Part `kernel`: the decode kernel's time, in turn with that of blocks of
16; on a CPU that is XLA's code, not a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim, require_choice
from experiments.frame.frames import figure_of, rows_where
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import check, simulation, summary
from pagedjax.config import require
from pagedjax.scalars import is_int

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OVERLOAD = {"sharegpt": (4.0, 900.0), "alpaca": (60.0, 300.0)}
"""Requests a second, and for how many seconds."""
SERVED = {"sharegpt": 2.01, "alpaca": 30.1}
PREFIX = 341
SHRINK = 8
ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Config:
    """One size.

    Attributes:
        part: "memory", in the simulator and with the engine's tokens, or "kernel".
        block_size: tokens a block, a power of two.
        workload: "sharegpt" or "alpaca".
        seed: of arrivals, lengths and prompts.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    part: str = "memory"
    block_size: int = 16
    workload: str = "sharegpt"
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        require_choice("part", self.part, ("memory", "kernel"))
        require_choice("workload", self.workload, tuple(OVERLOAD))
        size = self.block_size
        require(
            is_int(size, 1) and size & (size - 1) == 0 and size <= 256, "block_size", size, "a power of two up to 256"
        )
        check(self)


CPU_SET = [
    *(Config(block_size=size, workload=workload) for workload in OVERLOAD for size in SIZES),
    *(Config("kernel", size) for size in SIZES),
]
TIMED = ("kernel_us", "kernel_us_at_16", "kernel_ratio")


def run(config: Config) -> Iterable[dict[str, Any]]:
    """One record."""
    yield _kernel(config) if config.part == "kernel" else _memory(config)


def runs_alone(config: Config) -> bool:
    """Whether it measures time."""
    return config.part == "kernel"


def _memory(config: Config) -> dict[str, Any]:
    from experiments.frame.engine import serve

    rate, duration = OVERLOAD[config.workload]
    how: dict[str, Any] = {"lengths_from": config.lengths, "workload": config.workload, "seed": config.seed}
    how["block_size"] = config.block_size
    with simulation("vllm", duration=duration, max_num_seqs=4096, max_num_batched_tokens=8192, **how) as made:
        table = _TableLength(made.warmup, duration)
        full = summary(made, rate, until=duration, on_step=table)
    with simulation("vllm", duration=900.0, **how) as made:
        served = summary(made, SERVED[config.workload])
    with simulation("vllm", duration=60.0, shared_prefix=PREFIX, enable_prefix_caching=True, **how) as made:
        cached = summary(made, 1.0)
    engine = serve(
        num_requests=4,
        shrink=SHRINK,
        longest=128,
        num_blocks=512 // config.block_size,
        max_num_batched_tokens=16,
        **how,
    )
    return {
        "utilisation": full["token_states"],
        "internal_fragmentation": full["internal_fragmentation"],
        "free": full["free"],
        "table_length": table.mean(),
        "normalized_latency_s": served["normalized_latency_s"],
        "prefix_hit_rate": cached["prefix_hit_rate"],
        "tokens_sha256": engine["tokens_sha256"],
        "output_tokens": engine["output_tokens"],
        "lengths_are_statistics": full["lengths_are_statistics"],
        "note": full["note"],
    }


class _TableLength:
    """Entries of a running sequence's block table, averaged over steps."""

    def __init__(self, since: float, until: float) -> None:
        self._since, self._until = since, until
        self._sum, self._number = 0.0, 0

    def __call__(self, step: Any) -> None:
        if step.num_running and self._since <= step.end <= self._until:
            self._sum += step.logical_blocks / step.num_running
            self._number += 1

    def mean(self) -> float | None:
        return self._sum / self._number if self._number else None


def _kernel(config: Config) -> dict[str, Any]:
    """Decode of 8 sequences of 512 tokens, with SmolLM2's heads (9 over 3 of 64), float32."""
    import functools
    import statistics

    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import paged_decode
    from pallas_kernels.bench.timing import alternate
    from pallas_kernels.dispatch import choose

    seqs, context, rng = 8, 512, np.random.default_rng(config.seed)
    q = jnp.asarray(rng.standard_normal((seqs, 9, 64)), jnp.float32)
    calls = {}
    for name, size in (("own", config.block_size), ("16", 16)):
        per_seq = context // size
        table = 1 + rng.permutation(seqs * per_seq).reshape(seqs, per_seq).astype(np.int32)
        pool = jnp.asarray(rng.standard_normal((seqs * per_seq + 1, 3, size, 64)), jnp.float32)
        lens = jnp.full(seqs, context, jnp.int32)
        calls[name] = functools.partial(paged_decode, q, pool, pool, jnp.asarray(table), lens)
    times = alternate(calls, ROUNDS)
    own, at_16 = statistics.median(times["own"]), statistics.median(times["16"])
    return {
        "backend": choose("paged_decode", "auto", False, q, pool),
        "device": jax.devices()[0].platform,
        "kernel_us": 1e6 * own,
        "kernel_us_at_16": 1e6 * at_16,
        "kernel_ratio": own / at_16,
    }


def plot(records: pd.DataFrame) -> Figure:
    """Four panels over the size of blocks."""
    from experiments.frame.plots import CYCLE, label_line, new_figure

    figure, panels = new_figure(2, 2, height=2.0)
    memory = records[records["part"] == "memory"]
    columns = (
        ("utilisation", "slots that hold tokens (%)", 100),
        ("normalized_latency_s", "latency (ms/token)", 1000),
        ("prefix_hit_rate", f"prompt tokens found,\nprefix of {PREFIX} (%)", 100),
        ("kernel_ratio", "time of a decode call\nto that of blocks of 16", 1),
    )
    for axes, (column, label, scale) in zip(panels, columns, strict=True):
        shown = records[records["part"] == "kernel"] if column == "kernel_ratio" else memory
        for colour, workload in zip(CYCLE, OVERLOAD, strict=False):
            rows = shown[shown["workload"] == workload].sort_values("block_size")
            if len(rows):
                axes.plot(rows["block_size"], scale * rows[column], "o-", color=colour)
                name = workload if column != "kernel_ratio" else str(rows["backend"].iloc[0])
                label_line(axes, rows["block_size"].iloc[-1], scale * rows[column].iloc[-1], name, colour)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, list(map(str, SIZES)))
        axes.minorticks_off()
        axes.set(xlabel="block size (tokens)", ylabel=label, xlim=(0.8, 900))
        if column == "normalized_latency_s":
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, None)
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """The bounds of utilisation, the same tokens, and where latency is lowest."""
    memory = records[(records["part"] == "memory") & (records["seed"] == 0)]
    used = {workload: lengths_used(memory[memory["workload"] == workload]) for workload in OVERLOAD}
    found = []
    for workload, size, low, high in (
        *(("sharegpt", size, 0.935, None) for size in SIZES[:6]),
        ("sharegpt", 256, None, 0.80),
        ("alpaca", 16, 0.88, None),
        ("alpaca", 128, None, 0.55),
    ):
        ours = figure_of(memory, "utilisation", workload=workload, block_size=size)
        seed = "at most 15 slots lost a sequence" if size == 16 else None
        text = f"slots that hold tokens, blocks of {size}, {workload}"
        known = {"unit": "%", "how": "simulator", "lengths": used[workload]}
        found.append(
            Claim(
                text,
                "Fig. 18b",
                ours,
                low,
                high,
                paper="96.3 %" if (workload, size) == ("sharegpt", 16) else None,
                seed=seed,
                **known,
            )
        )
    for workload in OVERLOAD:
        rows = rows_where(memory, workload=workload)
        hashes = {row["tokens_sha256"] for row in rows}
        ours = float(len(hashes)) if {row["block_size"] for row in rows} >= set(SIZES) else None
        text = f"different outputs over all block sizes, {workload}"
        found.append(
            Claim(
                text,
                "section 1",
                ours,
                1,
                1,
                paper="no effect on accuracy",
                how="engine, SmolLM2",
                lengths=used[workload],
            )
        )
    return found + _latency_claims(memory, used) + _kernel_claims(records)


def _latency_claims(memory: pd.DataFrame, used: dict[str, str]) -> list[Claim]:
    """How far the sizes that the paper finds good are from the best."""
    found = []
    for workload, good, paper in (
        ("sharegpt", (16, 32, 64, 128), "best at 16 to 128"),
        ("alpaca", (16, 32), "good at 16 and 32, much worse above"),
    ):
        times = {size: figure_of(memory, "normalized_latency_s", workload=workload, block_size=size) for size in SIZES}
        known = {size: value for size, value in times.items() if value is not None}
        complete = len(known) == len(SIZES)
        seed = "best at 16, good from 16 to 32" if workload == "sharegpt" else None
        worst = max(known[size] for size in good) / min(known.values()) if complete else None
        sizes = ", ".join(map(str, good))
        text = f"latency at the paper's good sizes, the worst of {sizes}, to the best of all, {workload}"
        found.append(
            Claim(
                text,
                "Fig. 18b",
                worst,
                1.0,
                1.25,
                paper=paper,
                seed=seed,
                unit="x",
                how="simulator",
                lengths=used[workload],
            )
        )
        large = known[256] / min(known[size] for size in good) if complete else None
        text = f"latency at 256, to the best of {sizes}, {workload}"
        found.append(
            Claim(
                text,
                "Fig. 18b",
                large,
                1.2,
                None,
                paper="much worse" if workload == "alpaca" else "worse",
                unit="x",
                how="simulator",
                lengths=used[workload],
            )
        )
    return found


def _kernel_claims(records: pd.DataFrame) -> list[Claim]:
    rows = {row["block_size"]: row for row in rows_where(records, part="kernel")}
    row = rows.get(1)
    how = f"{row['device'].upper()}, backend {row['backend']}" if row else ""
    text = "time of a decode call with blocks of 1, to blocks of 16"
    on_cpu = row is None or row["device"] == "cpu"
    ours = row["kernel_ratio"] if row else None
    paper = "small blocks do not use the GPU's parallelism"
    return [
        Claim(
            text, "section 7.2", ours, 1.0, None, paper=paper, unit="x", how=how, needs_accelerator=on_cpu, timed=True
        )
    ]
