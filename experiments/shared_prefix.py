"""Requests that begin with the same few-shot examples (Fig. 16): LLaMA-13B, translation from English to German.

One example is a prefix of 80 tokens, five are one of 341. vLLM keeps the prefix's full blocks once (336 tokens of
341); Orca (Oracle) keeps a copy for every request. The paper registers the prefix by hand; here automatic prefix
caching finds it. The lengths are those of NTREX's sentences, as the paper's WMT16 ones are not at hand. Whether the
shared blocks are read from memory once a step, as where the chip's cache holds one layer's, or once for every
sequence, is shown both ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim, require_choice, require_unused
from experiments.frame.frames import figure_of, ratio, rows_where
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import check, simulation, sweep_rates

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PREFIXES = {1: 80, 5: 341}
PAPER = {1: 1.67, 5: 3.58}
READ_ONCE = "#56B4E9"


@dataclass(frozen=True, slots=True)
class Config:
    """A system, and how much all prompts have in common.

    Attributes:
        where: "simulator", at the paper's scale, or "engine", SmolLM2 on the machine at hand.
        system: "vllm" or "orca-oracle"; with the engine, the latter shares nothing.
        shots: examples in the prefix, 1 or 5.
        reuse_shared: whether shared blocks are read from memory once a step, in the simulator.
        workload: one of the simulator's, or a file.
        duration: seconds in which requests come, in the simulator.
        seed: of arrivals, lengths and prompts.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    where: str = "simulator"
    system: str = "vllm"
    shots: int = 1
    reuse_shared: bool = False
    workload: str = "translation"
    duration: float = 300.0
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        require_choice("where", self.where, ("simulator", "engine"))
        require_choice("system", self.system, ("vllm", "orca-oracle"))
        require_choice("shots", str(self.shots), tuple(map(str, PREFIXES)))
        check(self)
        if self.where == "engine":
            require_unused(self, "where='engine'", "reuse_shared", "duration")


CPU_SET = [
    *(
        Config(system=system, shots=shots, reuse_shared=reuse)
        for shots in PREFIXES
        for system, reuse in (("orca-oracle", False), ("vllm", False), ("vllm", True))
    ),
    *(Config(where="engine", system=system) for system in ("vllm", "orca-oracle")),
]
TIMED = ("measured_s", "measured_tokens_per_s")


def run(config: Config) -> Iterable[dict[str, Any]]:
    """A record for each rate, with the knee in each (see `systems.sweep_rates`); of the engine, one."""
    prefix = PREFIXES[config.shots]
    if config.where == "engine":
        from experiments.frame.engine import serve

        yield serve(
            workload=config.workload,
            lengths_from=config.lengths,
            num_requests=12,
            shrink=2,
            seed=config.seed,
            shared_prefix=prefix,
            enable_prefix_caching=config.system == "vllm",
        )
        return
    fields: dict[str, Any] = {"model": "llama-13b", "workload": config.workload, "duration": config.duration}
    caching = {"enable_prefix_caching": config.system == "vllm", "reuse_shared": config.reuse_shared}
    with simulation(
        config.system, lengths_from=config.lengths, shared_prefix=prefix, seed=config.seed, **caching, **fields
    ) as made:
        yield from sweep_rates(made)


def runs_alone(config: Config) -> bool:
    """Whether it measures time."""
    return config.where == "engine"


def plot(records: pd.DataFrame) -> Figure:
    """A panel for each prefix."""
    from experiments.frame.plots import NAMES, new_figure
    from experiments.frame.rates import draw_latencies

    shown = records[records["where"] == "simulator"]
    figure, panels = new_figure(2, height=2.2)
    for axes, shots in zip(panels, PREFIXES, strict=True):
        once = shown[(shown["shots"] == shots) & shown["reuse_shared"]]
        if len(once):
            once = once.dropna(subset="latency_s").sort_values("rate")
            axes.plot(once["rate"], once["latency_s"], "--", color=READ_ONCE)
            name = f"- - {NAMES['vllm']}, prefix\n     read once a step"
            axes.text(0.03, 0.5, name, color=READ_ONCE, fontsize=7, transform=axes.transAxes)
        draw_latencies(axes, shown[(shown["shots"] == shots) & ~shown["reuse_shared"]])
        axes.set_title(f"{shots} example{'s' if shots > 1 else ''}, {PREFIXES[shots]} tokens")
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """vLLM's lead, which grows with the prefix; and that the engine's tokens are the same."""
    first = records[records["seed"] == 0]
    simulated = first[first["where"] == "simulator"]
    knees = {(r["system"], r["shots"], r["reuse_shared"]): r["knee_rate"] for r in rows_where(simulated)}
    used = lengths_used(simulated)
    leads: dict[tuple[int, bool], float | None] = {}
    found = []
    for shots, paper in PAPER.items():
        for reuse in (False, True):
            lead = ratio(knees.get(("vllm", shots, reuse)), knees.get(("orca-oracle", shots, False)))
            leads[shots, reuse] = lead
            low, high = (1.42, 1.92) if shots == 1 else (2.5, None)
            how = f"simulator, prefix read once {'a step' if reuse else 'for each sequence'}"
            read = ", prefix read once a step" if reuse else ""
            text = f"rate sustained, vllm to orca-oracle, {shots} example{'s' if shots > 1 else ''}{read}"
            found.append(Claim(text, "Fig. 16", lead, low, high, paper=f"{paper}x", unit="x", how=how, lengths=used))
    growth = ratio(leads[5, False], leads[1, False])
    text = "growth of vllm's lead from 1 example to 5"
    found.append(Claim(text, "Fig. 16", growth, 1.0, None, paper="2.14x", unit="x", how="simulator", lengths=used))
    engine = first[(first["where"] == "engine") & (first["shots"] == 1)]
    ours = figure_of(engine, "prefix_hit_rate", system="vllm")
    text = "part of the prompts' tokens found in the prefix cache"
    found.append(
        Claim(text, "section 4.4", ours, 0.5, 0.9, unit="%", how="engine, SmolLM2", lengths=lengths_used(engine))
    )
    hashes = {row["tokens_sha256"] for row in rows_where(engine)}
    ours = float(len(hashes)) if len(engine) == 2 else None
    text = "different outputs with and without sharing the prefix"
    found.append(Claim(text, "section 4.4", ours, 1, 1, paper="no effect on accuracy", how="engine, SmolLM2"))
    return found
