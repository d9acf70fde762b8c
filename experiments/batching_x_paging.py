"""Continuous batching and paging, each with and without the other: the seed note's 2 x 2.

Continuous batching decides when requests enter and leave a batch, paging how their memory is laid out. The seed says
that each works without the other, worse. Requests served a second in an overload, in the simulator at the paper's
scale, and on the engine: static batches of the largest size whose reservations fit in any case.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim, require_choice, require_unused
from experiments.frame.frames import figure_of, ratio, rows_where
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import FT_BATCH, check, simulation, sweep_rates

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

CELLS = {
    ("static", "contiguous"): "FasterTransformer",
    ("static", "paged"): "paging alone",
    ("continuous", "contiguous"): "Orca (Max)",
    ("continuous", "paged"): "vLLM",
}
ALLOCATORS = {"contiguous": "orca-max", "paged": "paged"}


@dataclass(frozen=True, slots=True)
class Config:
    """One of the four.

    Attributes:
        where: "simulator", at the paper's scale, or "engine", SmolLM2 on the machine at hand.
        batching: "static" or "continuous".
        memory: "contiguous", which reserves the longest sequence, or "paged".
        workload: one of the simulator's, or a file.
        duration: seconds in which requests come, in the simulator.
        seed: of arrivals, lengths and prompts.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    where: str = "simulator"
    batching: str = "continuous"
    memory: str = "paged"
    workload: str = "sharegpt"
    duration: float = 900.0
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        require_choice("where", self.where, ("simulator", "engine"))
        require_choice("batching", self.batching, ("static", "continuous"))
        require_choice("memory", self.memory, tuple(ALLOCATORS))
        check(self)
        if self.where == "engine":
            require_unused(self, "where='engine'", "duration")


CPU_SET = [Config(where=where, batching=b, memory=m) for where in ("simulator", "engine") for b, m in CELLS]
TIMED = ("measured_s", "measured_tokens_per_s")


def run(config: Config) -> Iterable[dict[str, Any]]:
    """A record for each rate, with the knee in each (see `systems.sweep_rates`); of the engine, one."""
    allocator = ALLOCATORS[config.memory]
    if config.where == "engine":
        from experiments.frame.engine import serve

        # Static batches without paging: two reservations of 16 blocks are what 40 blocks hold.
        sizes = {("static", "contiguous"): 2, ("static", "paged"): 6}
        yield serve(
            workload=config.workload,
            lengths_from=config.lengths,
            num_requests=12,
            shrink=4,
            seed=config.seed,
            allocator=allocator,
            batching=config.batching,
            max_num_seqs=sizes.get((config.batching, config.memory), 12),
        )
        return
    fields: dict[str, Any] = {"workload": config.workload, "duration": config.duration, "seed": config.seed}
    if config.batching == "static":
        # With paging a batch is as large as sequences of twice the mean length allow.
        most = FT_BATCH["opt-13b", "sharegpt"] if config.memory == "contiguous" else 15
        fields |= {"batching": "static", "max_num_seqs": most}
    with simulation("vllm", lengths_from=config.lengths, **{**fields, "allocator": allocator}) as made:
        yield from sweep_rates(made)


def runs_alone(config: Config) -> bool:
    """Whether it measures time."""
    return config.where == "engine"


def plot(records: pd.DataFrame) -> Figure:
    """What each sustains in the simulator, and the requests that it runs at the same time on the engine."""
    from experiments.frame.plots import CYCLE, bar_labels, new_figure

    figure, panels = new_figure(2, height=2.4)
    for axes, (where, column, label) in zip(
        panels,
        (
            ("simulator", "knee_rate", "requests/s sustained (OPT-13B)"),
            ("engine", "mean_batched_requests", "requests that run (SmolLM2)"),
        ),
        strict=True,
    ):
        rows = records[records["where"] == where]
        for at, ((batching, memory), colour) in enumerate(zip(CELLS, CYCLE, strict=False)):
            found = rows_where(rows, batching=batching, memory=memory)
            if found:
                bar_labels(axes, axes.bar(at, found[0][column], color=colour), "{:.2f}".format)
        axes.set_xticks(range(len(CELLS)), [f"{batching}\n{memory}" for batching, memory in CELLS], fontsize=6.5)
        axes.set_ylabel(label)
        axes.margins(y=0.12)
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """Each helps without the other, and both together most."""
    first = records[records["seed"] == 0]
    simulated, engine = first[first["where"] == "simulator"], first[first["where"] == "engine"]
    knees: dict[tuple[str, str], float] = {}
    for row in simulated.to_dict("records"):
        knees[row["batching"], row["memory"]] = row["knee_rate"]
    known = {"how": "simulator", "lengths": lengths_used(simulated), "unit": "x"}
    texts = {
        "continuous batching without paging, to neither": (("continuous", "contiguous"), ("static", "contiguous")),
        "paging without continuous batching, to neither": (("static", "paged"), ("static", "contiguous")),
        "both, to continuous batching alone": (("continuous", "paged"), ("continuous", "contiguous")),
        "both, to paging alone": (("continuous", "paged"), ("static", "paged")),
    }
    found = []
    for text, (one, other) in texts.items():
        seed = "works, with less effect" if "without" in text else "worse without the other"
        ours = ratio(knees.get(one), knees.get(other))
        found.append(Claim(f"rate sustained, {text}", "seed", ours, 1.05, None, seed=seed, **known))
    batched = {
        memory: figure_of(engine, "mean_batched_requests", batching="continuous", memory=memory)
        for memory in ALLOCATORS
    }
    text = "requests that run, paged to contiguous, continuous batching"
    ours = ratio(batched["paged"], batched["contiguous"])
    found.append(
        Claim(text, "section 6.2", ours, 1.5, None, unit="x", how="engine, SmolLM2", lengths=lengths_used(engine))
    )
    hashes = set(engine["tokens_sha256"]) if "tokens_sha256" in engine else set()
    ours = float(len(hashes)) if len(engine) == len(CELLS) else None
    found.append(
        Claim(
            "different outputs of the four",
            "section 1",
            ours,
            1,
            1,
            paper="no effect on accuracy",
            how="engine, SmolLM2",
        )
    )
    return found
