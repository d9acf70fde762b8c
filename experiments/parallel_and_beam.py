"""Parallel sampling and beam search: the rate that each system sustains (Fig. 14), OPT-13B, Alpaca.

Which beams a beam search goes on with is drawn evenly among them, since no model says: a stated parent process, and an
upper estimate of what beams share. Knees as in `throughput_vs_rate`; traces of 150 s, as sequences are many.
As in the artifact no more than 256 sequences run at the same time, and every sequence reads all of its blocks. What it
comes to where blocks that are shared are read once a step, and 1,024 sequences may run, is shown beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim, require_choice
from experiments.frame.frames import ratio, rows_where
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import check, simulation, sweep_rates
from pagedjax.config import require
from pagedjax.scalars import is_int

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SIZES = (2, 4, 6)
COMPARED = ("vllm", "orca-oracle", "orca-pow2", "orca-max")


@dataclass(frozen=True, slots=True)
class Config:
    """A system, and how requests are decoded.

    Attributes:
        system: "vllm", "orca-oracle", "orca-pow2" or "orca-max".
        decoding: "parallel" or "beam".
        size: samples of a request, or beams; 1 is neither.
        reuse_shared: whether shared blocks are read from memory once a step.
        max_num_seqs: that run at the same time.
        model: of the simulator's.
        workload: one of the simulator's, or a file.
        duration: seconds in which requests come.
        seed: of arrivals, lengths and parents.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    system: str = "vllm"
    decoding: str = "parallel"
    size: int = 1
    reuse_shared: bool = False
    max_num_seqs: int = 256
    model: str = "opt-13b"
    workload: str = "alpaca"
    duration: float = 150.0
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        require_choice("decoding", self.decoding, ("parallel", "beam"))
        check(self)
        require(is_int(self.size, 1), "size", self.size, "an integer of at least 1")


CPU_SET = [
    Config(system=system, decoding=decoding, size=size)
    for system in COMPARED
    for decoding, sizes in (("parallel", (1, *SIZES)), ("beam", SIZES))
    for size in sizes
] + [
    Config(system=system, decoding="beam", size=6, reuse_shared=True, max_num_seqs=1024)
    for system in ("vllm", "orca-oracle")
]


def run(config: Config) -> Iterable[dict[str, Any]]:
    """A record for each rate, with the knee in each; see `systems.sweep_rates`."""
    beam = {"beam_width": config.size} if config.decoding == "beam" and config.size > 1 else {"n": config.size}
    fields: dict[str, Any] = {"model": config.model, "workload": config.workload, "duration": config.duration}
    fields |= {"seed": config.seed, "reuse_shared": config.reuse_shared, "max_num_seqs": config.max_num_seqs}
    with simulation(config.system, lengths_from=config.lengths, **beam, **fields) as made:
        yield from sweep_rates(made, (0.3, 0.7))


def plot(records: pd.DataFrame) -> Figure:
    """A panel for each decoding and size, a line a system."""
    from experiments.frame.plots import new_figure
    from experiments.frame.rates import draw_latencies

    records = records[records["max_num_seqs"] == 256]
    rows = [decoding for decoding in ("parallel", "beam") if decoding in set(records["decoding"])]
    figure, panels = new_figure(len(SIZES), max(1, len(rows)), height=2.1)
    pairs = [(decoding, size) for decoding in rows for size in SIZES]
    for axes, (decoding, size) in zip(panels, pairs, strict=False):
        draw_latencies(axes, records[(records["decoding"] == decoding) & (records["size"] == size)])
        axes.set_title(f"{decoding}, size {size}")
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """vLLM's lead over Orca (Oracle), and that it grows."""
    first = records[records["seed"] == 0]
    knees = {
        (r["system"], r["decoding"], r["size"], r["reuse_shared"]): r["knee_rate"]
        for r in rows_where(first)
        if r["max_num_seqs"] == (1024 if r["reuse_shared"] else 256)
    }
    known = {"how": "simulator, parents drawn evenly", "lengths": lengths_used(first)}

    def lead(decoding: str, size: int, reuse: bool = False) -> float | None:
        return ratio(knees.get(("vllm", decoding, size, reuse)), knees.get(("orca-oracle", decoding, size, reuse)))

    found = [
        Claim(
            "rate sustained, vllm to orca-oracle, one sample",
            "Fig. 14",
            lead("parallel", 1),
            1.15,
            1.45,
            paper="1.3x",
            unit="x",
            **known,
        ),
        Claim(
            "rate sustained, vllm to orca-oracle, 6 beams",
            "Fig. 14",
            lead("beam", 6),
            1.9,
            2.7,
            paper="2.3x",
            seed="2.3x",
            unit="x",
            **known,
        ),
        Claim(
            "the same, 1,024 sequences at most, shared blocks read once a step",
            "Fig. 14",
            lead("beam", 6, True),
            1.9,
            2.7,
            paper="2.3x",
            unit="x",
            **known,
        ),
    ]
    for decoding in ("parallel", "beam"):
        leads = [lead(decoding, size) for size in SIZES]
        two, six = leads[0], leads[-1]
        growth = ratio(six, two)
        text = f"growth of vllm's lead over orca-oracle from size 2 to size 6, {decoding}"
        found.append(Claim(text, "Fig. 14", growth, 1.0, None, paper="it grows", unit="x", **known))
    return found
