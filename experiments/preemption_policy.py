"""What to do with who is preempted: recompute, swap, or the paper's rule (section 4.5), over the size of requests.

The paper recomputes requests of one sequence and swaps those of several, which share blocks. In the simulator OPT-13B
is overloaded by requests with 1, 2 or 4 samples; what counts is how many requests end a second. On the engine a pool
is too small for what comes, and the tokens must be the same whatever is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim, require_choice, require_unused
from experiments.frame.frames import figure_of, ratio
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import check, simulation, summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

POLICIES = ("recompute", "swap", "auto")


@dataclass(frozen=True, slots=True)
class Config:
    """vLLM, with more to do than memory for it.

    Attributes:
        where: "simulator", at the paper's scale, or "engine", SmolLM2 on the machine at hand.
        preemption: "recompute", "swap", or "auto", the paper's rule.
        n: samples of each request.
        workload: one of the simulator's, or a file.
        rate: requests a second, in the simulator.
        duration: seconds in which they come, in the simulator.
        seed: of arrivals, lengths and prompts.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    where: str = "simulator"
    preemption: str = "auto"
    n: int = 1
    workload: str = "sharegpt"
    rate: float = 4.0
    duration: float = 900.0
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        require_choice("where", self.where, ("simulator", "engine"))
        require_choice("preemption", self.preemption, POLICIES)
        check(self)
        if self.where == "engine":
            require_unused(self, "where='engine'", "rate", "duration")


CPU_SET = [
    *(Config(preemption=policy, n=n) for n in (1, 2, 4) for policy in POLICIES),
    *(Config(where="engine", preemption=policy, n=2) for policy in POLICIES),
]
TIMED = ("measured_s", "measured_tokens_per_s")


def run(config: Config) -> Iterable[dict[str, Any]]:
    """One record: what is summed up of the run."""
    if config.where == "engine":
        from experiments.frame.engine import serve

        yield serve(
            workload=config.workload,
            lengths_from=config.lengths,
            num_requests=6,
            shrink=4,
            seed=config.seed,
            n=config.n,
            preemption=config.preemption,
            swap_space=0 if config.preemption == "recompute" else 64 << 20,
        )
        return
    fields: dict[str, Any] = {"workload": config.workload, "duration": config.duration, "seed": config.seed}
    with simulation("vllm", lengths_from=config.lengths, preemption=config.preemption, n=config.n, **fields) as made:
        yield summary(made, config.rate, until=config.duration)


def runs_alone(config: Config) -> bool:
    """Whether it measures time."""
    return config.where == "engine"


def plot(records: pd.DataFrame) -> Figure:
    """Requests that end a second, by samples and policy."""
    from experiments.frame.plots import CYCLE, bar_labels, new_figure

    figure, (axes,) = new_figure(1, height=2.3)
    shown = records[records["where"] == "simulator"]
    sizes = sorted(set(shown["n"]))
    for shift, (policy, colour) in enumerate(zip(POLICIES, CYCLE, strict=False)):
        rows = shown[shown["preemption"] == policy].sort_values("n")
        if rows.empty:
            continue
        at = [sizes.index(n) + 0.27 * (shift - 1) for n in rows["n"]]
        bar_labels(axes, axes.bar(at, rows["requests_per_s"], 0.25, color=colour), "{:.2f}".format)
        axes.text(0.98, 0.95 - 0.08 * shift, policy, color=colour, ha="right", fontsize=7, transform=axes.transAxes)
    axes.set_xticks(range(len(sizes)), list(map(str, sizes)))
    axes.set(xlabel="samples of a request", ylabel="requests that end (1/s)")
    axes.margins(y=0.15)
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """Single sequences lose little by recomputation; what is done changes no token."""
    first = records[records["seed"] == 0]
    simulated, engine = first[first["where"] == "simulator"], first[first["where"] == "engine"]
    used = lengths_used(simulated)

    def served(policy: str, n: int) -> float | None:
        return figure_of(simulated, "requests_per_s", preemption=policy, n=n)

    found = [
        Claim(
            "requests that end, recompute to swap, 1 sample",
            "Fig. 19b",
            ratio(served("recompute", 1), served("swap", 1)),
            0.9,
            1.1,
            paper="comparable at blocks of 16",
            seed="recompute where prompts are short or host memory tight",
            unit="x",
            how="simulator",
            lengths=used,
        ),
        Claim(
            "requests that end, the paper's rule to the better of both, 1 to 4 samples: the least",
            "section 4.5",
            _least_of_auto(simulated),
            0.9,
            None,
            unit="x",
            how="simulator",
            lengths=used,
        ),
    ]
    hashes = set(engine["tokens_sha256"]) if len(engine) else set()
    ours = float(len(hashes)) if len(engine) == len(POLICIES) else None
    text = "different outputs of the three"
    found.append(Claim(text, "section 4.5", ours, 1, 1, paper="no effect on accuracy", how="engine, SmolLM2"))
    ours = float(engine["preemptions"].min()) if len(engine) == len(POLICIES) else None
    text = "fewest preemptions of the three, so that there was something to see"
    found.append(Claim(text, "section 4.5", ours, 1, None, how="engine, SmolLM2"))
    return found


def _least_of_auto(simulated: pd.DataFrame) -> float | None:
    parts = []
    for n in (1, 2, 4):
        auto, *others = (
            figure_of(simulated, "requests_per_s", preemption=policy, n=n) for policy in ("auto", "recompute", "swap")
        )
        known = [other for other in others if other is not None]
        if auto is None or len(known) < 2:
            return None
        parts.append(auto / max(known))
    return min(parts)
