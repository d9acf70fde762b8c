"""Beam search gives the sequences and scores of `transformers`, whoever shares the batch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from engine_harness import Runs, Shared, drain

from pagedjax.bench.peer import TransformersPeer
from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.engine import Engine
from pagedjax.errors import InvalidRequest
from pagedjax.llm import LLM
from pagedjax.models.llama import init_params
from pagedjax.models.loader import LoadedModel
from pagedjax.request import BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams

SMALL = ModelConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    eos_token_ids=(0, 5),
)
PENALTIES = (0.0, 1.0, 2.0)
STOPPINGS = (False, True, "never")


def model_of(seed: int) -> LoadedModel:
    """Random weights, scaled so that some tokens are much likelier than others, and the ends among them."""
    params = jax.tree.map(lambda array: array, init_params(SMALL, seed))
    kernel = params["lm_head"]["kernel"] * 40.0
    params["lm_head"]["kernel"] = kernel.at[np.array(SMALL.eos_token_ids)].multiply(1.3)
    return LoadedModel(SMALL, params, None, {"name": "random"})


def use_weights(engine: Engine, model: LoadedModel) -> None:
    """Puts other weights of the same shapes into an engine, so that nothing is compiled anew."""
    engine.runner.kernel = model.params["lm_head"]["kernel"]
    engine.runner._backbone_params = {name: tree for name, tree in model.params.items() if name != "lm_head"}


def search(engine: Engine, prompts: list[list[int]], params: list[Any]) -> list[RequestOutput]:
    ids = [engine.add_request({"prompt_token_ids": p}, q) for p, q in zip(prompts, params, strict=True)]
    done = {output.request_id: output for output in drain(engine) if output.finished}
    return [done[request_id] for request_id in ids]


def theirs(peer: TransformersPeer, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    import torch  # pyright: ignore[reportMissingImports]

    with torch.inference_mode():
        found = peer.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_new_tokens=params.max_tokens,
            eos_token_id=list(SMALL.eos_token_ids),
            pad_token_id=23,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    rows = [cut(row[len(prompt) :]) for row in found.sequences.tolist()]
    return list(zip(rows, found.sequences_scores.tolist(), strict=True))


def cut(tokens: list[int]) -> list[int]:
    """Without the padding after the end."""
    ends = [index for index, token in enumerate(tokens) if token in SMALL.eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def ours(output: RequestOutput) -> list[tuple[list[int], float]]:
    return [(completion.token_ids, completion.score or 0.0) for completion in output.outputs]


SHARED = Shared()


def make(**config: Any) -> Engine:
    defaults = {"num_blocks": 96, "block_size": 4, "max_num_seqs": 20, "max_num_batched_tokens": 32}
    return SHARED.engine(model_of(3), EngineConfig(**{**defaults, **config}))


def test_sequences_and_scores_are_those_of_transformers() -> None:
    pytest.importorskip("torch", reason="the comparison runs transformers, which needs torch")
    engine, num_ended = make(), 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        params = BeamSearchParams(
            beam_width=int(rng.integers(2, 9)),
            max_tokens=int(rng.integers(1, 14)),
            length_penalty=PENALTIES[seed % 3],
            early_stopping=STOPPINGS[seed // 3 % 3],
        )
        prompt = rng.integers(1, SMALL.vocab_size, int(rng.integers(1, 20))).tolist()
        model = model_of(seed)
        use_weights(engine, model)
        found = ours(search(engine, [prompt], [params])[0])
        expected = theirs(TransformersPeer(model.params, SMALL, "float32"), prompt, params)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], (seed, params)
        np.testing.assert_allclose(
            [s for _, s in found], [s for _, s in expected], rtol=1e-4, atol=1e-4, err_msg=str(seed)
        )
        num_ended += sum(tokens[-1] in SMALL.eos_token_ids for tokens, _ in found)
    assert num_ended > 50
    assert engine.stats().usage.free == engine.pool_info.num_slots


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="default", marks=pytest.mark.jax_matrix),
        pytest.param({"overlap": False, "block_size": 1, "num_blocks": 400}, id="blocks-of-1"),
        pytest.param({"max_num_batched_tokens": 20}, id="chunks-of-20"),
        pytest.param({"num_blocks": 44}, id="preemption"),
        pytest.param({"num_blocks": 44, "enable_prefix_caching": True}, id="caching-preemption"),
        pytest.param({"enable_prefix_caching": True, "block_size": 16, "num_blocks": 30}, id="caching"),
        pytest.param({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, id="whole-prompts"),
    ],
)
def test_beams_samples_and_plain_requests_share_batches(config: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, SMALL.vocab_size, length).tolist() for length in (17, 9, 12, 4, 16)]
    params: list[Any] = [
        BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True),
        SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=2, ignore_eos=True),
        BeamSearchParams(beam_width=7, max_tokens=14, length_penalty=0.5, early_stopping="never"),
        BeamSearchParams(beam_width=2, max_tokens=16, early_stopping=True, ignore_eos=True),
    ]
    engine, other = make(), make(**config)
    expected = [search(engine, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    for _ in range(2):
        for output, alone in zip(search(other, prompts, params), expected, strict=True):
            assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
            scores = [(c.score, c.cumulative_logprob) for c in output.outputs if c.score is not None]
            wanted = [(c.score, c.cumulative_logprob) for c in alone.outputs if c.score is not None]
            np.testing.assert_allclose(scores, wanted, rtol=1e-4)
    stats = other.stats()
    assert (stats.num_preemptions > 0) == (config.get("num_blocks") == 44)
    assert stats.usage.free == other.pool_info.num_slots


def test_width_one_is_greedy_with_a_score(runs: Runs) -> None:
    engine = runs.engine()
    prompt = runs.prompts(11)[0]
    greedy = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0)
    expected = runs.run(engine, [prompt], greedy)[0].outputs[0]
    beam = BeamSearchParams(beam_width=1, max_tokens=12, length_penalty=2.0)
    (found,) = search(engine, [prompt], [beam])[0].outputs
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert found.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)
    assert found.score == pytest.approx((found.cumulative_logprob or 0.0) / len(found.token_ids) ** 2)


def test_a_step_asks_the_device_once_for_each_search_and_copies_in_one_call(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = runs.engine()
    calls: list[str] = []
    for name in ("beams", "copy_blocks", "sample"):
        program = getattr(engine.runner.programs, name)
        monkeypatch.setattr(
            engine.runner.programs, name, lambda size, name=name, program=program: calls.append(name) or program(size)
        )
    prompts = runs.prompts(10, 6)
    beam = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    for prompt in prompts:
        engine.add_request({"prompt_token_ids": prompt}, beam)
    while engine.has_unfinished():
        calls.clear()
        engine.step()
        assert calls.count("beams") <= 2 and calls.count("copy_blocks") <= 1 and "sample" not in calls
    assert engine.stats().copied_blocks > 0


def test_the_golden_beams(smollm2: LoadedModel, golden: dict[str, Any]) -> None:
    config = EngineConfig(num_blocks=256, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64)
    llm = LLM(smollm2, config, progress=False)
    params = [
        BeamSearchParams(case["num_beams"], case["max_new_tokens"], case["length_penalty"], case["early_stopping"])
        for case in golden["beam"]
    ]
    prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in golden["beam"]]
    for case, output in zip(golden["beam"], llm.beam_search(prompts, params, progress=False), strict=True):
        ends = smollm2.config.eos_token_ids
        for completion, tokens, score in zip(output.outputs, case["sequences"], case["scores"], strict=True):
            length = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
            assert completion.token_ids == tokens[:length], case["prompt"]
            assert completion.score == pytest.approx(score, abs=1e-3)
            assert completion.finish_reason == ("stop" if tokens[length - 1] in ends else "length")
        texts = [case_text.split("<|im_end|>")[0] for case_text in case["texts"]]
        assert [completion.text.split("<|im_end|>")[0] for completion in output.outputs] == texts


def test_a_search_that_is_aborted_says_how_far_it_got(runs: Runs) -> None:
    engine = runs.engine()
    name = engine.add_request({"prompt_token_ids": [1, 2, 3]}, BeamSearchParams(beam_width=3, ignore_eos=True))
    for _ in range(7):
        assert engine.step() == []
    output = engine.abort(name)
    assert output.finished and len(output.outputs) == 3
    best: CompletionOutput = output.outputs[0]
    assert best.finish_reason == "abort" and best.score is None and 3 <= len(best.token_ids) <= 7
    assert engine.stats().usage.free == engine.pool_info.num_slots


def test_logits_that_are_not_finite_end_a_search_and_nothing_else(runs: Runs) -> None:
    engine = runs.engine()
    good = engine.add_request({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=9, temperature=0.0))
    bad = engine.add_request({"prompt_token_ids": [4, 5]}, BeamSearchParams(beam_width=2, max_tokens=9))
    search_on_device = engine.runner._search

    def broken(*args: Any) -> Any:
        output = search_on_device(*args)
        return output.replace(finite=output.finite & False)

    engine.runner._search = broken  # type: ignore[method-assign]
    done = {output.request_id: output for output in drain(engine) if output.finished}
    assert done[bad].outputs[0].finish_reason == "error"
    assert "NaN or infinity" in str(done[bad].outputs[0].stop_reason)
    assert done[good].outputs[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.beam_search({"prompt_token_ids": [1]}, SamplingParams()), "must be BeamSearchParams"),
        (lambda llm: llm.beam_search({"prompt_token_ids": [1]}, [SamplingParams()]), "must be BeamSearchParams"),
        (lambda llm: llm.generate({"prompt_token_ids": [1]}, BeamSearchParams()), "must be SamplingParams"),
        (lambda llm: llm.stream({"prompt_token_ids": [1]}, BeamSearchParams()), "must be SamplingParams"),
        (
            lambda llm: llm.beam_search({"prompt_token_ids": [1]}, BeamSearchParams(beam_width=9)),
            "has beam_width=9, but max_num_seqs=8 allows no more",
        ),
        (lambda llm: llm.beam_search({"prompt_token_ids": [999]}), "token id 999"),
        (lambda llm: llm.engine.add_request({"prompt_token_ids": [1]}, 5), "SamplingParams or BeamSearchParams"),
    ],
)
def test_what_cannot_be_searched(runs: Runs, call: Any, message: str) -> None:
    llm = LLM.__new__(LLM)
    llm.engine = runs.engine()
    with pytest.raises(InvalidRequest, match=message):
        call(llm)
    assert not llm.engine.has_unfinished() and llm.engine.block_map() == []


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("beam_width", 0, "an integer from 1 to 32"),
        ("beam_width", 33, "an integer from 1 to 32"),
        ("beam_width", 2.0, "an integer from 1 to 32"),
        ("max_tokens", 0, "an integer of at least 1"),
        ("max_tokens", None, "an integer of at least 1"),
        ("length_penalty", float("nan"), "a number from -10 to 10"),
        ("length_penalty", 11, "a number from -10 to 10"),
        ("early_stopping", "always", 'True, False or "never"'),
        ("early_stopping", 1, 'True, False or "never"'),
        ("ignore_eos", 1, "True or False"),
    ],
)
def test_beam_parameters_outside_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BeamSearchParams(**{field: value})
    assert f"{field}={value!r}" in str(caught.value) and f"{field} must be {allowed}" in str(caught.value)
