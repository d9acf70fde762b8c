"""Prompts in chunks beside decodes, or whole in a step: the size of a step against how evenly tokens come.

Not in the paper, whose artifact computes whole prompts (up to 2,560 tokens a step). Long prompts (arXiv summaries) on
Llama-3 8B and one H100 at three requests a second, with the host's planning hidden; on the engine, the tokens must be
the same whatever the size.
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

SIZES = (256, 512, 1024, 2048, 4096)
ENGINE_SIZES = (8, 16, 64)


@dataclass(frozen=True, slots=True)
class Config:
    """vLLM, with prompts in chunks.

    Attributes:
        where: "simulator", at the scale of an H100, or "engine", SmolLM2 on the machine at hand.
        max_num_batched_tokens: of one step; a prompt that has more is computed in several.
        chunked: False computes whole prompts, in the simulator, and needs as many tokens a step as the longest has.
        workload: one of the simulator's, or a file.
        rate: requests a second, in the simulator.
        duration: seconds in which they come, in the simulator.
        seed: of arrivals, lengths and prompts.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    where: str = "simulator"
    max_num_batched_tokens: int = 512
    chunked: bool = True
    workload: str = "arxiv"
    rate: float = 3.0
    duration: float = 300.0
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        require_choice("where", self.where, ("simulator", "engine"))
        check(self)
        if self.where == "engine":
            require_unused(self, "where='engine'", "chunked", "rate", "duration")


CPU_SET = [
    *(Config(max_num_batched_tokens=size) for size in SIZES),
    Config(max_num_batched_tokens=8192, chunked=False),
    *(Config(where="engine", max_num_batched_tokens=size) for size in ENGINE_SIZES),
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
            shrink=32,
            seed=config.seed,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        return
    fields: dict[str, Any] = {
        "model": "llama3-8b",
        "chip": "h100",
        "workload": config.workload,
        "arrivals": "poisson",
        "duration": config.duration,
        "seed": config.seed,
        "enable_chunked_prefill": config.chunked,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": 8192,
        "overlap": True,
    }
    with simulation("vllm", lengths_from=config.lengths, **fields) as made:
        yield summary(made, config.rate)


def runs_alone(config: Config) -> bool:
    """Whether it measures time."""
    return config.where == "engine"


def plot(records: pd.DataFrame) -> Figure:
    """Times to the first token and between tokens, over the size of a step."""
    from experiments.frame.plots import CYCLE, label_line, new_figure

    figure, panels = new_figure(2, height=2.2)
    shown = records[(records["where"] == "simulator") & (records["chunked"] == True)]  # noqa: E712
    shown = shown.sort_values("max_num_batched_tokens")
    whole = records[(records["where"] == "simulator") & (records["chunked"] == False)]  # noqa: E712
    for axes, name, label in zip(
        panels, ("time_to_first_token", "time_between_tokens"), ("to the first token", "between tokens"), strict=True
    ):
        for end, colour, short in (("_p50_s", CYCLE[0], "median"), ("_p99_s", CYCLE[1], "99 %")):
            if len(shown):
                values = 1000 * shown[name + end]
                axes.plot(shown["max_num_batched_tokens"], values, "o-", color=colour)
                label_line(axes, shown["max_num_batched_tokens"].iloc[-1], values.iloc[-1], short, colour)
            if len(whole):
                axes.axhline(1000 * whole[name + end].iloc[0], color=colour, linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, list(map(str, SIZES)))
        axes.minorticks_off()
        axes.set(xlabel="tokens a step (dotted: whole prompts)", ylabel=f"time {label} (ms)", ylim=(0, None))
        axes.set_xlim(SIZES[0] * 0.9, SIZES[-1] * 2)
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """Smaller steps make tokens come more evenly, larger ones the first token earlier; tokens are the same."""
    first = records[records["seed"] == 0]
    simulated, engine = first[first["where"] == "simulator"], first[first["where"] == "engine"]
    known = {"how": "simulator", "lengths": lengths_used(simulated), "unit": "x"}

    def of(column: str, size: int, chunked: bool = True) -> float | None:
        return figure_of(simulated, column, max_num_batched_tokens=size, chunked=chunked)

    between = "time_between_tokens_p99_s"
    found = [
        Claim(
            "99 % of times between tokens, whole prompts to chunks of 512",
            "not in the paper",
            ratio(of(between, 8192, False), of(between, 512)),
            1.2,
            None,
            **known,
        ),
        Claim(
            "time to the first token (mean), chunks of 256 to chunks of 2,048",
            "not in the paper",
            ratio(of("time_to_first_token_s", 256), of("time_to_first_token_s", 2048)),
            1.0,
            None,
            **known,
        ),
    ]
    hashes = set(engine["tokens_sha256"]) if len(engine) else set()
    ours = float(len(hashes)) if len(engine) == len(ENGINE_SIZES) else None
    found.append(
        Claim(
            "different outputs with chunks of 8, 16 and 64 tokens",
            "not in the paper",
            ours,
            1,
            1,
            how="engine, SmolLM2",
        )
    )
    return found
