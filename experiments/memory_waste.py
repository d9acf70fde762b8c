"""Where the memory for the KV cache goes (Fig. 1 left, Fig. 2), and what there is of it (Table 1, Fig. 11).

Fig. 2's recipe is the artifact's: OPT-13B on an A100 with 40 GB, ShareGPT at 4 requests a second for 900 s, which is
more than any of the systems can serve; the pool is looked at in each step from 300 to 900 s. 100 % are all slots of
the pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from statistics import mean
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim, require_choice, require_unused
from experiments.frame.frames import figure_of
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import SYSTEMS, check, simulation, summary
from pagedjax.sim.hardware import find_model, make_server

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PAPER = {  # token states, reserved, internal, external and others: % of all slots
    "orca-max": (20.4, 13.3, 57.3, 8.9),
    "orca-pow2": (26.8, 17.9, 13.6, 41.6),
    "orca-oracle": (38.2, 25.2, 0.0, 36.6),
    "vllm": (96.3, None, None, None),
}
PARTS = ("token states", "reserved", "internal fragmentation", "external and others")
COLUMNS = ("token_states", "reserved", "internal_fragmentation", "others")
SLOTS = {"opt-13b": 15_700, "opt-66b": 9_700, "opt-175b": 60_100}

MOST_ROWS = 200_000
"""Of a workload, that its mean lengths are taken over: drawn ones have no end."""


@dataclass(frozen=True, slots=True)
class Config:
    """A system, overloaded.

    Attributes:
        where: "simulator", at the paper's scale, or "engine", SmolLM2 on the machine at hand.
        system: "vllm", "orca-oracle", "orca-pow2", "orca-max" or "ft".
        model: of the simulator's.
        workload: one of the simulator's, or a file.
        rate: requests a second.
        duration: seconds in which they come; memory is averaged over the last two thirds.
        num_blocks: of the pool; None is what the chips have room for.
        seed: of arrivals and lengths.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    where: str = "simulator"
    system: str = "vllm"
    model: str = "opt-13b"
    workload: str = "sharegpt"
    rate: float = 4.0
    duration: float = 900.0
    num_blocks: int | None = None
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        require_choice("where", self.where, ("simulator", "engine"))
        check(self)
        if self.where == "engine":
            require_unused(self, "where='engine'", "model", "rate", "duration", "num_blocks")


CPU_SET = [
    *(Config(system=system) for system in PAPER),
    Config(num_blocks=998),
    *(Config(model=model, rate=1.0, duration=60.0) for model in ("opt-66b", "opt-175b")),
    *(Config(where="engine", system=system) for system in PAPER),
]
TIMED = ("measured_s", "measured_tokens_per_s")


def run(config: Config) -> Iterable[dict[str, Any]]:
    """One record: the pool's slots by what they hold, and what the server has room for."""
    if config.where == "engine":
        from experiments.frame.engine import serve

        yield serve(
            workload=config.workload,
            lengths_from=config.lengths,
            num_requests=16,
            shrink=4,
            seed=config.seed,
            allocator=SYSTEMS[config.system]["allocator"],
        )
        return
    model = find_model(config.model)
    server = make_server(model)
    fields = {"model": config.model, "workload": config.workload, "duration": config.duration, "seed": config.seed}
    with simulation(config.system, lengths_from=config.lengths, num_blocks=config.num_blocks, **fields) as made:
        kept = [
            row for row in islice(made.trace.rows(config.seed), MOST_ROWS) if row.prompt_len + row.output_len < 2048
        ]
        found = summary(made, config.rate, until=config.duration)
    yield {
        **found,
        "others": found["external_fragmentation"] + found["free"],
        "slots": server.num_blocks(model, 16) * 16,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "weights_part": model.weight_bytes / (server.num_chips * server.chip.memory_bytes),
        "kv_part": server.kv_bytes / (server.num_chips * server.chip.memory_bytes),
        "mean_prompt_len": mean(row.prompt_len for row in kept),
        "mean_output_len": mean(row.output_len for row in kept),
    }


def runs_alone(config: Config) -> bool:
    """Whether it measures time."""
    return config.where == "engine"


def plot(records: pd.DataFrame) -> Figure:
    """Fig. 2: a bar a system, the paper's figures beside ours."""
    from experiments.frame.plots import CYCLE, NAMES, new_figure

    figure, (axes,) = new_figure(1, height=2.6)
    shown = records[(records["where"] == "simulator") & (records["model"] == "opt-13b") & records["num_blocks"].isna()]
    ordered = [system for system in reversed(PAPER) if system in set(shown["system"])]
    names: list[str] = []
    for system in ordered:
        row = shown[shown["system"] == system].iloc[0]
        _stack(axes, len(names), [100 * float(row[column]) for column in COLUMNS])
        names.append(NAMES[system])
        _stack(axes, len(names), [part or 0.0 for part in PAPER[system]], alpha=0.45)
        names.append("paper")
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="slots of the KV cache (%)", xlim=(0, 100))
    axes.tick_params(axis="y", length=0)
    for at, (part, colour) in enumerate(zip(PARTS, CYCLE, strict=False)):
        axes.text(
            0.5 * (at % 2), 1.12 - 0.07 * (at // 2), f"■ {part}", color=colour, transform=axes.transAxes, fontsize=6.5
        )
    return figure


def _stack(axes: Any, at: int, parts: list[float], alpha: float = 1.0) -> None:
    from experiments.frame.plots import CYCLE, mixed

    left, ink = 0.0, "white" if alpha == 1.0 else "black"
    for part, colour in zip(parts, CYCLE, strict=False):
        axes.barh(at, part, left=left, color=mixed(colour, alpha), height=0.8)
        if part >= 6:
            axes.text(left + part / 2, at, f"{part:.1f}", ha="center", va="center", fontsize=6.5, color=ink)
        left += part


def claims(records: pd.DataFrame) -> list[Claim]:
    """Fig. 2 cell by cell within two points, Table 1 within 2 %, Fig. 11's means within 0.5 %."""
    engine, records = (records[records["where"] == where] for where in ("engine", "simulator"))
    own = records[records["num_blocks"].isna() & (records["seed"] == 0) & (records["rate"] == 4.0)]
    found = _fig_2(own) + _table_1(records) + _engine_order(engine)
    known = {"how": "all rows below 2,048 tokens", "lengths": lengths_used(own)}
    vllm = own[own["system"] == "vllm"]
    for column, paper in (("mean_prompt_len", 161.31), ("mean_output_len", 337.99)):
        name = column.removeprefix("mean_").removesuffix("_len")
        ours = figure_of(vllm, column)
        bounds = (0.995 * paper, 1.005 * paper)
        text = f"mean {name} of ShareGPT"
        found.append(Claim(text, "Fig. 11", ours, *bounds, paper=f"{paper} tokens", unit="tokens", **known))
    ours, more = figure_of(vllm, "token_states"), figure_of(records, "token_states", num_blocks=998)
    off = abs(more - ours) if ours is not None and more is not None else None
    text = "change of vLLM's token states with 998 blocks in place of Table 1's"
    found.append(Claim(text, "Fig. 2", off, 0, 0.015, unit="%", how="simulator", lengths=lengths_used(own)))
    return found


def _fig_2(own: pd.DataFrame) -> list[Claim]:
    known = {"how": "simulator", "unit": "%", "lengths": lengths_used(own)}
    found = []
    for system, cells in PAPER.items():
        for part, column, paper in zip(PARTS, COLUMNS, cells, strict=True):
            if paper is None:
                continue
            ours = figure_of(own, column, system=system)
            low, high = (0.955, 0.97) if system == "vllm" else (max(0.0, paper / 100 - 0.02), paper / 100 + 0.02)
            seed = {"vllm": "96.3 %", "orca-max": "20.4 %"}.get(system) if column == "token_states" else None
            text = f"{part}, {system}"
            found.append(Claim(text, "Fig. 2", ours, low, high, paper=f"{paper} %", seed=seed, **known))
    for system, paper in (("orca-max", 0.796), ("orca-oracle", 0.618)):
        states = figure_of(own, "token_states", system=system)
        seed = "80 % before paging" if system == "orca-max" else None
        ours = None if states is None else 1 - states
        text = f"slots that hold no token, {system}"
        found.append(
            Claim(text, "Fig. 2", ours, paper - 0.02, paper + 0.02, paper=f"{100 * paper:g} %", seed=seed, **known)
        )
    return found


def _engine_order(engine: pd.DataFrame) -> list[Claim]:
    """How many of the three neighbours are in the paper's order on the engine."""
    states = [figure_of(engine, "token_states", system=system, seed=0) for system in reversed(PAPER)]
    known = [value for value in states if value is not None]
    ours = float(sum(a > b for a, b in zip(known, known[1:], strict=False))) if len(known) == len(PAPER) else None
    text = "order of token states vllm > oracle > pow2 > max: neighbours in order, of 3"
    return [
        Claim(text, "Fig. 2", ours, 3, 3, paper="in that order", how="engine, SmolLM2", lengths=lengths_used(engine))
    ]


def _table_1(records: pd.DataFrame) -> list[Claim]:
    found = []
    for model, slots in SLOTS.items():
        rows = records[(records["model"] == model) & records["num_blocks"].isna() & (records["system"] == "vllm")]
        ours = figure_of(rows, "slots")
        text = f"slots for tokens, {model}"
        found.append(
            Claim(text, "Table 1", ours, 0.98 * slots, 1.02 * slots, paper=f"{slots / 1000:.1f}K", how="arithmetic")
        )
    rows = records[(records["model"] == "opt-13b") & (records["system"] == "vllm") & records["num_blocks"].isna()]
    for text, column, paper, low, high, unit in (
        ("KV cache of a token, opt-13b", "kv_bytes_per_token", "819,200 bytes", 819_200, 819_200, "bytes"),
        ("memory that parameters take, opt-13b on 40 GB", "weights_part", "65 %", 0.60, 0.67, "%"),
        ("memory for the KV cache, opt-13b on 40 GB", "kv_part", "over 30 %", 0.29, 0.34, "%"),
    ):
        ours = figure_of(rows, column)
        found.append(Claim(text, "Fig. 1 left", ours, low, high, paper=paper, unit=unit, how="arithmetic"))
    return found
