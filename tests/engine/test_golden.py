"""The real model against what `transformers` gave for it (tests/data/golden_smollm2.json; see the `golden` fixture).

Token ids must be equal, log-probabilities within 1e-3: two ways of computing them in `transformers` differ by 6.5e-5.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_harness import Shared

from pagedjax import faults
from pagedjax.config import EngineConfig
from pagedjax.engine import Engine
from pagedjax.models.loader import LoadedModel
from pagedjax.request import RequestOutput, SamplingParams

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
WITH_LOGPROBS = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, logprobs=5, prompt_logprobs=5)
LIMIT = 1e-3


def run(engine: Engine, cases: list[dict[str, Any]], params: SamplingParams) -> list[RequestOutput]:
    ids = [engine.add_request({"prompt_token_ids": case["prompt_ids"]}, params) for case in cases]
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [done[request_id] for request_id in ids]


SHARED = Shared()


def make(model: LoadedModel, **config: Any) -> Engine:
    defaults: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "block_size": 16, "num_blocks": 128}
    return SHARED.engine(model, EngineConfig(**{**defaults, **config}))


@pytest.mark.parametrize(
    ("block_size", "chunk", "num_slots"),
    [
        (16, 512, 2048),
        (16, 64, 2048),
        (16, 7, 2048),
        (1, 7, 1024),
        (4, 64, 1024),
        (64, 512, 2048),
        (256, 64, 2048),
        (16, 64, 224),  # the four need 4 x 7 blocks: half of them are preempted
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    smollm2: LoadedModel, golden: dict[str, Any], block_size: int, chunk: int, num_slots: int
) -> None:
    engine = make(smollm2, block_size=block_size, max_num_batched_tokens=chunk, num_blocks=num_slots // block_size)
    for case, output in zip(golden["greedy"], run(engine, golden["greedy"], GREEDY), strict=True):
        assert output.outputs[0].token_ids == case["output_ids"], case["prompt"]
    assert (engine.stats().num_preemptions > 0) == (num_slots == 224)


def test_swapping_keeps_the_tokens_of_transformers(smollm2: LoadedModel, golden: dict[str, Any]) -> None:
    engine = make(smollm2, max_num_batched_tokens=64, preemption="swap", swap_space=64 << 20)
    faults.preempt_every(engine, 5, num_requests=2)
    for case, output in zip(golden["greedy"], run(engine, golden["greedy"], GREEDY), strict=True):
        assert output.outputs[0].token_ids == case["output_ids"], case["prompt"]
    assert engine.stats().swapped_in_blocks > 50


@pytest.mark.jax_matrix
def test_each_prompt_alone_gives_the_same_tokens_and_ends_where_transformers_ends(
    smollm2: LoadedModel, golden: dict[str, Any]
) -> None:
    engine = make(smollm2, max_num_batched_tokens=64)
    for case in golden["greedy"]:
        assert run(engine, [case], GREEDY)[0].outputs[0].token_ids == case["output_ids"]
    until_end = SamplingParams(max_tokens=64, temperature=0.0)
    for case, output in zip(golden["greedy"], run(engine, golden["greedy"], until_end), strict=True):
        assert output.outputs[0].token_ids == case["generate_ids_stop_at_eos"]


def values(case: dict[str, Any], output: RequestOutput) -> Iterator[tuple[float, float]]:
    """(ours, theirs) for every token of the prompt but the first, every output token, and five alternatives each."""
    completion, prompt = output.outputs[0], output.prompt_logprobs
    assert completion.logprobs is not None and prompt is not None
    ours = [entry for entry in [*prompt[1:], *completion.logprobs] if entry is not None]
    tokens = [*case["prompt_ids"][1:], *case["output_ids"]]
    chosen = case["token_logprob"]
    # The file's last row is what would come after the last token.
    top_ids, top_logprobs = (case["top5"][key][:-1] for key in ("ids", "logprobs"))
    for entry, token, logprob, ids, top in zip(ours, tokens, chosen, top_ids, top_logprobs, strict=True):
        yield entry[token].logprob, logprob
        yield from ((entry[i].logprob, value) for i, value in zip(ids, top, strict=True) if i in entry)
        assert len(set(ids) & entry.keys()) >= 4  # the fifth and the sixth may be as good as equal


@pytest.mark.parametrize("chunk", [7, 512])
def test_logprobs_of_prompt_and_output_are_those_of_transformers(
    smollm2: LoadedModel, golden: dict[str, Any], chunk: int
) -> None:
    engine = make(smollm2, max_num_batched_tokens=chunk)
    for case, output in zip(golden["greedy"], run(engine, golden["greedy"], WITH_LOGPROBS), strict=True):
        assert max(abs(ours - theirs) for ours, theirs in values(case, output)) < LIMIT
