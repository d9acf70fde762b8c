"""A random model, small enough that an engine compiles in seconds, and how tests run requests through engines of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.engine import Engine
from pagedjax.models.loader import LoadedModel
from pagedjax.request import RequestOutput, SamplingParams

TINY = ModelConfig(
    vocab_size=384,
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)


_PROGRAMS: dict[tuple[object, ...], dict[str, Any]] = {}


def forget_programs() -> None:
    """Lets go of what `Shared` keeps."""
    for programs in _PROGRAMS.values():
        programs.clear()


class Shared:
    """Makes engines that share their compiled programs, where those would be the same."""

    def engine(self, model: LoadedModel, config: EngineConfig) -> Engine:
        return self.share(Engine(model, config, progress=False))

    def share(self, engine: Engine) -> Engine:
        info, config, programs = engine.pool_info, engine.config, engine.runner.programs
        shapes = (info.num_blocks, info.layout, config.dtype, config.max_num_seqs, engine.max_model_len)
        programs._compiled = _PROGRAMS.setdefault((engine.model_config, programs.backend, *shapes), {})
        return engine


class Runs:
    """Makes engines of the tiny model and runs requests through them."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._shared = Shared()

    def engine(self, **config: Any) -> Engine:
        return self._shared.engine(self.model, self.config(**config))

    def share(self, engine: Engine) -> Engine:
        """An engine that was made otherwise, with the programs of those like it."""
        return self._shared.share(engine)

    def fresh_engine(self, **config: Any) -> Engine:
        """One that has compiled nothing yet."""
        return Engine(self.model, self.config(**config))

    def config(self, **config: Any) -> EngineConfig:
        defaults = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
        return EngineConfig(**{**defaults, **config})

    def prompts(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        return [rng.integers(1, TINY.vocab_size, length).tolist() for length in lengths]

    def run(
        self, engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[RequestOutput]:
        """Final outputs, in the order of the prompts."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        ids = [engine.add_request({"prompt_token_ids": p}, q) for p, q in zip(prompts, each, strict=True)]
        done = {output.request_id: output for output in drain(engine) if output.finished}
        return [done[request_id] for request_id in ids]


def drain(engine: Engine) -> Iterator[RequestOutput]:
    """Steps until nothing is left."""
    while engine.has_unfinished():
        yield from engine.step()
        engine.scheduler.check_invariants()


def preempt_all(engine: Engine) -> None:
    """Takes the memory of everybody that runs, as if somebody had needed it."""
    roster = engine.scheduler.roster
    while roster.running:
        roster.preempt(roster.running[-1])
