"""Automatic prefix caching: the part of the prompts' tokens that is found, by size of the cache and of its blocks.

Mooncake's trace of conversations at their own times, with the hashes of its prompts' 512-token blocks; prompts are made
32 times shorter, so that these are blocks of 16 tokens, and larger blocks of the cache hold several. Llama-3 8B on one
H100. Not in the paper, whose prefixes a provider registers.

Statistics have no hashes. Where the trace is not at hand, conversations are made by a stated process: they begin at
random, one every two seconds for half an hour, and have five rounds on average (geometric), a minute apart on average
(exponential); a round's prompt is all that was said before and a message, messages and answers as long as in ShareGPT.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim
from experiments.frame.frames import figure_of, ratio
from experiments.frame.lengths import STATISTICS, default_lengths, lengths, lengths_used
from experiments.frame.systems import check, simulation, summary
from pagedjax.config import require
from pagedjax.scalars import is_int
from pagedjax.sim.traces import open_trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SHRINK = 32
TOKENS = (16_384, 65_536, 262_144, 1_048_576)
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Config:
    """Llama-3 8B on an H100.

    Attributes:
        cache_tokens: of the pool, which holds what runs and, as far as there is room, what has been.
        block_size: tokens a block: what is found is whole blocks.
        caching: False looks for nothing.
        workload: one of the simulator's, or a file, with arrivals and hashes.
        shrink: prompts are as many times shorter.
        seed: which does nothing with a trace that has its own arrivals.
        lengths: "real" (of the folder PAGEDJAX_DATA) or "statistics" (of which conversations are made).
    """

    cache_tokens: int = 262_144
    block_size: int = 16
    caching: bool = True
    workload: str = "mooncake-conv"
    shrink: int = SHRINK
    seed: int = 0
    lengths: str = field(default_factory=default_lengths)

    def __post_init__(self) -> None:
        check(self)
        shrink, size = self.shrink, self.block_size
        require(
            is_int(shrink, 1) and 512 % shrink == 0, "shrink", shrink, "a divisor of the 512 tokens of a hashed block"
        )
        require(is_int(self.cache_tokens, size), "cache_tokens", self.cache_tokens, f"at least the {size} of a block")


CPU_SET = [
    *(Config(cache_tokens=tokens) for tokens in TOKENS),
    *(Config(block_size=size) for size in BLOCK_SIZES[1:]),
    Config(caching=False),
]


def run(config: Config) -> Iterable[dict[str, Any]]:
    """One record: what is summed up of the run."""
    with _trace(config) as workload:
        fields: dict[str, Any] = {
            "model": "llama3-8b",
            "chip": "h100",
            "arrivals": "trace",
            "shrink_prompts": config.shrink,
            "enable_prefix_caching": config.caching,
            "block_size": config.block_size,
            "num_blocks": config.cache_tokens // config.block_size,
            "max_model_len": 8192,
            "max_num_batched_tokens": 8192,
            "overlap": True,
            "seed": config.seed,
        }
        with simulation("vllm", lengths_from=config.lengths, workload=workload, **fields) as made:
            row = summary(made, None)
    made_up = config.lengths == STATISTICS
    note = "conversations made of the lengths of ShareGPT that pagedjax ships" if made_up else row["note"]
    yield {**row, "lengths_are_statistics": made_up, "note": note}


@contextmanager
def _trace(config: Config) -> Iterator[str]:
    """The workload, or a file of conversations that are made up."""
    if config.lengths != STATISTICS or config.workload != "mooncake-conv":
        yield config.workload
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "conversations.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in _conversations(config)), encoding="utf-8")
        yield str(path)


def _conversations(config: Config) -> list[dict[str, Any]]:
    """Rows as Mooncake's: a hash for 512 tokens, so that prompts are as many times longer as they will be shortened."""
    rng, rows, begun = random.Random(config.seed), [], 0.0
    with lengths(STATISTICS):
        messages = open_trace("sharegpt-v3").rows(config.seed)
    for conversation in range(900):
        begun += rng.expovariate(0.5)
        now, said = begun, 0
        while True:
            message = next(messages)
            said += message.prompt_len
            if said + message.output_len > 4096:
                break
            hashes = [conversation * 1000 + block for block in range(-(-said * config.shrink // 512))]
            rows.append((now, said * config.shrink, message.output_len, hashes))
            said += message.output_len
            if rng.random() < 0.2:
                break
            now += rng.expovariate(1 / 60)
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return [dict(zip(keys, (round(1000 * time), *rest), strict=True)) for time, *rest in sorted(rows)]


def plot(records: pd.DataFrame) -> Figure:
    """Over the size of the cache, and over that of its blocks."""
    from experiments.frame.plots import COLOURS, new_figure

    figure, (cache, blocks) = new_figure(2, height=2.2, sharey=True)
    found = records[records["caching"]]
    by_size = found[found["block_size"] == 16].sort_values("cache_tokens")
    cache.plot(by_size["cache_tokens"] / 1024, 100 * by_size["prefix_hit_rate"], "o-", color=COLOURS["vllm"])
    cache.set_xscale("log", base=2)
    cache.set_xticks([tokens / 1024 for tokens in TOKENS], [f"{tokens // 1024}" for tokens in TOKENS])
    cache.set(xlabel="size of the pool (1,024 tokens)", ylabel="prompt tokens found (%)", ylim=(0, None))
    by_block = found[found["cache_tokens"] == 262_144].sort_values("block_size")
    blocks.plot(by_block["block_size"], 100 * by_block["prefix_hit_rate"], "o-", color=COLOURS["vllm"])
    blocks.set_xscale("log", base=2)
    blocks.set_xticks(BLOCK_SIZES, list(map(str, BLOCK_SIZES)))
    blocks.set(xlabel="block size (tokens)")
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """More is found in a larger cache, and in smaller blocks; and the first token comes earlier for it."""
    own = records[records["seed"] == 0]
    found = own[own["caching"]] if len(own) else own
    known = {"how": "simulator", "lengths": lengths_used(own)}

    def rate(tokens: int, size: int) -> float | None:
        return figure_of(found, "prefix_hit_rate", cache_tokens=tokens, block_size=size)

    by_size = [rate(tokens, 16) for tokens in TOKENS]
    by_block = [rate(262_144, size) for size in BLOCK_SIZES]
    first = [
        figure_of(own, "time_to_first_token_s", cache_tokens=262_144, block_size=16, caching=caching)
        for caching in (False, True)
    ]
    where = "not in the paper"
    return [
        Claim(
            "prompt tokens found, 262,144 tokens, blocks of 16", where, rate(262_144, 16), 0.1, None, unit="%", **known
        ),
        Claim(
            "least growth of what is found from pool to larger pool",
            where,
            _least_step(by_size),
            0.0,
            None,
            unit="%",
            **known,
        ),
        Claim(
            "least loss of what is found from blocks to larger blocks",
            where,
            _least_step(by_block[::-1]),
            0.0,
            None,
            unit="%",
            **known,
        ),
        Claim(
            "time to the first token (mean), without caching to with it",
            where,
            ratio(*first),
            1.0,
            None,
            unit="x",
            **known,
        ),
    ]


def _least_step(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(b - a for a, b in zip(known, known[1:], strict=False)) if len(known) == len(values) else None
