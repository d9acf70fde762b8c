"""What is simulated: one flat configuration, from which the command line's flags are made too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedjax.baselines import PAGED
from pagedjax.config import require
from pagedjax.scalars import is_int, is_number, make_plain
from pagedjax.sim.workload import ARRIVALS, require_rate

PAPER, OWN = "paper", "trace"


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What is simulated, flat. The defaults are the paper's system and workload (section 6.1).

    Attributes:
        model: one of the models known; `pagedjax simulate --model ?` names them.
        chip: one of the chips known; None is the paper's for this model.
        num_chips: tensor-parallel, 1, 4 or 8; None is the paper's number for this model and chip, else 1.
        cost_model: file of `pagedjax bench --step-times`, measured on the machine at hand, instead of a chip.
        workload: a name (real lengths where PAGEDJAX_DATA is a folder that has them, else statistics), or a file.
        workload_format: of that file; None finds out.
        tokenizer: name or folder of the one that counts the tokens of a file of texts; None is the bundled model's.
        arrivals: "paper" (counts in bins of 10 ms, and the first lengths of the file, shuffled), "poisson", "gamma" (in
            bursts) or "constant" with lengths drawn at random, or "trace": rows and times as they are in the file.
        rate: requests a second; None with arrivals="trace".
        duration: seconds in which requests come. The run goes on until all have ended.
        warmup: seconds before memory and batches are averaged, which ends with `duration`; None is a third of it.
        seed: of arrivals and lengths.
        n: samples of each request.
        beam_width: beams of each request; 0 is no beam search.
        shrink_prompts: makes prompts as many times shorter, and so the blocks of their hashes: 32 makes blocks of 512
            tokens blocks of 16.
        allocator: as in `EngineConfig`.
        batching: as in `EngineConfig`; a static batch is padded, as FasterTransformer's.
        block_size: tokens per block, a power of two.
        num_blocks: usable blocks; None is what the chips have room for.
        swap_space: bytes of the host's memory; None is 20 GiB a chip with paging, else 0.
        watermark: part of the blocks that admission keeps free.
        max_num_seqs: sequences that run at the same time; with static batching, the size of a batch.
        max_num_batched_tokens: tokens computed in one step; None is 2,560, or what whole prompts need if that is more.
        max_model_len: tokens that a sequence may reach; None is the model's limit.
        enable_chunked_prefill: False computes every prompt whole, in one step.
        enable_prefix_caching: share blocks among prompts that begin alike.
        preemption: as in `EngineConfig`.
        overlap: plan a step while the one before it is computed.
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
    duration: float = 900.0
    warmup: float | None = None
    seed: int = 0
    n: int = 1
    beam_width: int = 0
    shrink_prompts: int = 1
    allocator: str = PAGED
    batching: str = "continuous"
    block_size: int = 16
    num_blocks: int | None = None
    swap_space: int | None = None
    watermark: float = 0.01
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_chunked_prefill: bool = False
    enable_prefix_caching: bool = False
    preemption: str = "auto"
    overlap: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        known = (PAPER, *ARRIVALS, OWN)
        require(self.arrivals in known, "arrivals", self.arrivals, f"one of {', '.join(known)}")
        if self.rate is not None:
            require_rate(self.rate)
            allowed = 'None with arrivals="trace", whose requests come when they came'
            require(self.arrivals != OWN, "rate", self.rate, allowed)
        _require_seconds("duration", self.duration, self.duration)
        if self.warmup is not None:
            ok = is_number(self.warmup) and 0 <= self.warmup < self.duration
            require(ok, "warmup", self.warmup, f"from 0 to less than duration={self.duration} seconds")
        for name, least in (("n", 1), ("beam_width", 0), ("shrink_prompts", 1), ("seed", 0), ("max_num_seqs", 1)):
            require(is_int(getattr(self, name), least), name, getattr(self, name), f"an integer of at least {least}")
        for name in ("num_blocks", "max_num_batched_tokens", "max_model_len", "swap_space"):
            value, least = getattr(self, name), int(name != "swap_space")
            ok = value is None or is_int(value, least)
            require(ok, name, value, f"None or an integer of at least {least}")
        require(self.n == 1 or not self.beam_width, "n", self.n, f"1 with beam_width={self.beam_width}")
        other = self.chip or self.num_chips
        require(self.cost_model is None or other is None, "cost_model", self.cost_model, f"None with chip={other}")


def _require_seconds(name: str, value: Any, given: object) -> None:
    require(is_number(value) and value > 0, name, given, "a positive number of seconds")
