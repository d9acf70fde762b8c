"""Samples, forks and prefixes share blocks, and get the tokens they would get alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_harness import Runs, drain

from pagedjax.engine import Engine
from pagedjax.errors import InvalidRequest, OutOfSlots, UnknownRequest
from pagedjax.request import RequestOutput, SamplingParams

N = 4
SAMPLED = SamplingParams(n=N, max_tokens=22, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True, logprobs=2)
PENALISED = SamplingParams(n=3, max_tokens=18, temperature=0.9, seed=9, repetition_penalty=1.3, min_tokens=7)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)

CONFIGS = [
    pytest.param({}, id="default", marks=pytest.mark.jax_matrix),
    pytest.param({"overlap": False}, id="no-overlap"),
    pytest.param({"enable_prefix_caching": True}, id="caching"),
    pytest.param({"max_num_batched_tokens": 8}, id="chunks-of-8"),
    pytest.param({"num_blocks": 30}, id="preemption"),
    pytest.param({"num_blocks": 30, "enable_prefix_caching": True, "max_num_batched_tokens": 9}, id="everything"),
    pytest.param({"block_size": 1, "num_blocks": 300}, id="blocks-of-1"),
    pytest.param({"block_size": 128, "num_blocks": 10, "enable_prefix_caching": True}, id="blocks-of-128"),
]


def tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def sample_alone(runs: Runs, engine: Engine, prompt: list[int], params: SamplingParams, index: int) -> list[int]:
    """What sample `index` is when nothing is shared: a single request whose sequence is told its index."""
    single = SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"n": 1})
    request_id = engine.add_request({"prompt_token_ids": prompt}, single)
    engine.scheduler.get(request_id).sequences[0].index = index
    (output,) = [output for output in drain(engine) if output.finished]
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def prompts(runs: Runs) -> list[list[int]]:
    return runs.prompts(13, 16, 7)  # a partial last block, none, and another one


@pytest.fixture(scope="module")
def alone(runs: Runs, prompts: list[list[int]]) -> list[list[list[int]]]:
    engine = runs.engine(max_num_batched_tokens=64, overlap=False)
    return [
        [sample_alone(runs, engine, prompt, params, index) for index in range(params.n)]
        for prompt, params in zip(prompts, (SAMPLED, PENALISED, GREEDY), strict=True)
    ]


@pytest.mark.parametrize("config", CONFIGS)
def test_samples_together_are_the_samples_alone(
    runs: Runs, prompts: list[list[int]], alone: list[list[list[int]]], config: dict[str, Any]
) -> None:
    engine = runs.engine(**config)
    for _ in range(2):  # the second time from the cache, where there is one
        outputs = runs.run(engine, prompts, [SAMPLED, PENALISED, GREEDY])
        assert [tokens(output) for output in outputs] == alone
    assert [completion.index for completion in outputs[0].outputs] == list(range(N))
    assert len(outputs[0].outputs[1].logprobs or ()) == SAMPLED.max_tokens
    stats = engine.stats()
    assert stats.usage.free == engine.pool_info.num_slots
    if config.get("num_blocks") == 30:
        assert stats.num_preemptions > 0
    if config.get("enable_prefix_caching") and config.get("block_size") != 128:
        assert stats.prefix_hits >= 3 and stats.prefix_hit_tokens > 0


def test_one_copy_for_every_first_write_to_a_shared_partial_block(runs: Runs) -> None:
    partial, full = runs.prompts(13, 16)
    params = SamplingParams(n=N, max_tokens=3, temperature=1.0, seed=1, ignore_eos=True)
    for prompt, copies in ((partial, N - 1), (full, 0)):
        engine = runs.fresh_engine()
        runs.run(engine, [prompt], params)
        assert engine.stats().copied_blocks == copies
        assert [name for name in engine.compiled() if name.startswith("copy_blocks")] == ["copy_blocks-4"] * bool(
            copies
        )


def test_a_prompt_is_stored_once_and_its_last_block_copied_by_all_but_the_last(runs: Runs) -> None:
    engine = runs.engine(overlap=False)
    engine.add_request({"prompt_token_ids": runs.prompts(10)[0]}, SAMPLED)
    engine.step()
    assert [block["ref_count"] for block in engine.block_map()] == [N, N, N]
    assert [block["num_tokens"] for block in engine.block_map()] == [4, 4, 2]
    stats = engine.stats()
    assert (stats.logical_blocks, stats.physical_blocks, stats.saving) == (3 * N, 3, 0.75)
    engine.step()
    blocks = engine.block_map()
    assert [block["ref_count"] for block in blocks] == [N, N, 1, 1, 1, 1]
    assert [block["num_tokens"] for block in blocks] == [4, 4, 3, 3, 3, 3]
    # The last sample writes in place.
    assert [user["index"] for block in blocks[2:] for user in block["sequences"]] == [N - 1, 0, 1, 2]


def test_copies_are_exact_and_touch_nothing_else(runs: Runs) -> None:
    engine = runs.engine(overlap=False, kv_cache_dtype="int8")
    engine.add_request({"prompt_token_ids": runs.prompts(10)[0]}, SAMPLED)
    engine.step()
    before = [np.asarray(array) for array in _arrays(engine)]
    plan = engine.scheduler.schedule()
    assert plan is not None and len(plan.copies) == N - 1
    engine.runner._copy_blocks(plan.copies)
    after = [np.asarray(array) for array in _arrays(engine)]
    source = dict.fromkeys(range(len(before[0])))
    expected = {block: block for block in source} | {dst: src for src, dst in plan.copies}
    for old, new in zip(before, after, strict=True):
        assert old.tobytes() != new.tobytes()
        assert all(new[block].tobytes() == old[origin].tobytes() for block, origin in expected.items() if block)


def _arrays(engine: Engine) -> list[Any]:
    pool = engine.runner.pool
    return [*pool.k, *pool.v, *pool.k_scale, *pool.v_scale]


def test_a_fork_goes_on_as_the_next_sample(runs: Runs) -> None:
    prompt = runs.prompts(9)[0]
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=3, ignore_eos=True, logprobs=0)
    engine = runs.engine()
    parent = engine.add_request({"prompt_token_ids": prompt}, params)
    for _ in range(5):
        engine.step()
    child = engine.fork(parent)
    forked_at = engine.scheduler.get(child).sequences[0].output_len
    again = engine.fork(parent, new_request_id="again")
    grandchild = engine.fork(child)
    blocks = engine.block_map()
    assert {block["ref_count"] for block in blocks} == {4}
    done = {output.request_id: output for output in drain(engine) if output.finished}
    streams = {name: done[name].outputs[0] for name in (parent, child, again, grandchild)}
    assert [streams[name].index for name in streams] == [0, 1, 2, 3]
    reference = runs.engine()
    expected = runs.run(reference, [prompt], params)[0].outputs[0].token_ids
    assert streams[parent].token_ids == expected
    for name, stream in streams.items():
        assert stream.token_ids[:forked_at] == expected[:forked_at], name
        assert len(stream.token_ids) == len(stream.logprobs or ()) == 16
        assert stream.cumulative_logprob == pytest.approx(
            sum(next(iter(e.values())).logprob for e in stream.logprobs or ())
        )
    assert len({tuple(stream.token_ids) for stream in streams.values()}) == 4
    # Its own random keys: sample 1 of the same seed, started from the tokens it was forked at.
    start = [*prompt, *streams[child].token_ids[:forked_at]]
    request_id = reference.add_request(
        {"prompt_token_ids": start}, SamplingParams(**_with(params, max_tokens=16 - forked_at))
    )
    reference.scheduler.get(request_id).sequences[0].index = 1
    (output,) = [output for output in drain(reference) if output.finished]
    assert output.outputs[0].token_ids == streams[child].token_ids[forked_at:]


def _with(params: SamplingParams, **changes: Any) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__slots__} | changes


def test_a_fork_of_a_request_that_waits_or_is_being_computed(runs: Runs) -> None:
    long, short = runs.prompts(60, 5)
    engine = runs.engine(max_num_seqs=2)
    first = engine.add_request({"prompt_token_ids": long}, GREEDY)
    second = engine.add_request({"prompt_token_ids": short}, GREEDY)
    engine.step()
    names = [first, engine.fork(first), second, engine.fork(second)]
    done = {output.request_id: tokens(output) for output in drain(engine) if output.finished}
    assert done[names[0]] == done[names[1]] and done[names[2]] == done[names[3]]


def test_what_cannot_be_forked(runs: Runs) -> None:
    engine = runs.engine(max_num_seqs=3)
    prompt = {"prompt_token_ids": runs.prompts(5)[0]}
    ended = engine.add_request(prompt, SamplingParams(max_tokens=1))
    with pytest.raises(UnknownRequest, match="only unfinished ones can fork"):
        engine.fork(ended) and engine.fork("nobody")
    list(drain(engine))
    several, one = engine.add_request(prompt, SamplingParams(n=2, max_tokens=9)), engine.add_request(prompt, GREEDY)
    engine.step()
    before = engine.scheduler.snapshot()
    for request_id, new, error, message in (
        (ended, None, UnknownRequest, "has finished or never was"),
        ("nobody", None, UnknownRequest, "has finished or never was"),
        (several, None, InvalidRequest, "several samples or beams"),
        (one, several, InvalidRequest, "exists already"),
        (one, None, OutOfSlots, "3 sequences run, and max_num_seqs=3"),
        (one, 7, InvalidRequest, "request_id=7 must be a string"),
    ):
        with pytest.raises(error, match=message):
            engine.fork(request_id, new)  # type: ignore[arg-type]
    after = engine.scheduler.snapshot()
    for snapshot in (before, after):  # the step in flight was taken in, nothing else
        snapshot.pop("in_flight"), snapshot.pop("groups")
    assert before == after
    assert len([output for output in drain(engine) if output.finished]) == 2


def test_more_samples_than_may_run(runs: Runs) -> None:
    engine = runs.engine(max_num_seqs=3)
    with pytest.raises(InvalidRequest, match=r"has n=4, but max_num_seqs=3 allows no more sequences"):
        engine.add_request({"prompt_token_ids": [1, 2]}, SamplingParams(n=4))
    assert not engine.has_unfinished() and engine.block_map() == []


def test_a_sample_that_stops_leaves_the_others_running(runs: Runs, prompts: list[list[int]]) -> None:
    engine = runs.engine()
    reference = runs.run(engine, [prompts[0]], SAMPLED)[0]
    stop = reference.outputs[2].token_ids[4]
    params = SamplingParams(**_with(SAMPLED, stop_token_ids=(stop,)))
    output = runs.run(engine, [prompts[0]], params)[0]
    for completion, whole in zip(output.outputs, reference.outputs, strict=True):
        cut = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else len(whole.token_ids)
        assert completion.token_ids == whole.token_ids[:cut]
        assert completion.finish_reason == ("stop" if stop in whole.token_ids else "length")
    assert len({completion.finish_reason for completion in output.outputs}) == 2
