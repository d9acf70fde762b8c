"""How much of the pool admission keeps free: utilisation against preemptions (section 4.5, the artifact's 1 %)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim
from experiments.frame.lengths import default_lengths, lengths, lengths_used
from pagedjax.sim import Simulation, SimulationConfig

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Config:
    """OPT-13B on an A100 with 40 GB, overloaded.

    Attributes:
        watermark: part of the blocks that admission keeps free.
        workload: of the simulator's.
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


CPU_SET = [Config(watermark=part) for part in (0.0, 0.005, 0.01, 0.02, 0.05)]


def run(config: Config) -> Iterable[dict[str, Any]]:
    with lengths(config.lengths):
        simulation = Simulation(
            SimulationConfig(
                workload=config.workload, watermark=config.watermark, duration=config.duration, seed=config.seed
            )
        )
        yield {**simulation.run(config.rate), "lengths_are_statistics": simulation.trace.is_statistics}


def plot(records: pd.DataFrame) -> Figure:
    from experiments.frame.plots import new_figure

    figure, (axes,) = new_figure()
    axes.plot(100 * records["watermark"], 100 * records["token_states"], "o-")
    axes.set_xlabel("watermark (% of blocks)")
    axes.set_ylabel("token states (% of slots)")
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    (row,) = records[records["watermark"] == 0.01].to_dict("records")
    return [
        Claim(
            "token states with a watermark of 1 %",
            "section 6.2",
            row["token_states"],
            0.955,
            0.97,
            paper="96.3 %",
            unit="%",
            how="simulator",
            lengths=lengths_used(records),
        )
    ]
