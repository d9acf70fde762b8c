"""A chatbot (Fig. 17): OPT-13B, long conversations, prompts cut to their last 1,024 tokens.

Outputs end after 1,016 tokens, as in the artifact, and nothing is kept between rounds. As most prompts are 1,024
long, a buddy allocator rounds every chunk up to 2,048, whatever Orca knows of the output. The lengths are those of
ShareGPT in several rounds (up to 8,192 tokens), as the paper's own chat lengths are not at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim
from experiments.frame.frames import ratio, rows_where
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import ORCAS, check, simulation, sweep_rates

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Config:
    """A system.

    Attributes:
        system: "vllm", "orca-oracle", "orca-pow2" or "orca-max".
        workload: one of the simulator's, or a file.
        cut_prompts: tokens of a conversation that a prompt keeps, the last ones.
        cut_outputs: tokens after which an output ends.
        duration: seconds in which requests come.
        seed: of arrivals and lengths.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    system: str = "vllm"
    workload: str = "sharegpt-multiturn"
    cut_prompts: int = 1024
    cut_outputs: int = 1016
    duration: float = 900.0
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        check(self)


CPU_SET = [Config(system=system) for system in ("vllm", *ORCAS)]


def run(config: Config) -> Iterable[dict[str, Any]]:
    """A record for each rate, with the knee in each; see `systems.sweep_rates`."""
    cut = {"cut_prompts": config.cut_prompts, "cut_outputs": config.cut_outputs}
    fields = {"workload": config.workload, "duration": config.duration, "seed": config.seed}
    with simulation(config.system, lengths_from=config.lengths, **cut, **fields) as made:
        yield from sweep_rates(made)


def plot(records: pd.DataFrame) -> Figure:
    """A line a system."""
    from experiments.frame.plots import new_figure
    from experiments.frame.rates import draw_latencies

    figure, (axes,) = new_figure()
    draw_latencies(axes, records)
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """The three of Orca coincide, and vLLM serves about twice as much."""
    first = records[records["seed"] == 0]
    knees = {row["system"]: row["knee_rate"] for row in rows_where(first)}
    known = {"how": "simulator", "lengths": lengths_used(first), "unit": "x"}
    orcas = [knees[system] for system in ORCAS if system in knees]
    spread = max(orcas) / min(orcas) if len(orcas) == len(ORCAS) else None
    best = max(orcas) if orcas else None
    return [
        Claim("best of the three of Orca to the worst", "Fig. 17", spread, None, 1.1, paper="they coincide", **known),
        Claim(
            "rate sustained, vllm to the best of Orca",
            "Fig. 17",
            ratio(knees.get("vllm"), best),
            1.4,
            2.4,
            paper="2x",
            **known,
        ),
    ]
