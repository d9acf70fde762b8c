"""What is simulated: one flat configuration, from which the command line's flags are made too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedjax.baselines import PAGED
from pagedjax.config import require
from pagedjax.scalars import is_int, is_number, make_plain
from pagedjax.sim.workload import ARRIVALS, require_rate

PAPER, OWN = "paper", "trace"

LONGEST = 10_000_000
"""Seconds in which requests may come."""

MOST_REQUESTS = 5_000_000
"""That are drawn, and kept in memory, before a run."""

MOST_BLOCKS = 10_000_000
"""Of the pool, or of the swap space."""

_RANGES = {
    "n": (1, 1_000_000),
    "beam_width": (0, 1_000_000),
    "shrink_prompts": (1, 1_000_000),
    "shared_prefix": (0, 1 << 30),
    "seed": (0, 2**32 - 1),  # what numpy's generator takes, which the paper's recipe asks for
}
_OPTIONAL_RANGES = {
    "block_size": (1, 1 << 20),
    "cut_prompts": (1, 1 << 30),
    "cut_outputs": (1, 1 << 30),
    "num_blocks": (1, MOST_BLOCKS),
    "swap_space": (0, 1 << 50),
    "max_num_seqs": (1, 1_000_000),
    "max_num_batched_tokens": (1, 1 << 40),
    "max_model_len": (2, 1 << 30),
}


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What is simulated, flat. The defaults are the paper's system and workload (section 6.1).

    Attributes:
        model: one of the models known, which the error for any other names; so do those for other names below.
        chip: one of the chips known; None is the paper's for this model.
        num_chips: tensor-parallel, 1, 4 or 8; None is the paper's number for this model and chip, else 1.
        cost_model: file of `pagedjax bench --step-times`, measured on the machine at hand, instead of a chip. What is
            None below is then as in the engine that was measured.
        workload: a name (real lengths where PAGEDJAX_DATA is a folder that has them, else statistics), or a file.
        workload_format: of that file; None finds out.
        tokenizer: name or folder of the one that counts the tokens of a file of texts; None is the bundled model's.
        arrivals: "paper" (counts in bins of 10 ms, and the first lengths of the file, shuffled), "poisson", "gamma" (in
            bursts) or "constant" with lengths drawn at random, or "trace": rows and times as they are in the file.
        rate: requests a second; None with arrivals="trace".
        duration: seconds in which requests come; None is 900, with arrivals="trace" all of it. The run goes on until
            all have ended.
        warmup: seconds before memory and batches are averaged, until `duration` is over; None is a third of that, or 0
            with none given for a trace.
        seed: of arrivals and lengths.
        n: samples of each request.
        beam_width: beams of each request; 0 is no beam search.
        cut_prompts: prompts are cut to their last so many tokens; None is whole prompts.
        cut_outputs: outputs end after so many tokens; None is whole outputs.
        shared_prefix: tokens, the same for all, that each prompt begins with beside its own; its full blocks are shared
            with enable_prefix_caching.
        shrink_prompts: makes prompts as many times shorter, and so the blocks of their hashes: 32 makes blocks of 512
            tokens blocks of 16.
        allocator: as in `EngineConfig`.
        batching: as in `EngineConfig`; on a chip, a static batch is padded to its longest, as FasterTransformer's.
        block_size: tokens per block, a power of two; None is 16.
        num_blocks: usable blocks; None is what the chips have room for.
        swap_space: bytes of the host's memory; None is 20 GiB a chip with paging, else 0.
        watermark: part of the blocks that admission keeps free.
        max_num_seqs: sequences that run at the same time; with static batching, the size of a batch. None is 256.
        max_num_batched_tokens: tokens computed in one step; None is 2,560, or what whole prompts need if that is more.
        max_model_len: tokens that a sequence may reach; None is the model's limit.
        enable_chunked_prefill: False computes every prompt whole, in one step; None is that.
        enable_prefix_caching: share blocks among prompts that begin alike.
        preemption: as in `EngineConfig`.
        swap_copy_seconds: that each copy takes at least which swapping makes, one a block, layer, and K or V as in the
            artifact; with a chip.
        reuse_shared: blocks that several sequences share are read from memory once a step, as where the chip's cache
            holds them; with a chip.
        overlap: plan a step while the one before it is computed, so that the host's time is hidden; None is False.
    """

    model: str = "opt-13b"
    chip: str | None = None
    num_chips: int | None = None
    cost_model: str | None = None
    workload: str = "sharegpt"
    workload_format: str | None = None
    tokenizer: str | None = None
    arrivals: str = PAPER
    rate: float | None = None
    duration: float | None = None
    warmup: float | None = None
    seed: int = 0
    n: int = 1
    beam_width: int = 0
    cut_prompts: int | None = None
    cut_outputs: int | None = None
    shared_prefix: int = 0
    shrink_prompts: int = 1
    allocator: str = PAGED
    batching: str = "continuous"
    block_size: int | None = None
    num_blocks: int | None = None
    swap_space: int | None = None
    watermark: float = 0.01
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool = False
    preemption: str = "auto"
    swap_copy_seconds: float = 0.0
    reuse_shared: bool = False
    overlap: bool | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        known = (PAPER, *ARRIVALS, OWN)
        require(self.arrivals in known, "arrivals", self.arrivals, f"one of {', '.join(known)}")
        if self.rate is not None:
            require_rate(self.rate)
            allowed = 'None with arrivals="trace", whose requests come when they came'
            require(self.arrivals != OWN, "rate", self.rate, allowed)
        _require_seconds(self)
        self._require_integers()
        for name in ("enable_chunked_prefill", "overlap"):
            require(getattr(self, name) in (None, True, False), name, getattr(self, name), "None, True or False")
        require(self.n == 1 or not self.beam_width, "n", self.n, f"1 with beam_width={self.beam_width}")
        ok = is_number(self.swap_copy_seconds) and 0 <= self.swap_copy_seconds <= 1
        require(ok, "swap_copy_seconds", self.swap_copy_seconds, "from 0 to 1 second")
        given = self.cost_model
        require(given is None or isinstance(given, str | Path), "cost_model", given, "None or a path")
        if given is not None:
            object.__setattr__(self, "cost_model", str(given))
        other = self.chip or self.num_chips
        require(given is None or other is None, "cost_model", given, f"None with chip={other}")
        for name in ("swap_copy_seconds", "reuse_shared"):
            value = getattr(self, name)
            require(given is None or not value, name, value, f"{value.__class__(0)} with cost_model={given}")

    def _require_integers(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            require(is_int(value, least) and value <= most, name, value, f"an integer from {least} to {most:,}")
        for name, (least, most) in _OPTIONAL_RANGES.items():
            value = getattr(self, name)
            ok = value is None or (is_int(value, least) and value <= most)
            require(ok, name, value, f"None or an integer from {least} to {most:,}")
        size = self.block_size
        require(
            size is None or size & (size - 1) == 0, "block_size", size, "None or a power of two (1, 2, 4, ... tokens)"
        )


def _require_seconds(config: SimulationConfig) -> None:
    duration, warmup, rate = config.duration, config.warmup, config.rate
    ok = duration is None or (is_number(duration) and 0 < duration <= LONGEST)
    require(ok, "duration", duration, f"None, or above 0 and at most {LONGEST:,} seconds")
    end = resolved_duration(config)
    if warmup is not None:
        ok = is_number(warmup) and 0 <= warmup < end
        require(ok, "warmup", warmup, f"None, or from 0 to less than the {end:g} seconds of the duration")
    if rate is not None and config.arrivals == PAPER:
        allowed = f'at most {MOST_REQUESTS / end:g} a second for {end:g} seconds of arrivals="paper", drawn all at once'
        require(rate * end <= MOST_REQUESTS, "rate", rate, allowed)


def resolved_duration(config: SimulationConfig) -> float:
    """Seconds in which requests come; infinite for all of a trace."""
    if config.duration is not None:
        return config.duration
    return float("inf") if config.arrivals == OWN else 900.0
