"""The compiled programs: a small fixed set, in place on the pool, and nothing compiled once they are there."""

from __future__ import annotations

import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_harness import TINY, Runs

from pagedjax.config import EngineConfig
from pagedjax.device.kv_pool import PoolInfo, PoolLayout
from pagedjax.device.programs import no_new_compiles
from pagedjax.device.runner import Runner
from pagedjax.engine import Engine
from pagedjax.host.plan import ScheduledChunk, StepPlan
from pagedjax.models import progress
from pagedjax.models.llama import AttentionBackend
from pagedjax.models.loader import LoadedModel
from pagedjax.request import BeamSearchParams, Request, SamplingParams, Sequence

GIB = 1 << 30


@pytest.mark.jax_matrix
def test_after_warm_up_two_hundred_random_requests_compile_nothing(runs: Runs) -> None:
    engine = runs.fresh_engine(num_blocks=60, enable_prefix_caching=True)
    assert engine.warmup(progress=False) == engine.runner.programs.seconds
    rng = np.random.default_rng(0)
    with no_new_compiles():
        for number in range(200):
            length = int(rng.integers(1, 60))
            params: SamplingParams | BeamSearchParams = SamplingParams(
                n=int(rng.choice([1, 1, 1, 3])),
                max_tokens=int(rng.integers(1, 12)),
                temperature=float(rng.choice([0.0, 1.0])),
                top_k=int(rng.choice([0, 5])),
                top_p=float(rng.choice([1.0, 0.9])),
                logprobs=[None, 0, 5][rng.integers(3)],
                prompt_logprobs=[None, 3][int(rng.random() < 0.2)],
                min_tokens=int(rng.integers(2)),
                repetition_penalty=float(rng.choice([1.0, 1.2])),
            )
            if rng.random() < 0.15:
                params = BeamSearchParams(beam_width=int(rng.integers(1, 6)), max_tokens=int(rng.integers(1, 8)))
            prompt = rng.integers(1, TINY.vocab_size, length).tolist()
            name = engine.add_request({"prompt_token_ids": prompt}, params)
            if number % 20 == 0 and isinstance(params, SamplingParams) and params.n == 1:
                engine.fork(name)
            while engine.stats().num_waiting > 5:
                engine.step()
        while engine.has_unfinished():
            engine.step()
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.copied_blocks > 0 and stats.prefix_hits > 0
    assert engine.warmup(progress=False) == {}


def test_the_guard_notices_a_compilation() -> None:
    with pytest.raises(AssertionError, match="1 programs were compiled where none was allowed"), no_new_compiles():
        jax.jit(lambda x: x * 3 + 1).lower(np.float32(1)).compile()


def test_there_are_n_plus_m_programs_and_a_few_small_ones(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    engine = runs.fresh_engine(max_num_batched_tokens=32, max_num_seqs=8)
    names = set(engine.warmup())
    said = capsys.readouterr().err
    assert f"compiled {len(names)} programs in" in said and all(name in said for name in names)
    backbones = {f"backbone-{n}" for n in (1, 2, 4, 8, 16, 32)}
    heads = {f"sample-{m}" for m in (1, 2, 4, 8)}
    selects = {f"select-{n}" for n in (1, 2, 4, 8, 16, 32)}
    sharing = {"beams-2", "beams-8", "copy_blocks-4", "copy_blocks-8"}
    others = {"prompt_logprobs-8", "set_token_counts", "set_logit_bias"}
    assert names == backbones | heads | selects | sharing | others
    assert set(engine.compiled()) == names


@pytest.mark.jax_matrix
@pytest.mark.parametrize(("dtype", "num_layers"), [("float32", 30), ("int8", 2)])  # all layers take long to compile
def test_every_program_aliases_the_pool_and_needs_little_beside_it(
    smollm2: LoadedModel, dtype: str, num_layers: int
) -> None:
    """The real model over a pool of 1 GiB, the longest prefill and prompt logprobs included."""
    model = replace(smollm2.config, num_layers=num_layers)
    left_out = {f"layers_{layer}" for layer in range(num_layers, smollm2.config.num_layers)}
    params = {name: value for name, value in smollm2.params.items() if name not in left_out}
    layout = PoolLayout.of(model, EngineConfig(kv_cache_dtype=dtype))
    pool = PoolInfo(GIB // layout.bytes_per_block, layout, "1 GiB")
    config = EngineConfig(kv_cache_dtype=dtype, max_num_batched_tokens=512, max_num_seqs=64)
    runner = Runner(model, config, params, pool, 2048, AttentionBackend("xla"))
    for tokens in (512, 64, 1):
        runner.programs.backbone(tokens)
    for rows in (32, 1):
        runner.programs.sample(rows)
    runner.programs.select_rows(512, 32)
    runner.programs.prompt_logprobs(32)
    runner.programs.beams(32)
    runner.programs.copy_blocks(64)
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.state))
    for name, program in runner.programs.compiled().items():
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 0.05 * GIB, (name, memory.temp_size_in_bytes)
        if name.startswith(("backbone", "copy_blocks")):
            assert memory.alias_size_in_bytes >= pool.pool_bytes, name
        if name.startswith("sample"):
            assert memory.alias_size_in_bytes >= state_bytes, name


def test_a_slow_compilation_is_announced_and_its_time_counted_apart(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.0)
    engine = runs.fresh_engine()
    began = time.perf_counter()
    runs.run(engine, runs.prompts(3), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    stats, wall = engine.stats(), time.perf_counter() - began
    said = capsys.readouterr().err.splitlines()
    assert said == [f"compiling {name} ..." for name in engine.runner.programs.seconds] != []
    assert stats.compile_seconds == sum(engine.runner.programs.seconds.values())
    rest = stats.host_seconds + stats.prepare_seconds + stats.device_wait_seconds + stats.output_seconds
    assert stats.prepare_seconds > 0 and stats.compile_seconds + rest < wall
    engine.reset_stats()
    assert engine.stats().compile_seconds == 0
    quiet = Engine(runs.model, engine.config, progress=False)
    runs.run(quiet, runs.prompts(3), SamplingParams(max_tokens=2))
    assert quiet.stats().compile_seconds > 0 and capsys.readouterr().err == ""


def test_the_old_pool_is_gone_after_a_step(runs: Runs) -> None:
    engine = runs.engine()
    before = jax.tree.leaves((engine.runner.pool, engine.runner.state))
    addresses = [leaf.unsafe_buffer_pointer() for leaf in before]
    request = Request("r", 0, (5, 6, 7), SamplingParams(), 1, frozenset(), 10)
    sequence = Sequence(0, request, token_ids=[5, 6, 7])
    plan = StepPlan(0, (ScheduledChunk(0, 1, 0, 3, (5, 6, 7), 0, (2,), True, True),), 3)
    engine.runner.collect(engine.runner.execute(plan, {0: sequence}))
    assert all(leaf.is_deleted() for leaf in before)
    after = jax.tree.leaves((engine.runner.pool, engine.runner.state))
    assert [leaf.unsafe_buffer_pointer() for leaf in after] == addresses


def test_only_the_blocks_named_are_written(runs: Runs) -> None:
    engine = runs.engine(num_blocks=9)
    request = Request("r", 0, tuple(range(1, 7)), SamplingParams(), 1, frozenset(), 10)
    sequence = Sequence(0, request, token_ids=list(range(1, 7)))
    plan = StepPlan(0, (ScheduledChunk(0, 1, 0, 6, request.prompt_token_ids, 0, (7, 3), True, True),), 6)
    engine.runner.collect(engine.runner.execute(plan, {0: sequence}))
    for leaf in jax.tree.leaves(engine.runner.pool):
        written = np.abs(np.asarray(leaf)).sum(axis=(1, 3)) > 0  # [blocks, slots]
        assert set(zip(*map(np.ndarray.tolist, np.nonzero(written[1:])), strict=True)) == {
            *((6, slot) for slot in range(4)),
            *((2, slot) for slot in range(2)),
        }
