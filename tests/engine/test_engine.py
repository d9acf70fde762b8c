"""The engine as a user drives it: requests in, outputs out, and what it says to bad input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_harness import TINY, Runs, drain

from pagedjax.config import EngineConfig
from pagedjax.engine import Engine
from pagedjax.errors import ConfigError, InvalidRequest, RequestTooLong, UnknownRequest
from pagedjax.models.loader import LoadedModel
from pagedjax.request import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def test_outputs_grow_token_by_token_and_end_with_a_reason(runs: Runs) -> None:
    engine = runs.engine()
    request_id = engine.add_request({"prompt_token_ids": [3, 4, 5]}, GREEDY)
    lengths, last = [], None
    for output in drain(engine):
        assert output.request_id == request_id and output.prompt_token_ids == [3, 4, 5]
        lengths.append(len(output.outputs[0].token_ids))
        last = output
    assert lengths == list(range(1, 9))
    assert last is not None and last.finished and last.outputs[0].finish_reason == "length"
    assert last.metrics is not None and last.metrics.first_token_time is not None
    assert last.metrics.arrival_time <= last.metrics.first_token_time <= (last.metrics.finished_time or 0)


def test_stop_tokens_end_a_request_and_min_tokens_holds_them_off(runs: Runs) -> None:
    prompt = runs.prompts(6)[0]
    free = runs.run(runs.engine(), [prompt], GREEDY)[0].outputs[0].token_ids
    stop = free[3]
    first = free.index(stop)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=[stop])
    ended = runs.run(runs.engine(), [prompt], params)[0].outputs[0]
    assert ended.token_ids == free[: first + 1] and (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    for least in range(first + 1, 8):
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=[stop], min_tokens=least)
        held = runs.run(runs.engine(), [prompt], params)[0].outputs[0].token_ids
        assert stop not in held[:least] and len(held) >= least


def test_the_models_own_end_counts_unless_ignored(runs: Runs) -> None:
    prompt = runs.prompts(6)[0]
    bias = {0: 100.0}  # token 0 ends a text
    ended = runs.run(runs.engine(), [prompt], SamplingParams(temperature=0.0, logit_bias=bias))[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([0], "stop", None)
    params = SamplingParams(temperature=0.0, logit_bias=bias, ignore_eos=True, max_tokens=3)
    assert runs.run(runs.engine(), [prompt], params)[0].outputs[0].token_ids == [0, 0, 0]


def test_logprobs_are_of_raw_logits_and_name_the_chosen_token(runs: Runs) -> None:
    prompt = runs.prompts(6)[0]
    params = SamplingParams(
        max_tokens=6, temperature=1.3, seed=5, ignore_eos=True, logprobs=3, frequency_penalty=1.5, top_k=9
    )
    output = runs.run(runs.engine(), [prompt], params)[0].outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == 6
    total = 0.0
    for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert token in entry and 3 <= len(entry) <= 4
        assert {1, 2, 3} <= {value.rank for value in entry.values()}
        total += entry[token].logprob
        # The same token's logprob as part of a prompt: computed by prefill, without any penalty.
        scored = runs.run(
            runs.engine(),
            [prompt + output.token_ids[: i + 1]],
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
        )[0].prompt_logprobs
        assert scored is not None and scored[0] is None and scored[-1] is not None
        assert scored[-1][token].logprob == pytest.approx(entry[token].logprob, abs=1e-4)
        assert scored[-1][token].rank == entry[token].rank
    assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 16}], ids=str)
def test_prompt_logprobs_are_whole_however_the_prompt_is_cut(runs: Runs, config: dict[str, Any]) -> None:
    prompts = runs.prompts(30, 41, 12)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
    whole = runs.run(runs.engine(max_num_batched_tokens=64), prompts, params)
    cut = runs.run(runs.engine(**config), prompts, params)
    for one, other, prompt in zip(whole, cut, prompts, strict=True):
        assert one.prompt_logprobs and other.prompt_logprobs
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs) == len(prompt)
        for token, a, b in zip(prompt[1:], one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert a is not None and b is not None
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


def test_abort_frees_everything_at_any_point(runs: Runs) -> None:
    engine = runs.engine(max_num_batched_tokens=8)
    for num_steps in range(6):
        ids = [engine.add_request({"prompt_token_ids": p}, GREEDY) for p in runs.prompts(20, 5, 9)]
        for _ in range(num_steps):
            engine.step()
        aborted = [engine.abort(request_id) for request_id in ids if engine.is_unfinished(request_id)]
        assert all(output.finished and output.outputs[0].finish_reason == "abort" for output in aborted)
        assert not engine.has_unfinished() and engine.step() == []
        assert engine.stats().usage.free == engine.pool_info.num_slots
    with pytest.raises(UnknownRequest, match="request '17' is not running or waiting; unfinished requests: none"):
        engine.abort("17")


def test_a_request_that_outgrows_the_pool_ends_by_itself_and_the_others_go_on(runs: Runs) -> None:
    engine = runs.engine(num_blocks=8)  # 32 tokens
    long, short = runs.run(
        engine,
        runs.prompts(20, 4),
        [SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True), GREEDY],
    )
    assert long.outputs[0].finish_reason == "error" and len(long.outputs[0].token_ids) == 13
    assert "the whole pool holds 32" in str(long.outputs[0].stop_reason)
    assert short.outputs[0].finish_reason == "length"
    unlimited = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    assert len(runs.run(engine, runs.prompts(20), unlimited)[0].outputs[0].token_ids) == 13


def test_nan_in_the_logits_names_the_request_and_spares_the_others(tiny: LoadedModel, runs: Runs) -> None:
    params = jax.tree.map(jnp.copy, tiny.params)
    params["embed_tokens"]["embedding"] = params["embed_tokens"]["embedding"].at[33].set(jnp.nan)
    # The head is the embedding too: an own head keeps the NaN in the one request whose prompt has token 33.
    params["lm_head"] = {"kernel": tiny.params["embed_tokens"]["embedding"]}
    engine = Engine(LoadedModel(TINY, params, None, {}), EngineConfig(num_blocks=64, block_size=4, max_num_seqs=4))
    bad, good = runs.run(engine, [[5, 33, 6], [5, 6]], GREEDY)
    assert bad.outputs[0].finish_reason == "error" and "NaN" in str(bad.outputs[0].stop_reason)
    assert bad.outputs[0].token_ids == []
    assert good.outputs[0].token_ids == runs.run(runs.engine(), [[5, 6]], GREEDY)[0].outputs[0].token_ids


def test_stats_count_what_was_done(runs: Runs) -> None:
    engine = runs.engine()
    runs.run(engine, runs.prompts(10, 4), GREEDY)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.output_tokens, stats.num_waiting, stats.num_running) == (14, 16, 0, 0)
    assert stats.num_steps == 8 and 0 < stats.kv_utilisation <= 1
    assert stats.peak_blocks == -(-17 // 4) + -(-11 // 4)
    assert stats.host_seconds > 0 and stats.device_wait_seconds > 0
    engine.reset_stats()
    assert engine.stats().num_steps == engine.stats().output_tokens == engine.stats().num_compilations == 0


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ({"prompt_token_ids": []}, {}, InvalidRequest, "the prompt is empty: it must have at least one token"),
        ("text", {}, InvalidRequest, "came without a tokenizer"),
        (17, {}, InvalidRequest, "prompt=17 must be a string or"),
        ({"tokens": [1]}, {}, InvalidRequest, "must be a string or"),
        ({"prompt_token_ids": [1], "lora": 3}, {}, InvalidRequest, r"unknown keys \['lora'\]"),
        ({"prompt_token_ids": [1.5]}, {}, InvalidRequest, "must be a list of integers: 1.5"),
        ({"prompt_token_ids": [1, 384]}, {}, InvalidRequest, r"token id 384: ids must be in \[0, 384\)"),
        ({"prompt_token_ids": [-1]}, {}, InvalidRequest, r"token id -1: ids must be in \[0, 384\)"),
        ({"prompt_token_ids": [1]}, {"logit_bias": {999: 1.0}}, InvalidRequest, "logit_bias holds token id 999"),
        ({"prompt_token_ids": [1]}, {"stop_token_ids": [500]}, InvalidRequest, "stop_token_ids holds token id 500"),
        ({"prompt_token_ids": [1]}, {"stop": "x"}, InvalidRequest, "needs a tokenizer"),
        ({"prompt_token_ids": [1] * 256}, {}, RequestTooLong, "256 tokens, but max_model_len=256 allows"),
        ({"prompt_token_ids": [1] * 230}, {}, RequestTooLong, "the whole pool holds 200"),
    ],
)
def test_bad_requests_are_refused_where_they_are_made(
    runs: Runs, prompt: Any, params: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = runs.engine(num_blocks=50)
    with pytest.raises(error, match=message) as caught:
        engine.add_request(prompt, SamplingParams(**params))
    assert isinstance(caught.value, ValueError) and not engine.has_unfinished()


def test_a_request_id_in_use_is_refused(runs: Runs) -> None:
    engine = runs.engine()
    engine.add_request({"prompt_token_ids": [1]}, request_id="a")
    with pytest.raises(InvalidRequest, match="'a' exists already"):
        engine.add_request({"prompt_token_ids": [1]}, request_id="a")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_model_len": 500}, "max_model_len=500 is more than the model's 256 positions"),
        ({"pool_bytes": 1000, "num_blocks": None}, "leaves no block: one block of 4 tokens takes 2048 bytes"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens=32 is not allowed"),
        ({"attention_backend": "triton"}, "attention_backend='triton' is not allowed here: .* use 'auto'"),
        ({"attention_backend": "xla", "attention_interpret": True}, "attention_backend='xla' is not allowed here"),
    ],
)
def test_configurations_that_contradict_the_model_are_refused(runs: Runs, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.engine(**config)


def test_the_pool_is_sized_by_bytes_when_asked(runs: Runs) -> None:
    engine = runs.engine(num_blocks=None, pool_bytes=100 * 2048 + 7)
    assert engine.pool_info.num_blocks == 99 and engine.pool_info.pool_bytes == 100 * 2048
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.pool)) == 100 * 2048


def test_bfloat16_weights_and_pool_give_nearly_the_same_logprobs(tiny: LoadedModel, runs: Runs) -> None:
    prompt = runs.prompts(30)[0]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    narrow = LoadedModel(TINY, jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params), None, {})
    engine = Engine(narrow, EngineConfig(dtype="bfloat16", num_blocks=64, block_size=4, max_num_seqs=4))
    assert {leaf.dtype for leaf in jax.tree.leaves(engine.runner.pool)} == {jnp.dtype("bfloat16")}
    both = [runs.run(e, [prompt], params)[0].prompt_logprobs for e in (runs.engine(), engine)]
    values = [[entry[t].logprob for t, entry in zip(prompt[1:], lp[1:], strict=True) if entry] for lp in both if lp]
    np.testing.assert_allclose(values[0], values[1], atol=0.15)
