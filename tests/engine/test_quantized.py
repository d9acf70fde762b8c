"""An int8 or float8 pool: half the memory or less, nearly the same logprobs, and as invariant as any other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_harness import Runs

from pagedjax.config import EngineConfig
from pagedjax.engine import Engine
from pagedjax.models.loader import LoadedModel
from pagedjax.request import SamplingParams

# What each kind of number may move a logprob of the real model by, over 16 tokens; int8 moved one by 0.12.
NEAR = {"int8": 0.2, "float8_e4m3fn": 0.5}


@pytest.mark.parametrize("dtype", NEAR)
def test_the_real_model_says_nearly_the_same(smollm2: LoadedModel, golden: dict[str, Any], dtype: str) -> None:
    # What transformers said is given as a prompt: with it left free, a near tie could lead elsewhere.
    engine = Engine(
        smollm2,
        EngineConfig(kv_cache_dtype=dtype, num_blocks=64, max_model_len=256, max_num_batched_tokens=16, max_num_seqs=4),
    )
    prompts = [case["prompt_ids"] + case["output_ids"][:16] for case in golden["greedy"]]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for out, case in zip(Runs(smollm2).run(engine, prompts, params), golden["greedy"], strict=True):
        last = list(zip(out.prompt_logprobs, out.prompt_token_ids, strict=True))[-16:]
        given = [position[token].logprob for position, token in last]
        np.testing.assert_allclose(given, case["output_token_logprob"][:16], rtol=0, atol=NEAR[dtype])
        assert not np.array_equal(given, case["output_token_logprob"][:16]), "nothing was rounded"


@pytest.mark.parametrize("dtype", NEAR)
def test_tokens_depend_on_neither_blocks_nor_chunks_nor_preemption(runs: Runs, dtype: str) -> None:
    prompts = runs.prompts(20, 3, 33, 11)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
    outs = [
        runs.run(runs.engine(kv_cache_dtype=dtype, **config), prompts, params)
        for config in (
            {"block_size": 4},
            {"block_size": 16, "max_num_batched_tokens": 8},
            {"block_size": 4, "num_blocks": 14},
        )
    ]
    tokens = [[list(out.outputs[0].token_ids) for out in each] for each in outs]
    assert tokens[0] == tokens[1] == tokens[2]
    assert any(out.metrics.num_preemptions for out in outs[2]), "the small pool must have preempted"
