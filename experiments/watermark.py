"""How much of the pool admission keeps free: memory in use against preemptions (section 4.5; the artifact keeps 1 %).

OPT-13B on an A100 with 40 GB, ShareGPT, more requests than can be served, as in Fig. 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim
from experiments.frame.frames import figure_of
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import check, simulation, summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Config:
    """vLLM, overloaded.

    Attributes:
        watermark: part of the blocks that admission keeps free.
        workload: one of the simulator's, or a file.
        rate: requests a second.
        duration: seconds in which they come.
        seed: of arrivals and lengths.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    watermark: float = 0.01
    workload: str = "sharegpt"
    rate: float = 4.0
    duration: float = 900.0
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        check(self)


CPU_SET = [Config(watermark=part) for part in (0.0, 0.005, 0.01, 0.02, 0.05)]


def run(config: Config) -> Iterable[dict[str, Any]]:
    """One record: what the simulator sums up."""
    fields = {"workload": config.workload, "duration": config.duration, "seed": config.seed}
    with simulation("vllm", lengths_from=config.lengths, watermark=config.watermark, **fields) as made:
        yield summary(made, config.rate)


def plot(records: pd.DataFrame) -> Figure:
    """Both, over the watermark."""
    from experiments.frame.plots import COLOURS, new_figure

    figure, (memory, preemptions) = new_figure(2)
    records = records.sort_values("watermark")
    memory.plot(100 * records["watermark"], 100 * records["token_states"], "o-", color=COLOURS["vllm"])
    memory.set(xlabel="watermark (% of all blocks)", ylabel="token states (% of all slots)")
    preemptions.plot(100 * records["watermark"], records["preemptions"], "o-", color=COLOURS["vllm"])
    preemptions.set(xlabel="watermark (% of all blocks)", ylabel="preemptions in all", ylim=(0, None))
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """A higher watermark costs memory and saves preemptions."""

    def of(part: float, column: str) -> float | None:
        return figure_of(records, column, watermark=part, workload="sharegpt", seed=0)

    known = {"how": "simulator", "lengths": lengths_used(records)}
    found = [
        Claim(
            f"token states with a watermark of {100 * part:g} %",
            "Fig. 2",
            of(part, "token_states"),
            low,
            high,
            paper=paper,
            unit="%",
            **known,
        )
        for part, low, high, paper in (
            (0.0, 0.955, 0.975, None),
            (0.01, 0.955, 0.97, "96.3 %"),
            (0.05, 0.92, 0.95, None),
        )
    ]
    none, some, much = (of(part, "preemptions") for part in (0.0, 0.01, 0.05))
    for text, more, fewer in (
        ("preemptions without a watermark, to those with 1 %", none, some),
        ("preemptions with a watermark of 1 %, to those with 5 %", some, much),
    ):
        value = more / max(fewer, 1) if more is not None and fewer is not None else None
        found.append(Claim(text, "section 4.5", value, 1.2, None, unit="times", **known))
    return found
