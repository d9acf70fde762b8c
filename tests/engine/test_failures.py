"""A step that fails leaves the engine usable: its requests are computed again, or end with the error; nothing leaks."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from engine_harness import Runs, drain

from pagedjax import faults
from pagedjax.device.kv_pool import KVPool
from pagedjax.engine import Engine
from pagedjax.errors import ConfigError, EngineDead
from pagedjax.llm import LLM
from pagedjax.request import BeamSearchParams, RequestOutput, SamplingParams

SAMPLES = SamplingParams(n=3, max_tokens=14, temperature=1.0, seed=5, ignore_eos=True, logprobs=1)
PARAMS: list[Any] = [SAMPLES, BeamSearchParams(3, 10), SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True)]
OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")


def results(outputs: list[RequestOutput]) -> list[list[Any]]:
    return [[(c.token_ids, c.finish_reason) for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def prompts(runs: Runs) -> list[list[int]]:
    return runs.prompts(13, 6, 17)


@pytest.fixture(scope="module")
def undisturbed(runs: Runs, prompts: list[list[int]]) -> list[list[Any]]:
    return results(runs.run(runs.engine(), prompts, PARAMS))


def assert_nothing_leaked(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.host_blocks) == (0, 0, 0, 0)
    assert stats.usage.free == engine.pool_info.num_slots
    assert sorted(engine.scheduler.roster.free_slots) == list(range(1, engine.config.max_num_seqs + 1))


@pytest.mark.parametrize("moment", faults.MOMENTS)
@pytest.mark.parametrize("error", [RuntimeError("boom"), OUT_OF_MEMORY, MemoryError()], ids=["bug", "device", "host"])
def test_a_step_that_fails_once_changes_no_token(
    runs: Runs, prompts: list[list[int]], undisturbed: list[list[Any]], moment: str, error: Exception
) -> None:
    engine = runs.engine(enable_prefix_caching=True, preemption="swap", swap_space=1 << 20, num_blocks=30)
    for step in (1, 6, 12):  # every request has a further token in between
        faults.raise_in_step(engine, step, error, moment)
    outputs = runs.run(engine, prompts, PARAMS)
    assert results(outputs) == undisturbed
    assert engine.stats().num_failed_steps == 3
    assert len(outputs[0].outputs[0].logprobs or ()) == SAMPLES.max_tokens
    assert_nothing_leaked(engine)


def test_what_failed_is_logged_with_its_traceback(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    engine = runs.engine()
    faults.raise_in_step(engine, 2, RuntimeError("boom"))
    runs.run(engine, runs.prompts(5), PARAMS[2])
    (record,) = [record for record in caplog.records if record.name == "pagedjax"]
    message, *lines = record.getMessage().splitlines()
    assert message == "a step with 1 request(s) failed; all others are computed again"
    assert lines[0].startswith("Traceback") and lines[-1] == "RuntimeError: boom"


@pytest.mark.parametrize("number", range(1, 12, 2))
def test_an_allocation_that_fails(
    runs: Runs, prompts: list[list[int]], undisturbed: list[list[Any]], number: int
) -> None:
    engine = runs.engine()
    faults.fail_allocation(engine, number)
    assert results(runs.run(engine, prompts, PARAMS)) == undisturbed
    assert engine.stats().num_failed_steps == 1
    assert_nothing_leaked(engine)


def test_a_step_that_fails_twice_ends_its_requests_and_the_others_go_on(
    runs: Runs, prompts: list[list[int]], undisturbed: list[list[Any]]
) -> None:
    engine = runs.engine(max_num_seqs=4)
    faults.raise_in_step(engine, 4, OUT_OF_MEMORY, times=2)
    outputs = runs.run(engine, prompts, PARAMS)
    assert {c.finish_reason for c in outputs[0].outputs} == {"error"}
    assert outputs[0].outputs[0].stop_reason == (
        "the step failed: JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"
    )
    assert results(outputs)[1:] == undisturbed[1:]
    assert_nothing_leaked(engine)


def test_who_makes_progress_between_failures_is_not_ended_for_another(
    runs: Runs, prompts: list[list[int]], undisturbed: list[list[Any]]
) -> None:
    engine = runs.engine(max_num_batched_tokens=8)
    execute = engine.runner.execute

    def fail_for_the_second(plan: Any, *args: Any) -> Any:
        if any(chunk.seq_id == second and chunk.start + chunk.num_tokens > 30 for chunk in plan.chunks):
            raise RuntimeError("boom")
        return execute(plan, *args)

    engine.runner.execute = fail_for_the_second  # type: ignore[method-assign]
    names = [engine.add_request({"prompt_token_ids": prompts[2]}, PARAMS[2])]
    names.append(engine.add_request({"prompt_token_ids": runs.prompts(40)[0]}, PARAMS[2]))
    second = engine.scheduler.get(names[1]).sequences[0].seq_id
    done = {output.request_id: output for output in drain(engine) if output.finished}
    assert results([done[names[0]]]) == undisturbed[2:]
    assert done[names[1]].outputs[0].finish_reason == "error"
    assert engine.stats().num_failed_steps == 2
    assert_nothing_leaked(engine)


def test_outputs_made_before_a_failure_in_the_same_step_are_delivered(runs: Runs) -> None:
    engine = runs.engine(num_blocks=8, max_num_seqs=4)
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    name = engine.add_request({"prompt_token_ids": runs.prompts(10)[0]}, long)
    engine.add_request({"prompt_token_ids": runs.prompts(3)[0]}, PARAMS[2])
    execute = engine.runner.execute

    def fail_once(plan: Any, *args: Any) -> Any:
        if plan.failed:
            raise RuntimeError("boom")
        return execute(plan, *args)

    engine.runner.execute = fail_once  # type: ignore[method-assign]
    done = {output.request_id: output for output in drain(engine) if output.finished}
    assert "needs room for 33 tokens" in str(done[name].outputs[0].stop_reason)
    assert len(done) == 2


def test_an_engine_whose_every_step_fails_ends_all_requests(runs: Runs, prompts: list[list[int]]) -> None:
    for moment in faults.MOMENTS:
        engine = runs.engine(max_num_seqs=4)
        disarm = faults.raise_in_step(engine, 1, RuntimeError("boom"), moment, times=10**6)
        outputs = runs.run(engine, prompts, PARAMS)
        assert {c.finish_reason for output in outputs for c in output.outputs} == {"error"}
        assert_nothing_leaked(engine)
        disarm()
        assert runs.run(engine, prompts, PARAMS)[2].outputs[0].finish_reason == "length"


@pytest.mark.jax_matrix
def test_a_device_that_takes_the_pool_with_it(
    runs: Runs, prompts: list[list[int]], undisturbed: list[list[Any]]
) -> None:
    engine = runs.engine()
    execute = engine.runner.execute
    calls = 0

    def lose_the_pool(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        step = execute(*args)
        if calls == 5:
            for array in jax.tree.leaves((engine.runner.pool, engine.runner.state)):
                array.delete()
            raise OUT_OF_MEMORY
        return step

    engine.runner.execute = lose_the_pool  # type: ignore[method-assign]
    assert results(runs.run(engine, prompts, PARAMS)) == undisturbed
    assert_nothing_leaked(engine)


def test_memory_that_is_not_there_for_a_new_pool_either(
    runs: Runs, prompts: list[list[int]], undisturbed: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = runs.engine(max_num_seqs=4)
    ids = [engine.add_request({"prompt_token_ids": p}, q) for p, q in zip(prompts, PARAMS, strict=True)]
    for _ in range(4):
        engine.step()
    faults.raise_in_step(engine, 1, OUT_OF_MEMORY)
    create, calls = KVPool.create, 0

    def fail_once(*args: Any) -> KVPool:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConfigError("cannot be allocated")
        return create(*args)

    monkeypatch.setattr(KVPool, "create", fail_once)
    done = {output.request_id: output for output in drain(engine) if output.finished}
    assert engine.stats().num_failed_steps == 2
    assert results([done[ids[2]]]) == undisturbed[2:], "it waited meanwhile"
    assert {c.finish_reason for c in done[ids[0]].outputs} <= {"length", "error"}
    assert_nothing_leaked(engine)


def test_a_fault_keeps_no_stream_alive(runs: Runs) -> None:
    llm = LLM(runs.model, runs.config(), progress=False)
    runs.share(llm.engine)
    error = RuntimeError("boom")
    faults.raise_in_step(llm.engine, 2, error)
    stream = llm.stream({"prompt_token_ids": [1, 2, 3]}, PARAMS[2])
    next(stream)
    del stream
    assert not llm.engine.has_unfinished() and error.__traceback__ is None


@pytest.mark.parametrize("caching", [False, True])
def test_registered_prefixes_are_computed_again(runs: Runs, caching: bool) -> None:
    engine = runs.engine(enable_prefix_caching=caching)
    (tokens,) = runs.prompts(12)
    prefix = engine.register_prefix({"prompt_token_ids": tokens})
    other = engine.register_prefix({"prompt_token_ids": tokens[::-1]})
    prompt = [*tokens, 5, 6]
    expected = results(runs.run(engine, [prompt], PARAMS[2]))
    faults.raise_in_step(engine, 3, RuntimeError("boom"))
    outputs = runs.run(engine, [prompt], PARAMS[2])
    assert results(outputs) == expected
    for _ in drain(engine):
        pass
    assert sorted(engine.allocator.pins()) == sorted([prefix.name, other.name])
    again = runs.run(engine, [prompt], PARAMS[2])[0]
    assert again.metrics and again.metrics.num_cached_tokens == 12
    assert results([again]) == expected
    engine.unregister_prefix(prefix)
    engine.unregister_prefix(other)
    assert_nothing_leaked(engine)


def test_a_prefix_can_be_unregistered_before_it_is_there_again(runs: Runs) -> None:
    engine = runs.engine()
    prefix = engine.register_prefix({"prompt_token_ids": runs.prompts(12)[0]})
    engine.add_request({"prompt_token_ids": [1, 2, 3]}, PARAMS[2])
    faults.raise_in_step(engine, 1, RuntimeError("boom"))
    engine.step()
    assert engine.is_unfinished(prefix.name)
    engine.unregister_prefix(prefix)
    names = {output.request_id for output in drain(engine)}
    assert prefix.name not in names and not engine.allocator.pins()
    assert_nothing_leaked(engine)


def test_an_interrupt_that_insists_still_ends_the_engine(runs: Runs) -> None:
    engine = runs.engine()
    faults.raise_in_step(engine, 1, KeyboardInterrupt())
    engine.add_request({"prompt_token_ids": [1, 2, 3]})
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineDead):
        engine.step()


def test_faults_say_what_they_take(runs: Runs) -> None:
    engine = runs.engine()
    with pytest.raises(ConfigError, match="moment='later' is not allowed: moment must be one of schedule, dispatch"):
        faults.raise_in_step(engine, 1, RuntimeError(), "later")
    for arm in (faults.preempt_every, faults.fail_allocation, faults.kill_in_step):
        with pytest.raises(ConfigError, match="=0 is not allowed: .* an integer of at least 1"):
            arm(engine, 0)
    with pytest.raises(ConfigError, match="error='foo' is not allowed: error must be an exception"):
        faults.raise_in_step(engine, 1, "foo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_requests=-1 is not allowed"):
        faults.preempt_every(engine, 2, -1)
