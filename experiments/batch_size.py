"""Memory and throughput over the size of the batch (Fig. 1 right), OPT-13B on an A100 with 40 GB, ShareGPT.

More requests than can be served, no more than so many of them running: memory that is taken or reserved, weights
included, and tokens a second. Systems that reserve stop growing when memory is full. The paper prints no figures here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim
from experiments.frame.frames import ratio, rows_where
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import check, simulation, summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

COMPARED = ("vllm", "orca-max")
SIZES = (1, 2, 4, 8, 16, 24, 32, 40)


@dataclass(frozen=True, slots=True)
class Config:
    """A system and a limit.

    Attributes:
        system: "vllm", "orca-oracle", "orca-pow2" or "orca-max".
        max_num_seqs: that run at the same time.
        workload: one of the simulator's, or a file.
        rate: requests a second.
        duration: seconds in which they come.
        seed: of arrivals and lengths.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    system: str = "vllm"
    max_num_seqs: int = 16
    workload: str = "sharegpt"
    rate: float = 4.0
    duration: float = 600.0
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        check(self)


CPU_SET = [Config(system=system, max_num_seqs=size) for system in COMPARED for size in SIZES]


def run(config: Config) -> Iterable[dict[str, Any]]:
    """One record: what the simulator sums up, and the memory that is taken."""
    fields: dict[str, Any] = {"workload": config.workload, "duration": config.duration, "seed": config.seed}
    fields["max_num_seqs"] = config.max_num_seqs
    with simulation(config.system, lengths_from=config.lengths, **fields) as made:
        row = summary(made, config.rate, until=config.duration)
        assert made.server is not None
        taken = made.model.weight_bytes + (1 - row["free"]) * made.server.kv_bytes
    yield {**row, "memory_gb": taken / 1e9}


def plot(records: pd.DataFrame) -> Figure:
    """Both over the requests that run."""
    from experiments.frame.plots import COLOURS, MARKERS, NAMES, new_figure

    figure, panels = new_figure(2, height=2.2)
    columns = (("memory_gb", "memory taken (GB)"), ("output_tokens_per_s", "tokens/s"))
    for axes, (column, label) in zip(panels, columns, strict=True):
        for at, system in enumerate(COMPARED):
            rows = records[records["system"] == system].sort_values("mean_batched_requests")
            if rows.empty:
                continue
            style = {"color": COLOURS[system], "marker": MARKERS[system]}
            axes.plot(rows["mean_batched_requests"], rows[column], **style)
            axes.text(
                0.97,
                0.06 + 0.1 * at,
                NAMES[system],
                color=COLOURS[system],
                ha="right",
                fontsize=7,
                transform=axes.transAxes,
            )
        axes.margins(y=0.08)
        axes.set(xlabel="requests that run (mean)", ylabel=label, ylim=(0, None), xlim=(0, None))
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """What paging gives room for."""
    first = records[records["seed"] == 0]
    known = {"how": "simulator", "lengths": lengths_used(first)}
    most = {}
    for system in COMPARED:
        rows = {row["max_num_seqs"]: row for row in rows_where(first, system=system)}
        most[system] = rows.get(SIZES[-1])
    batched, tokens = (
        ratio(*(row[column] if (row := most[system]) is not None else None for system in COMPARED))
        for column in ("mean_batched_requests", "output_tokens_per_s")
    )
    orca = most["orca-max"]
    return [
        Claim(
            "requests that run at most, vllm to orca-max",
            "Fig. 1 right",
            batched,
            3.0,
            None,
            unit="x",
            **known,
        ),
        Claim(
            "tokens a second at most, vllm to orca-max",
            "Fig. 1 right",
            tokens,
            2.0,
            4.0,
            paper="2-4x at the same latency",
            unit="x",
            **known,
        ),
        Claim(
            "requests that fill the memory of orca-max",
            "Fig. 1 right",
            None if orca is None else orca["mean_batched_requests"],
            7,
            7,
            **known,
        ),
    ]
