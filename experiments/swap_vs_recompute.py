"""Swapping against recomputation, over the size of blocks (Fig. 19a, b).

`micro` is Fig. 19a: 256 tokens of OPT-13B out to the host and back, against computing their K and V again. The copies
are those of the artifact, an asynchronous one for each block, layer, and K or V, of the blocks that the project's own
allocator moves; each takes 3 us at least (an assumption; the paper gives no time), or what its bytes take on PCIe 4.
`serving` is Fig. 19b: ShareGPT at 2.01 requests a second, everybody swapped or everybody recomputed. `engine`
measures both on the machine at hand, with SmolLM2: this project moves the blocks of a step in one piece, so that
their size matters less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim, require_choice, require_unused
from experiments.frame.frames import figure_of, ratio, rows_where
from experiments.frame.lengths import default_lengths, lengths_used
from experiments.frame.systems import check, simulation, summary
from pagedjax.config import CacheConfig, require
from pagedjax.host.allocator import PagedAllocator
from pagedjax.request import Sequence
from pagedjax.scalars import is_int, is_number
from pagedjax.sim.records import StepShape
from pagedjax.sim.traces.rows import TraceRow
from pagedjax.sim.workload import RequestMaker

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = 256
COPY_SECONDS = 3e-6


@dataclass(frozen=True, slots=True)
class Config:
    """One size of blocks.

    Attributes:
        part: "micro" (Fig. 19a), "serving" (Fig. 19b), both in the simulator, or "engine".
        block_size: tokens a block, a power of two.
        preemption: "swap" or "recompute", in serving; the other parts do both.
        copy_seconds: that a copy takes at least.
        workload: one of the simulator's, or a file, in serving.
        rate: requests a second, in serving.
        duration: seconds in which they come, in serving.
        seed: of arrivals, lengths and prompts.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (which pagedjax ships).
    """

    part: str = "micro"
    block_size: int = 16
    preemption: str = "swap"
    copy_seconds: float = COPY_SECONDS
    workload: str = "sharegpt"
    rate: float = 2.01
    duration: float = 900.0
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        require_choice("part", self.part, ("micro", "serving", "engine"))
        require_choice("preemption", self.preemption, ("swap", "recompute"))
        size = self.block_size
        ok = is_int(size, 1) and size & (size - 1) == 0 and (self.part == "serving" or size <= TOKENS)
        require(ok, "block_size", size, f"a power of two, at most {TOKENS} but in serving")
        check(self)
        seconds = self.copy_seconds
        require(is_number(seconds) and 0 <= seconds <= 1, "copy_seconds", seconds, "from 0 to 1 second")
        if self.part != "serving":
            require_unused(self, f"part='{self.part}'", "preemption", "workload", "rate", "duration")


CPU_SET = [
    *(Config(block_size=size) for size in SIZES),
    *(Config("serving", size, preemption) for size in SIZES for preemption in ("swap", "recompute")),
    *(Config("engine", size) for size in (1, 4, 16, 64, 256)),
]
TIMED = ("measured_swap_ms", "measured_recompute_ms", "measured_ratio")


def run(config: Config) -> Iterable[dict[str, Any]]:
    """One record; of `micro` and `engine` milliseconds, of serving what the simulator sums up."""
    if config.part == "serving":
        fields = {
            "workload": config.workload,
            "block_size": config.block_size,
            "duration": config.duration,
            "seed": config.seed,
        }
        how = {"preemption": config.preemption, "swap_copy_seconds": config.copy_seconds}
        with simulation("vllm", lengths_from=config.lengths, **how, **fields) as made:
            yield summary(made, config.rate)
    elif config.part == "micro":
        yield _micro(config)
    else:
        yield _measured(config)


def runs_alone(config: Config) -> bool:
    """Whether it measures time."""
    return config.part == "engine"


def _micro(config: Config) -> dict[str, Any]:
    """By the cost model, of the blocks that the allocator moves."""
    out, back = _moves(config.block_size)
    with simulation(
        "vllm", lengths_from="statistics", block_size=config.block_size, swap_copy_seconds=config.copy_seconds
    ) as made:
        cost, layers = made.cost, made.model.num_layers
    nothing = cost.seconds(StepShape(0, 0, 0))  # what the host takes for a step
    swapped = [cost.seconds(StepShape(0, 0, 0, num_swapped=number)) - nothing for number in (out, back)]
    again = cost.seconds(StepShape(TOKENS, 1, TOKENS)) - cost.seconds(StepShape(0, 1, 0))
    return {
        "copies": out * layers * 2,
        "swap_out_ms": 1000 * swapped[0],
        "swap_in_ms": 1000 * swapped[1],
        "swap_ms": 1000 * sum(swapped),
        "recompute_ms": 1000 * again,
    }


def _moves(block_size: int) -> tuple[int, int]:
    """Blocks that the allocator moves out for a sequence of 256 tokens, and back."""
    number = TOKENS // block_size
    allocator = PagedAllocator(CacheConfig(block_size, 2 * number + 2, 0.0, num_host_blocks=number))
    request = RequestMaker().make(0, TraceRow(TOKENS, 1), 0.0)
    seq = Sequence(0, request, token_ids=list(request.prompt_token_ids), num_computed=TOKENS)
    allocator.admit([seq], alone=True)
    out = allocator.swap_out([seq])
    back = allocator.swap_in([seq], alone=True)
    return len(out), len(back)


def _measured(config: Config) -> dict[str, Any]:
    """On the machine at hand, the two in turn; the median of five rounds."""
    import statistics
    import time

    import jax
    import numpy as np

    from experiments.frame.engine import MODEL
    from pagedjax import LLM, EngineConfig, SamplingParams
    from pallas_kernels import gather_blocks, scatter_blocks

    size, number = config.block_size, TOKENS // config.block_size
    shape = {"max_num_seqs": 1, "max_num_batched_tokens": TOKENS, "max_model_len": TOKENS + 16}
    engine = LLM(MODEL, EngineConfig(block_size=size, num_blocks=number + max(2, 16 // size), **shape)).engine
    rng = np.random.default_rng(config.seed)
    ids = np.arange(1, number + 1, dtype=np.int32)
    pools = [tuple(jax.numpy.zeros_like(pool) for pool in layer) for layer in engine.runner.pool.layers]
    gather, scatter = jax.jit(gather_blocks), jax.jit(scatter_blocks, donate_argnums=0)

    def swap() -> float:
        nonlocal pools
        begun = time.perf_counter()
        host = jax.device_get(gather(pools, ids))
        pools = jax.block_until_ready(scatter(pools, ids, host))
        return time.perf_counter() - begun

    def recompute() -> float:
        prompt = {"prompt_token_ids": rng.integers(1000, 40000, TOKENS).tolist()}
        engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        begun = time.perf_counter()
        while engine.has_unfinished():
            engine.step()
        return time.perf_counter() - begun

    rounds = [(swap(), recompute()) for _ in range(6)][1:]  # the first compiles
    swapped, again = (statistics.median(times) for times in zip(*rounds, strict=True))
    return {
        "measured_swap_ms": 1000 * swapped,
        "measured_recompute_ms": 1000 * again,
        "measured_ratio": again / swapped,
    }


def plot(records: pd.DataFrame) -> Figure:
    """Fig. 19a and 19b."""
    from experiments.frame.plots import CYCLE, label_line, new_figure

    figure, (micro, serving) = new_figure(2, height=2.3)
    rows = records[records["part"] == "micro"].sort_values("block_size")
    for colour, (column, name) in zip(
        CYCLE, (("swap_ms", "swap out and in"), ("recompute_ms", "recompute")), strict=False
    ):
        if len(rows):
            micro.plot(rows["block_size"], rows[column], "o-", color=colour)
            micro.text(
                0.98,
                0.9 if column == "swap_ms" else 0.8,
                name,
                color=colour,
                ha="right",
                fontsize=7,
                transform=micro.transAxes,
            )
    for colour, name in zip(CYCLE, ("swap", "recompute"), strict=False):
        shown = records[(records["part"] == "serving") & (records["preemption"] == name)].sort_values("block_size")
        if len(shown):
            serving.plot(shown["block_size"], 1000 * shown["normalized_latency_s"], "o-", color=colour)
            last = shown.iloc[-1]
            offset = (4, 5 if name == "swap" else -5)
            label_line(serving, last["block_size"], 1000 * last["normalized_latency_s"], name, colour, offset=offset)
    for axes, label in ((micro, "time for 256 tokens (ms)"), (serving, "normalized latency (ms/token)")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, list(map(str, SIZES)))
        axes.minorticks_off()
        axes.set(xlabel="block size (tokens)", ylabel=label, ylim=(0, None))
    serving.set_xlim(0.8, 1100)
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """Counts exactly, times by the model; which of the two is better where."""
    micro = {row["block_size"]: row for row in rows_where(records, part="micro", copy_seconds=COPY_SECONDS)}
    known = {"how": "cost model, blocks of the allocator"}
    wrong = [abs(row["copies"] - TOKENS // size * 80) for size, row in micro.items()]
    complete = micro if set(micro) >= set(SIZES) else {}
    swap = [complete[size]["swap_ms"] for size in SIZES] if complete else []
    again = [complete[size]["recompute_ms"] for size in SIZES] if complete else []
    first = [swap[at + 1] - swap[at] for at in range(4)] if swap else []
    found = [
        Claim(
            "copies for 256 tokens that differ from (256 / block size) x 80, over all sizes",
            "Fig. 19a",
            float(sum(wrong)) if complete else None,
            0,
            0,
            paper="20,480 at 1, 80 at 256",
            how="counted from the allocator",
        ),
        Claim(
            "swap out and in, blocks of 1",
            "Fig. 19a",
            swap[0] if swap else None,
            90,
            150,
            paper="its axis ends at 150 ms",
            unit="ms",
            **known,
        ),
        Claim(
            "greatest change of swapping from size to size up to 16",
            "Fig. 19a",
            max(first) if first else None,
            None,
            0.0,
            paper="it falls",
            unit="ms",
            **known,
        ),
        Claim(
            "swapping at 16, to swapping at 256",
            "Fig. 19a",
            ratio(swap[4], swap[-1]) if swap else None,
            0.95,
            1.1,
            paper="flat",
            unit="x",
            **known,
        ),
        Claim(
            "recomputation, slowest size to fastest",
            "Fig. 19a",
            max(again) / min(again) if again else None,
            1.0,
            1.02,
            paper="flat",
            unit="x",
            **known,
        ),
        Claim(
            "recomputation to swapping, the most over all sizes",
            "Fig. 19a",
            max(a / s for a, s in zip(again, swap, strict=True)) if swap else None,
            None,
            1.2,
            paper="never more than 20 % above",
            unit="x",
            how="cost model, PCIe 4 at 32 GB/s; the faster the link, the larger",
        ),
    ]
    return found + _serving_claims(records)


def _serving_claims(records: pd.DataFrame) -> list[Claim]:
    serving = records[(records["part"] == "serving") & (records["seed"] == 0)]
    used = lengths_used(serving)

    def lead(size: int) -> float | None:
        """Latency with swapping over that with recomputation."""
        times = [
            figure_of(serving, "normalized_latency_s", block_size=size, preemption=policy)
            for policy in ("swap", "recompute")
        ]
        return ratio(times[0], times[1])

    known = {"how": "simulator", "lengths": used, "unit": "x"}
    middle = [lead(size) for size in (16, 32, 64)]
    apart = max(max(one, 1 / one) for one in middle if one is not None) if all(middle) else None
    found = [
        Claim(
            "latency with swapping to that with recomputation, blocks of 1",
            "Fig. 19b",
            lead(1),
            1.0,
            None,
            paper="recomputation is better",
            **known,
        ),
        Claim(
            "latency of the two apart, blocks of 16 to 64: the most",
            "Fig. 19b",
            apart,
            None,
            1.25,
            paper="comparable",
            **known,
        ),
        Claim(
            "latency with swapping to that with recomputation, blocks of 256",
            "Fig. 19b",
            lead(256),
            None,
            1.0,
            paper="swapping is better",
            **known,
        ),
    ]
    engine = {row["block_size"]: row for row in rows_where(records, part="engine")}
    text = "recomputation to swapping of 256 tokens, blocks of 16"
    ours = engine[16]["measured_ratio"] if 16 in engine else None
    found.append(Claim(text, "section 4.5", ours, 1.0, None, unit="x", how="engine, SmolLM2, CPU", timed=True))
    return found
