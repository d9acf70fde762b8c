"""What a request gets does not depend on who shares its batch, on chunks, blocks, preemption or overlap."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import Runs

from pagedjax.request import RequestOutput, SamplingParams

MIXED = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.8, top_k=20, min_p=0.02, seed=2**40 + 1, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0, seed=3, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(max_tokens=16, temperature=0.0, presence_penalty=1.0, logit_bias={7: 3.0}, min_tokens=9),
]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def prompts(runs: Runs) -> list[list[int]]:
    return runs.prompts(11, 3, 40, 1, 17)


@pytest.fixture(scope="module")
def alone(runs: Runs, prompts: list[list[int]]) -> list[list[int]]:
    """Every request by itself, prompt whole, nothing planned ahead."""
    engine = runs.engine(max_num_batched_tokens=64, overlap=False)
    return [tokens(runs.run(engine, [p], [q]))[0] for p, q in zip(prompts, MIXED, strict=True)]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="default", marks=pytest.mark.jax_matrix),
        pytest.param({"overlap": False}, id="no-overlap"),
        pytest.param({"max_num_batched_tokens": 5}, id="chunks-of-5"),
        pytest.param({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}, id="whole-prompts"),
        pytest.param({"max_num_seqs": 2}, id="two-at-a-time"),
        pytest.param({"num_blocks": 16}, id="preemption"),
        pytest.param({"num_blocks": 16, "overlap": False, "max_num_batched_tokens": 7}, id="preemption-chunks"),
        pytest.param({"block_size": 1, "num_blocks": 300}, id="blocks-of-1"),
        pytest.param({"block_size": 128, "num_blocks": 6}, id="blocks-of-128"),
        pytest.param({"attention_backend": "reference"}, id="reference"),
    ],
)
def test_tokens_are_those_of_the_request_alone(
    runs: Runs, prompts: list[list[int]], alone: list[list[int]], config: dict[str, Any]
) -> None:
    engine = runs.engine(**config)
    outputs = runs.run(engine, prompts, MIXED)
    assert tokens(outputs) == alone
    stats = engine.stats()
    if config.get("num_blocks") == 16:
        assert stats.num_preemptions > 0
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) == stats.num_preemptions
    assert stats.usage.free == engine.pool_info.num_slots


@pytest.mark.jax_matrix
def test_a_pallas_kernel_serves_the_engine_in_interpret_mode(
    runs: Runs, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    engine = runs.engine(attention_backend="triton", attention_interpret=True)
    assert tokens(runs.run(engine, prompts[:2], MIXED[:2])) == alone[:2]


def test_requests_that_come_and_go_change_nothing(runs: Runs, prompts: list[list[int]], alone: list[list[int]]) -> None:
    engine = runs.engine(num_blocks=24)
    done: dict[str, RequestOutput] = {}
    ids: list[str] = []
    for step in range(400):
        if step % 3 == 0 and len(ids) < len(prompts):
            index = len(ids)
            ids.append(engine.add_request({"prompt_token_ids": prompts[index]}, MIXED[index]))
        if step in (2, 7, 12):
            engine.add_request({"prompt_token_ids": prompts[2]}, MIXED[2], request_id=f"noise-{step}")
        if step in (5, 8, 20) and engine.is_unfinished(f"noise-{step - 3 if step < 20 else 12}"):
            engine.abort(f"noise-{step - 3 if step < 20 else 12}")
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        if len(ids) == len(prompts) and not engine.has_unfinished():
            break
    assert tokens([done[request_id] for request_id in ids]) == alone


def test_default_seeds_come_from_the_engines_seed_and_the_requests_number(runs: Runs) -> None:
    prompts, params = runs.prompts(5) * 2, SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = tokens(runs.run(runs.engine(seed=1), prompts, params))
    assert first != second
    assert tokens(runs.run(runs.engine(seed=1), prompts, params)) == [first, second]
    assert first not in tokens(runs.run(runs.engine(seed=2), prompts, params))
