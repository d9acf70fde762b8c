"""Whatever pressure does - swap, compute again, end somebody - it changes no token, and loses no block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_harness import Runs, drain

from pagedjax import faults
from pagedjax.config import EngineConfig
from pagedjax.device import host_pool
from pagedjax.engine import Engine
from pagedjax.errors import ConfigError
from pagedjax.llm import LLM
from pagedjax.request import BeamSearchParams, RequestOutput, SamplingParams

SPACE = 1 << 20  # bytes: more than the whole pool
SAMPLES = SamplingParams(n=3, max_tokens=18, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True, logprobs=1)
BEAMS = BeamSearchParams(beam_width=4, max_tokens=14)
PENALISED = SamplingParams(max_tokens=20, temperature=0.9, seed=9, repetition_penalty=1.3, min_tokens=7)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
PARAMS: list[Any] = [SAMPLES, BEAMS, PENALISED, GREEDY, SAMPLES]


def results(outputs: list[RequestOutput]) -> list[list[Any]]:
    return [[(c.token_ids, c.finish_reason, c.score) for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def prompts(runs: Runs) -> list[list[int]]:
    first, *rest = runs.prompts(13, 16, 7, 21)
    return [first, *rest, first]  # one comes twice: with prefix caching it is found


@pytest.fixture(scope="module")
def unpressed(runs: Runs, prompts: list[list[int]]) -> list[list[Any]]:
    engine = runs.engine(max_num_batched_tokens=64)
    return results(runs.run(engine, prompts, PARAMS))


@pytest.mark.parametrize("steps", [2, 3, 7])
@pytest.mark.parametrize("budget", [8, 64], ids=["chunks-of-8", "whole-prompts"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempting_every_few_steps_changes_no_token(
    runs: Runs, prompts: list[list[int]], unpressed: list[list[Any]], mode: str, budget: int, steps: int
) -> None:
    space = SPACE if mode == "swap" else 0
    engine = runs.engine(
        preemption=mode, swap_space=space, max_num_batched_tokens=budget, enable_prefix_caching=True, overlap=steps != 3
    )
    faults.preempt_every(engine, steps, num_requests=None if steps == 7 else 1)
    outputs = runs.run(engine, prompts, PARAMS)
    for found, expected in zip(results(outputs), unpressed, strict=True):
        assert [row[:2] for row in found] == [row[:2] for row in expected]
        scores = [row[2] for row in expected]
        assert [row[2] for row in found] == (scores if scores[0] is None else pytest.approx(scores, abs=1e-4))
    stats = engine.stats()
    assert stats.num_preemptions > 8
    assert (stats.swapped_out_blocks > 0) == (stats.swapped_in_blocks > 0) == (mode == "swap")
    assert (stats.num_swapped, stats.host_blocks, stats.usage.free) == (0, 0, engine.pool_info.num_slots)
    assert len(outputs[0].outputs[2].logprobs or ()) == SAMPLES.max_tokens
    assert len(outputs[3].prompt_logprobs or ()) == len(prompts[3])


def test_auto_swaps_groups_and_computes_single_ones_again(runs: Runs, prompts: list[list[int]]) -> None:
    for params, swaps in ((SAMPLES, True), (BEAMS, True), (GREEDY, False)):
        engine = runs.engine(swap_space=SPACE)
        faults.preempt_every(engine, 3)
        runs.run(engine, prompts[:1], params)
        assert (engine.stats().swapped_out_blocks > 0) is swaps
        assert engine.stats().num_preemptions


def test_a_pool_that_is_too_small_is_shared_by_swapping(
    runs: Runs, prompts: list[list[int]], unpressed: list[list[Any]]
) -> None:
    for space in (SPACE, 8 * 12288):  # the second is full at times: then all is computed again
        engine = runs.engine(preemption="swap", swap_space=space, num_blocks=28)
        outputs = runs.run(engine, prompts, PARAMS)
        assert [[row[0] for row in rows] for rows in results(outputs)] == [[row[0] for row in r] for r in unpressed]
        assert engine.stats().swapped_out_blocks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_a_round_trip_is_bit_exact(runs: Runs, dtype: str) -> None:
    engine = runs.engine(kv_cache_dtype=dtype, preemption="swap", swap_space=SPACE, overlap=False)
    request_id = engine.add_request({"prompt_token_ids": runs.prompts(19)[0]}, SAMPLES)
    for _ in range(3):
        engine.step()
    before = content(engine, request_id)
    engine.scheduler.preempt_latest()
    engine.step()
    assert engine.stats().num_swapped == 1 and engine.stats().usage.free == engine.pool_info.num_slots
    # Whoever runs meanwhile may write anywhere.
    engine.runner.pool = jax.tree.map(lambda array: jnp.full_like(array, 3), engine.runner.pool)
    plan = engine.scheduler.schedule()
    assert plan is not None and plan.swap_ins
    engine.runner.swap(plan)
    assert content(engine, request_id) == before


@pytest.mark.jax_matrix
def test_blocks_may_travel_through_pinned_memory(
    runs: Runs, prompts: list[list[int]], unpressed: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU has no need of it, but can do it.
    monkeypatch.setattr(host_pool, "_pinned", lambda sharding: sharding.with_memory_kind(host_pool.PINNED))
    engine = runs.engine(preemption="swap", swap_space=SPACE, num_blocks=28)
    outputs = runs.run(engine, prompts, PARAMS)
    assert [[row[0] for row in rows] for rows in results(outputs)] == [[row[0] for row in r] for r in unpressed]
    assert engine.stats().swapped_in_blocks


def content(engine: Engine, request_id: str) -> list[list[bytes]]:
    """Of each sequence, the bytes of the tokens that are computed, of all layers."""
    pool, size = engine.runner.pool, engine.config.block_size
    arrays = [np.asarray(array) for array in [*pool.k, *pool.v, *pool.k_scale, *pool.v_scale]]
    found = []
    for seq in engine.scheduler.get(request_id).sequences:
        table, count = engine.allocator.block_table(seq.seq_id), 19 + 2
        assert seq.num_computed >= count
        slots = [(table[position // size], position % size) for position in range(count)]
        found.append([array[block, :, offset].tobytes() for array in arrays for block, offset in slots])
    return found


def test_a_request_that_outgrows_the_pool_ends_with_a_reason_and_the_others_go_on(runs: Runs) -> None:
    first, second = runs.prompts(10, 9)
    for mode, space in (("swap", SPACE), ("recompute", 0)):
        engine = runs.engine(num_blocks=8, preemption=mode, swap_space=space, max_num_seqs=4)
        long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        short = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        outputs = runs.run(engine, [first, second], [long, short])
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "needs room for 33 tokens, but the whole pool holds 32" in str(outputs[0].outputs[0].stop_reason)
        assert outputs[1].outputs[0].finish_reason == "length"
        assert engine.stats().usage.free == 32 and engine.stats().host_blocks == 0


@pytest.mark.parametrize("state", ["waiting", "running", "swapped"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLES, BEAMS], ids=["single", "samples", "beams"])
def test_aborting_anywhere_frees_everything(runs: Runs, params: Any, state: str) -> None:
    engine = runs.engine(preemption="swap", swap_space=SPACE, max_num_seqs=4)
    victim = engine.add_request({"prompt_token_ids": runs.prompts(14)[0]}, params)
    if state != "waiting":
        for _ in range(4):  # with a step in flight, and copies in it
            engine.step()
    if state == "swapped":
        engine.scheduler.preempt_latest()
        engine.step()
        assert engine.stats().num_swapped == 1 and engine.stats().host_blocks
    output = engine.abort(victim)
    assert output.finished and {c.finish_reason for c in output.outputs} <= {"abort"}
    for _ in drain(engine):
        pass
    engine.step()
    stats = engine.stats()
    assert (stats.host_blocks, stats.num_swapped, stats.usage.free) == (0, 0, engine.pool_info.num_slots)


def test_a_stream_that_is_dropped_while_its_request_is_swapped_out(runs: Runs) -> None:
    llm = LLM(runs.model, runs.config(preemption="swap", swap_space=SPACE), progress=False)
    stream = llm.stream({"prompt_token_ids": runs.prompts(9)[0]}, GREEDY)
    next(stream)
    llm.engine.scheduler.preempt_latest()
    llm.engine.step()
    assert llm.engine.stats().num_swapped == 1
    del stream
    assert not llm.engine.has_unfinished() and llm.engine.stats().host_blocks == 0


def test_the_swap_space_never_exceeds_what_was_given(runs: Runs) -> None:
    block = runs.engine().pool_info.bytes_per_block
    for space, blocks in ((block, 1), (3 * block - 1, 2), (5 * block, 5)):
        engine = runs.engine(swap_space=space)
        assert engine.pool_info.num_host_blocks == blocks == engine.stats().num_host_blocks
        assert engine.runner.host_pool.nbytes == engine.pool_info.host_bytes == blocks * block <= space


def test_swap_spaces_that_cannot_be(runs: Runs) -> None:
    for space, message in (
        (-1, "swap_space=-1 is not allowed: swap_space must be an integer of at least 0"),
        (1.5, "swap_space=1.5 is not allowed"),
        (5, r"swap_space=5 leaves no block: one block of 4 tokens takes \d+ bytes"),
        (1 << 60, r"swap_space=1152921504606846976 is not allowed here: .* but .* of host memory are free"),
    ):
        with pytest.raises(ConfigError, match=message):
            runs.engine(swap_space=space)
    with pytest.raises(ConfigError, match='more than 0 bytes when preemption="swap"'):
        EngineConfig(preemption="swap")
    with pytest.raises(ConfigError, match="preemption='never' is not allowed: preemption must be one of auto, rec"):
        EngineConfig(preemption="never")


def test_the_pool_by_default_leaves_room_for_the_swap_space(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedjax.device import memory

    monkeypatch.setattr(memory, "_free_host_bytes", lambda: 64 << 20)
    config = {"num_blocks": None, "max_num_seqs": 8}
    with_space = runs.engine(**config, swap_space=20 << 20).pool_info
    assert with_space.pool_bytes + with_space.host_bytes < 64 << 20
    assert with_space.host_bytes == pytest.approx(20 << 20, abs=with_space.bytes_per_block)
    with pytest.raises(ConfigError, match=r"pool would take .*, but .* are free, of which the engine needs"):
        runs.engine(num_blocks=60 * (1 << 20) // with_space.bytes_per_block, swap_space=20 << 20)
