"""Several consumers of one engine: each gets its own outputs, whoever makes the steps."""

from __future__ import annotations

import gc
import signal
import threading
from typing import Any

import numpy as np
import pytest
from engine_harness import Runs

from pagedjax.config import EngineConfig
from pagedjax.engine import Engine
from pagedjax.errors import ConfigError, EngineDead, InvalidRequest, ModelError
from pagedjax.llm import LLM
from pagedjax.models.loader import LoadedModel
from pagedjax.request import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
A, B = {"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": [9, 8, 7, 6]}


@pytest.fixture
def llm(tiny: LoadedModel) -> LLM:
    return LLM(tiny, EngineConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32))


def test_streams_read_one_after_the_other_or_in_turn_are_both_whole(llm: LLM) -> None:
    for in_turn in (False, True):
        one, two = llm.stream(A, PARAMS), llm.stream(B, PARAMS)
        pairs = list(zip(one, two, strict=True)) if in_turn else list(zip(list(one), list(two), strict=True))
        assert len(pairs) == 12 and all(first.finished == second.finished for first, second in pairs)
        assert pairs[-1][0].finished and pairs[-1][0].request_id != pairs[-1][1].request_id
        assert [len(first.outputs[0].token_ids) for first, _ in pairs] == list(range(1, 13))


def test_generate_leaves_the_outputs_of_others_to_them(llm: LLM) -> None:
    added = llm.engine.add_request(A, PARAMS)
    stream = llm.stream(A, PARAMS)
    next(stream)
    assert len(llm.generate(B, PARAMS, progress=False)[0].outputs[0].token_ids) == 12
    states = list(stream)
    assert states[-1].finished and len(states) == 11
    last = {output.request_id: output for output in llm.engine.step()}[added]
    assert last.finished and last.outputs[0].token_ids == states[-1].outputs[0].token_ids
    assert not llm.engine.has_unfinished()


def test_states_of_a_stream_do_not_change_afterwards(llm: LLM) -> None:
    states = list(llm.stream(A, PARAMS))
    assert all(state.metrics is not None and state.metrics.finished_time is None for state in states[:-1])


def test_a_stream_that_is_never_read_frees_its_request(llm: LLM) -> None:
    stream = llm.stream(A, PARAMS)
    del stream
    gc.collect()
    assert not llm.engine.has_unfinished()


def test_ids_of_the_user_and_of_the_engine_do_not_collide(llm: LLM) -> None:
    llm.engine.add_request(A, PARAMS, request_id="1")
    assert len(llm.generate([A, B, A], PARAMS, progress=False)) == 3


def test_threads_share_an_engine(llm: LLM) -> None:
    alone = [llm.generate(prompt, PARAMS, progress=False)[0].outputs[0].token_ids for prompt in (A, B)]
    results: dict[int, list[int]] = {}

    def work(index: int) -> None:
        results[index] = llm.generate((A, B)[index % 2], PARAMS, progress=False)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {index: alone[index % 2] for index in range(6)}


def test_a_stream_dropped_in_the_middle_of_a_step_ends_behind_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the garbage collector finds it there."""
    streams = [llm.stream(A, PARAMS), llm.stream(B, PARAMS)]
    next(streams[0])
    execute = llm.engine.runner.execute

    def collecting(*args: Any) -> Any:
        streams[0].close()
        return execute(*args)

    monkeypatch.setattr(llm.engine.runner, "execute", collecting)
    assert len(list(streams[1])) > 1
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().usage.free == llm.engine.pool_info.num_slots


def test_a_step_cut_short_leaves_an_engine_that_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine.runner, "execute", impatient)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(A, PARAMS, progress=False)
    with pytest.raises(EngineDead, match="make a new engine"):
        llm.generate(A, PARAMS, progress=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(5), "prompts=5 must be a prompt or a list of prompts"),
        (lambda llm: llm.generate({"prompt": 5}), r"prompt=\{'prompt': 5\} must be a string or"),
        (lambda llm: llm.generate({**A, "prompt": 5}), "prompt=5 is not allowed: prompt must be a string"),
        (lambda llm: llm.generate({**A, "prompt": "caf\udce9"}), "prompt='caf.udce9' .* lone surrogates"),
        (lambda llm: llm.generate({"prompt_token_ids": 7}), "prompt_token_ids=7 must be a list of integers"),
        (lambda llm: llm.generate({"prompt_token_ids": [np.bool_(True)]}), "must be a list of integers"),
        (lambda llm: llm.chat_prompt(5), "has no chat template"),
        (lambda llm: llm.engine.abort([1]), r"request_id=\[1\] must be a string"),
        (lambda llm: llm.engine.is_unfinished(None), "request_id=None must be a string"),
        (lambda llm: llm.engine.open_mailbox([1], every=True), r"request_id=\[1\] must be a string"),
        (lambda llm: llm.engine.receive({}), r"request_id=\{\} must be a string"),
        (lambda llm: llm.engine.close_mailbox(1), "request_id=1 must be a string"),
        (lambda llm: llm.engine.add_request(A, arrival_time="now"), "arrival_time='now' must be a number of seconds"),
        (lambda llm: llm.generate(A, "greedy"), "params='greedy' must be SamplingParams"),
        (lambda llm: llm.generate([A], ["greedy"]), "params='greedy' must be SamplingParams"),
        (lambda llm: llm.chat({"role": "user", "content": "Hi"}), "must be a list of messages"),
        (lambda llm: llm.engine.add_request(A, request_id=[1]), r"request_id=\[1\] must be a string"),
        (lambda llm: llm.engine.add_request({**A, "x": 1, 5: 6}), r"unknown keys \['5', 'x'\]"),
    ],
)
def test_wrong_types_are_named(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        call(llm)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: LLM(5), "model=5 must be a name, a path or a Hugging Face id"),  # type: ignore[arg-type]
        (lambda model: LLM(""), "model='' must be a name"),
        (lambda model: LLM("a\0b"), "must be a name"),
        (lambda model: LLM("x", {"block_size": 4}), r"config=\{'block_size': 4\} must be an EngineConfig"),  # type: ignore[arg-type]
        (lambda model: LLM(model, "fast"), "config='fast' must be an EngineConfig, or None"),  # type: ignore[arg-type]
        (lambda model: Engine(model, {}), r"config=\{\} must be an EngineConfig, or None"),  # type: ignore[arg-type]
        (lambda model: Engine("smollm2-135m"), "model='smollm2-135m' must be a LoadedModel"),  # type: ignore[arg-type]
    ],
)
def test_engines_of_wrong_types_are_named(tiny: LoadedModel, call: Any, message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        call(tiny)


def test_numpys_integers_are_token_ids(llm: LLM) -> None:
    ids = np.array([3, 4, 5])
    a, b = llm.generate([{"prompt_token_ids": ids}, {"prompt_token_ids": list(ids)}], PARAMS, progress=False)
    assert a.prompt_token_ids == b.prompt_token_ids == [3, 4, 5] and a.outputs == b.outputs


def test_runs_still_go_step_by_step(runs: Runs) -> None:
    engine = runs.engine()
    engine.add_request(A, PARAMS)
    assert sum(len(engine.step()) for _ in range(13)) == 12
