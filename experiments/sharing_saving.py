"""Memory that sharing saves (Fig. 15): blocks that samples of one prompt, or beams of one search, do not hold twice.

The artifact's measure: 1 - 1 / (mean over steps of logical blocks / physical blocks), from 300 to 900 s, OPT-13B with
more requests than can be served: Alpaca at 20 a second, as in the artifact, ShareGPT at 4, as for Fig. 2 (what is
saved depends on which requests are served in the time, and at 20 a second these are others: that is shown too). All
samples of a request have the same length of output. On the engine, beams have the parents that SmolLM2 gives them; in
the simulator they are drawn evenly, a stated process and an upper estimate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim, require_choice, require_unused
from experiments.frame.frames import figure_of
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import check, simulation, summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SIZES = (2, 4, 6)
PAPER = {  # per cent, for two, four and six
    ("alpaca", "parallel"): (6.1, 8.5, 9.8),
    ("alpaca", "beam"): (37.6, 53.1, 55.2),
    ("sharegpt", "parallel"): (16.2, None, 30.5),
    ("sharegpt", "beam"): (44.3, None, 66.3),
}

RATES = {"alpaca": 20.0, "sharegpt": 4.0}


@dataclass(frozen=True, slots=True)
class Config:
    """Requests of several sequences.

    Attributes:
        where: "simulator", at the paper's scale, or "engine", SmolLM2 on the machine at hand.
        decoding: "parallel" or "beam".
        size: samples of a request, or beams.
        workload: one of the simulator's, or a file.
        block_size: tokens a block.
        rate: requests a second, of the simulator; None is 20, as in the artifact, and with ShareGPT 4, as for Fig. 2.
        duration: seconds in which they come, of the simulator.
        seed: of arrivals, lengths, parents and samples.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    where: str = "simulator"
    decoding: str = "parallel"
    size: int = 2
    workload: str = "alpaca"
    block_size: int = 16
    rate: float | None = None
    duration: float = 900.0
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        require_choice("where", self.where, ("simulator", "engine"))
        require_choice("decoding", self.decoding, ("parallel", "beam"))
        check(self)
        if self.where == "engine":
            require_unused(self, "where='engine'", "rate", "duration")


CPU_SET = [
    *(Config(decoding=decoding, size=size, workload=workload) for workload, decoding in PAPER for size in SIZES),
    Config(workload="sharegpt", rate=20.0),
    *(
        Config(where="engine", decoding=decoding, size=size, workload="alpaca")
        for decoding, sizes in (("parallel", (2, 6)), ("beam", SIZES))
        for size in sizes
    ),
]
TIMED = ("measured_s", "measured_tokens_per_s")


def run(config: Config) -> Iterable[dict[str, Any]]:
    """One record: what is summed up of the run."""
    beam = config.decoding == "beam"
    if config.where == "engine":
        from experiments.frame.engine import serve

        yield serve(
            workload=config.workload,
            lengths_from=config.lengths,
            num_requests=8,
            shrink=1,
            seed=config.seed,
            n=1 if beam else config.size,
            beam_width=config.size if beam else 0,
            block_size=config.block_size,
        )
        return
    size = {"beam_width": config.size} if beam else {"n": config.size}
    fields = {"workload": config.workload, "duration": config.duration, "seed": config.seed}
    with simulation("vllm", lengths_from=config.lengths, block_size=config.block_size, **size, **fields) as made:
        rate = config.rate if config.rate is not None else RATES.get(config.workload, 20.0)
        yield {**summary(made, rate, until=config.duration), "rate": rate}


def runs_alone(config: Config) -> bool:
    """Whether it measures time."""
    return config.where == "engine"


def plot(records: pd.DataFrame) -> Figure:
    """A panel for each decoding; the paper's points hollow."""
    from experiments.frame.plots import CYCLE, label_line, new_figure

    figure, panels = new_figure(2, height=2.3, sharey=True)
    for axes, decoding in zip(panels, ("parallel", "beam"), strict=True):
        usual = (records["where"] == "engine") | (records["rate"] == records["workload"].map(RATES))
        shown = records[usual & (records["decoding"] == decoding)].sort_values("size")
        for colour, (where, workload) in zip(
            CYCLE, (("simulator", "sharegpt"), ("simulator", "alpaca"), ("engine", "alpaca")), strict=False
        ):
            rows = shown[(shown["where"] == where) & (shown["workload"] == workload)]
            if rows.empty:
                continue
            axes.plot(rows["size"], 100 * rows["sharing_saving"], "o-", color=colour)
            name = workload if where == "simulator" else "SmolLM2"
            label_line(axes, rows["size"].iloc[-1], 100 * rows["sharing_saving"].iloc[-1], name, colour)
            if where == "simulator":
                axes.plot(
                    SIZES,
                    [value if value is not None else float("nan") for value in PAPER[workload, decoding]],
                    "o",
                    mfc="none",
                    color=colour,
                )
        axes.set(
            title=decoding,
            xlabel="samples" if decoding == "parallel" else "beams",
            ylabel="memory saved (%)",
            xticks=SIZES,
            xlim=(1.7, 7.6),
            ylim=(0, 100),
        )
    panels[0].text(0.03, 0.92, "○ paper", transform=panels[0].transAxes, fontsize=7)
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """Parallel sampling to a point or so; beams as far as their parents are known."""
    own = records[(records["seed"] == 0) & (records["block_size"] == 16)]
    simulated = own[(own["where"] == "simulator") & (own["rate"] == own["workload"].map(RATES))]
    real = not simulated.empty and not any(simulated["lengths_are_statistics"])
    found = []
    for (workload, decoding), figures in PAPER.items():
        for size, paper in zip(SIZES, figures, strict=True):
            if paper is not None:
                ours = figure_of(simulated, "sharing_saving", workload=workload, decoding=decoding, size=size)
                low, high = _accepted(workload, decoding, size, paper, real)
                text = f"memory saved, {decoding}, size {size}, {workload}"
                seed = "up to 55 %" if (workload, decoding, size) == ("alpaca", "beam", 6) else None
                used = lengths_used(simulated[simulated["workload"] == workload])
                how = "simulator" if decoding == "parallel" else "simulator, parents drawn evenly"
                found.append(
                    Claim(
                        text, "Fig. 15", ours, low, high, paper=f"{paper} %", seed=seed, unit="%", how=how, lengths=used
                    )
                )
    faster = own[(own["workload"] == "sharegpt") & (own["rate"] == 20.0)]
    ours = figure_of(faster, "sharing_saving", decoding="parallel", size=2, where="simulator")
    text = "memory saved, parallel, size 2, sharegpt at 20 requests/s"
    used = lengths_used(faster)
    found.append(Claim(text, "Fig. 15", ours, 0.152, 0.172, paper="16.2 %", unit="%", how="simulator", lengths=used))
    engine = own[own["where"] == "engine"]
    return found + _orderings(simulated, engine, lengths_used(simulated))


def _accepted(workload: str, decoding: str, size: int, paper: float, real: bool) -> tuple[float | None, float | None]:
    if decoding == "beam":
        if (workload, size) == ("alpaca", 6):
            return 0.50, 0.66
        return (paper - 4) / 100, (paper + 4) / 100
    spread = {("sharegpt", 2): 1.0, ("sharegpt", 6): 1.5}.get((workload, size), 1.0 if real else 3.0)
    return (paper - spread) / 100, (paper + spread) / 100


def _orderings(simulated: pd.DataFrame, engine: pd.DataFrame, used: str) -> list[Claim]:
    """Beams of the real model save more the more there are, and so do those that are drawn; ShareGPT above Alpaca."""
    found = []
    for rows, where, workload in (
        (engine, "engine", "alpaca"),
        (simulated, "simulator", "alpaca"),
        (simulated, "simulator", "sharegpt"),
    ):
        savings = [figure_of(rows, "sharing_saving", workload=workload, decoding="beam", size=size) for size in SIZES]
        steps = [b - a for a, b in zip(savings, savings[1:], strict=False) if a is not None and b is not None]
        text = f"least growth of what beams save from size to size, {workload}, {where}"
        how = "SmolLM2's own parents" if where == "engine" else "simulator, parents drawn evenly"
        ours = min(steps) if len(steps) == 2 else None
        found.append(Claim(text, "Fig. 15", ours, 0.0, None, paper="it grows", unit="%", how=how, lengths=used))
    pairs = [
        (
            figure_of(simulated, "sharing_saving", workload="sharegpt", decoding="beam", size=size),
            figure_of(simulated, "sharing_saving", workload="alpaca", decoding="beam", size=size),
        )
        for size in SIZES
    ]
    leads = [a - b for a, b in pairs if a is not None and b is not None]
    ours = min(leads) if len(leads) == len(SIZES) else None
    text = "least lead of ShareGPT over Alpaca in what beams save"
    found.append(
        Claim(
            text,
            "Fig. 15",
            ours,
            0.0,
            None,
            paper="44.3-66.3 % against 37.6-55.2 %",
            unit="%",
            how="simulator",
            lengths=used,
        )
    )
    return found
