"""`LLM` with the real model: text in, text out, streams, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.errors import InvalidRequest, ModelError
from pagedjax.models.loader import LoadedModel

GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def llm(smollm2: LoadedModel) -> LLM:
    config = EngineConfig(num_blocks=64, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=16)
    return LLM(smollm2, config)


def test_generate_keeps_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["The capital of France is", "1 + 1 =", "Water boils at"]
    params = [SamplingParams(max_tokens=n, temperature=0.0) for n in (9, 2, 5)]
    outputs = llm.generate(prompts, params, progress=False)
    assert [output.prompt for output in outputs] == prompts
    assert "Paris" in outputs[0].outputs[0].text
    assert all(len(output.outputs[0].token_ids) <= n for output, n in zip(outputs, (9, 2, 5), strict=True))
    assert llm.generate(prompts[0], params[0], progress=False)[0].outputs == outputs[0].outputs


def test_chat_goes_through_the_models_template(llm: LLM, golden: dict[str, Any]) -> None:
    case = golden["greedy"][0]
    message = [{"role": "user", "content": case["prompt"]}]
    one, two = llm.chat([message, message], GREEDY, progress=False)
    assert one.prompt_token_ids == case["prompt_ids"]
    assert one.outputs[0].text == two.outputs[0].text == "The capital of France is Paris."
    assert one.outputs[0].finish_reason == "stop"
    assert llm.chat(message, GREEDY, progress=False)[0].outputs[0].text == one.outputs[0].text


def test_a_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", GREEDY, progress=False)[0]
    states = list(llm.stream("Once upon a time", GREEDY))
    texts = [state.outputs[0].text for state in states]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert texts[-1] == whole.outputs[0].text and states[-1].finished
    assert [state.finished for state in states[:-1]] == [False] * (len(states) - 1)


def test_a_stream_that_is_dropped_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().usage.free == llm.engine.pool_info.num_slots


def test_stop_strings_cut_the_text_and_never_show(llm: LLM) -> None:
    free = llm.generate("The capital of France is", GREEDY, progress=False)[0].outputs[0].text
    stop = free[6:14]  # across tokens
    params = SamplingParams(max_tokens=16, temperature=0.0, stop=["no such text", stop])
    shown = [state.outputs[0].text for state in llm.stream("The capital of France is", params)]
    assert shown[-1] == free[: free.index(stop)]
    assert all(shown[-1].startswith(text) for text in shown)
    output = llm.generate("The capital of France is", params, progress=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (shown[-1], "stop", stop)


def test_half_a_character_is_never_shown(llm: LLM) -> None:
    text = "日本語 🦜 é"
    forced = llm.tokenizer(text)["input_ids"]
    bias = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    # Force the tokens one after another: each request continues the prompt by exactly one.
    from pagedjax.detokenizer import Detokenizer

    detokenizer = Detokenizer(llm.tokenizer, [])
    shown = ""
    for token in forced:
        shown += detokenizer.append(token)
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text
    assert llm.generate(text, bias, progress=False)[0].prompt == text


def interrupt_after(num_steps: int, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sends SIGINT from inside the engine's step, where it would do most harm."""
    calls: list[int] = []
    execute: Callable[..., Any] = llm.engine.runner.execute

    def interrupted(*args: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == num_steps:
            signal.raise_signal(signal.SIGINT)
        return execute(*args)

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    return calls


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_ctrl_c_in_generate_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = llm.generate("The capital of France is", GREEDY, progress=False)[0].outputs[0].text
    with monkeypatch.context() as patch:
        calls = interrupt_after(num_steps, llm, patch)
        long = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["The capital of France is", "Once upon a time"], long, progress=False)
        assert len(calls) == num_steps
    assert not llm.engine.has_unfinished()
    llm.engine.scheduler.check_invariants()
    assert llm.engine.stats().usage.free == llm.engine.pool_info.num_slots
    assert llm.generate("The capital of France is", GREEDY, progress=False)[0].outputs[0].text == before


def test_one_bad_prompt_starts_none(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        llm.generate(["fine", ""], GREEDY, progress=False)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "1 SamplingParams for 2 prompts: give one, or one per prompt"),
        (lambda llm: llm.chat([], GREEDY), "messages is empty"),
        (lambda llm: llm.chat([{"role": "user"}], GREEDY), "is no chat message: it must be"),
    ],
)
def test_misuse_is_named(llm: LLM, call: Callable[[LLM], Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        call(llm)


def test_an_unknown_model_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        LLM("no-such-model")
