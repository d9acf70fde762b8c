"""Blocks found by their content: the same tokens as without, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import Runs, drain, preempt_all

import pagedjax.host.prefix
from pagedjax.engine import Engine
from pagedjax.errors import BlocksInUse, InvalidRequest, RequestTooLong
from pagedjax.llm import LLM
from pagedjax.request import BeamSearchParams, RequestOutput, SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(n=3, max_tokens=10, temperature=1.0, seed=4, ignore_eos=True)


def ids(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


@pytest.fixture(scope="module")
def prompts(runs: Runs) -> list[list[int]]:
    """A common beginning of 24 tokens with different ends, the beginning itself, and its last token changed."""
    begin, end, other = runs.prompts(24, 9, 5)
    return [begin + end, begin + other, begin, begin[:-1] + [(begin[-1] + 1) % 384], end]


@pytest.fixture(scope="module")
def plain(runs: Runs, prompts: list[list[int]]) -> list[list[list[int]]]:
    return [ids(runs.run(runs.engine(), [prompt], SAMPLED)[0]) for prompt in prompts]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("block_size", "num_slots"), [(1, 256), (4, 256), (4, 96), (16, 256), (128, 640)])
def test_tokens_are_those_without_a_cache(
    runs: Runs,
    prompts: list[list[int]],
    plain: list[list[list[int]]],
    block_size: int,
    num_slots: int,
    overlap: bool,
) -> None:
    config = {"block_size": block_size, "num_blocks": num_slots // block_size, "overlap": overlap}
    engine = runs.engine(enable_prefix_caching=True, **config)
    for _ in range(2):
        assert [ids(output) for output in runs.run(engine, prompts, SAMPLED)] == plain
    stats = engine.stats()
    assert stats.prefix_hits > 0 or block_size == 128
    assert stats.prefix_evictions > 0 or num_slots != 96
    assert stats.usage.free == engine.pool_info.num_slots


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_every_three_steps_changes_nothing(
    runs: Runs, prompts: list[list[int]], plain: list[list[list[int]]], caching: bool, overlap: bool
) -> None:
    engine = runs.engine(enable_prefix_caching=caching, overlap=overlap, num_blocks=96)
    beams = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    expected = ids(runs.run(runs.engine(), [prompts[0]], beams)[0])
    names = [engine.add_request({"prompt_token_ids": prompt}, SAMPLED) for prompt in prompts]
    search = engine.add_request({"prompt_token_ids": prompts[0]}, beams)
    done: dict[str, RequestOutput] = {}
    for step in range(1, 1000):
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if step % 3 == 0:
            preempt_all(engine)
        engine.scheduler.check_invariants()
        if not engine.has_unfinished():
            break
    assert [ids(done[name]) for name in names] == plain
    assert ids(done[search]) == expected
    assert engine.stats().num_preemptions > 20


def test_a_prompt_whose_every_block_hits_computes_one_token(runs: Runs) -> None:
    engine = runs.engine(enable_prefix_caching=True)
    prompt = runs.prompts(24)[0]
    first = runs.run(engine, [prompt], GREEDY)[0]
    engine.reset_stats()
    second = runs.run(engine, [prompt], GREEDY)[0]
    assert ids(second) == ids(first)
    stats = engine.stats()
    assert stats.prompt_tokens == 1
    assert (stats.prefix_queries, stats.prefix_query_tokens, stats.prefix_hits, stats.prefix_hit_tokens) == (
        1,
        24,
        1,
        23,
    )
    assert stats.copied_blocks == 0
    assert first.metrics is not None and first.metrics.num_cached_tokens == 0
    assert second.metrics is not None and second.metrics.num_cached_tokens == 23


def test_the_next_turn_of_a_chat_hits_generated_blocks(runs: Runs) -> None:
    engine = runs.engine(enable_prefix_caching=True)
    prompt = runs.prompts(10)[0]
    output = runs.run(engine, [prompt], SamplingParams(max_tokens=11, temperature=0.0, ignore_eos=True))[0]
    engine.reset_stats()
    turn = runs.run(engine, [[*prompt, *ids(output)[0], 7, 8, 9]], GREEDY)[0]
    # 20 tokens were computed, the 21st was only sampled: five blocks of four.
    assert engine.stats().prefix_hit_tokens == 20
    assert ids(turn) == ids(runs.run(runs.engine(), [turn.prompt_token_ids], GREEDY)[0])


def test_identical_prompts_in_flight_share_and_do_not_corrupt_each_other(runs: Runs) -> None:
    prompt = runs.prompts(30)[0]
    expected = ids(runs.run(runs.engine(), [prompt], GREEDY)[0])
    for chunk in (16, 64):  # one after the other, or both in one step
        engine = runs.engine(enable_prefix_caching=True, max_num_batched_tokens=chunk)
        assert [ids(output) for output in runs.run(engine, [prompt] * 4, GREEDY)] == [expected] * 4
        assert engine.stats().prefix_hits == 3


def test_logprobs_of_a_prompt_write_the_cache_but_do_not_read_it(runs: Runs) -> None:
    engine = runs.engine(enable_prefix_caching=True)
    prompt = runs.prompts(21)[0]
    wanted = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=1)
    first, second = (runs.run(engine, [prompt], wanted)[0] for _ in range(2))
    assert engine.stats().prefix_queries == 0
    assert len(second.prompt_logprobs or ()) == 21 and second.prompt_logprobs == first.prompt_logprobs
    runs.run(engine, [prompt], GREEDY)
    assert engine.stats().prefix_hit_tokens == 20


def test_salts_part_and_unite(runs: Runs) -> None:
    engine = runs.engine(enable_prefix_caching=True)
    prompt = {"prompt_token_ids": runs.prompts(20)[0]}
    hits = []
    for salt in ("a", "b", None, "", "a", "b", None, ""):
        engine.reset_stats()
        engine.add_request(prompt, GREEDY, cache_salt=salt)
        list(drain(engine))
        hits.append(engine.stats().prefix_hits)
    assert hits == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(InvalidRequest, match="cache_salt=5 is not allowed"):
        engine.add_request(prompt, GREEDY, cache_salt=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("constant", [b"", bytes(32)])
def test_a_hash_collision_serves_nobody_elses_blocks(
    runs: Runs,
    prompts: list[list[int]],
    plain: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    constant: bytes,
) -> None:
    monkeypatch.setattr(pagedjax.host.prefix, "block_digest", lambda parent, tokens: constant)
    engine = runs.engine(enable_prefix_caching=True, num_blocks=128)
    for _ in range(2):
        assert [ids(output) for output in runs.run(engine, prompts, SAMPLED)] == plain
    assert engine.stats().prefix_hits > 0  # the same content is still found
    before = engine.stats().prefix_hits
    engine.add_request({"prompt_token_ids": prompts[0]}, GREEDY, cache_salt="other")
    list(drain(engine))
    assert engine.stats().prefix_hits == before


def test_hashes_are_reproducible_or_unpredictable_as_wanted(runs: Runs) -> None:
    def digests(**config: Any) -> list[bytes]:
        engine = runs.engine(enable_prefix_caching=True, **config)
        runs.run(engine, [list(range(1, 9))], GREEDY)
        return sorted(hash_.digest for hash_ in engine.allocator.pool._hashes.values())

    assert digests(prefix_hash_seed=7) == digests(prefix_hash_seed=7)
    assert not set(digests(prefix_hash_seed=7)) & set(digests(prefix_hash_seed=8))
    assert not set(digests()) & set(digests())


def test_the_cache_is_not_reset_while_blocks_are_in_use(runs: Runs) -> None:
    engine = runs.engine(enable_prefix_caching=True)
    prompt = runs.prompts(20)[0]
    engine.add_request({"prompt_token_ids": prompt}, GREEDY)
    engine.step()
    with pytest.raises(BlocksInUse, match=r"cannot be reset while 5 blocks are in use"):
        engine.reset_prefix_cache()
    list(drain(engine))
    assert engine.stats().cached_blocks == 6
    engine.reset_prefix_cache()
    assert engine.stats().cached_blocks == 0
    runs.run(engine, [prompt], GREEDY)
    assert engine.stats().prefix_hits == 0


def make_llm(runs: Runs, **config: Any) -> LLM:
    llm = LLM.__new__(LLM)
    llm.engine = runs.engine(**config)
    return llm


@pytest.mark.parametrize("caching", [False, True])
def test_a_registered_prefix_is_kept_and_shared(runs: Runs, caching: bool) -> None:
    prefix, *ends = runs.prompts(22, 6, 9, 3)
    llm = make_llm(runs, num_blocks=32, enable_prefix_caching=caching)
    prompts = [{"prompt_token_ids": prefix + end} for end in ends]
    expected = [ids(output) for output in llm.generate(prompts, GREEDY, progress=False)]
    registered = llm.register_prefix({"prompt_token_ids": prefix})
    assert (registered.num_blocks, registered.num_tokens) == (5, 20)
    llm.engine.reset_stats()
    for _ in range(3):  # in between, others need all the rest of the pool
        assert [ids(output) for output in llm.generate(prompts, GREEDY, progress=False)] == expected
        llm.generate([{"prompt_token_ids": p} for p in runs.prompts(100, seed=9)], GREEDY, progress=False)
    stats = llm.engine.stats()
    assert stats.prefix_hits >= 9 and stats.prefix_hit_tokens >= 9 * 20
    assert sum(bool(block["prefixes"]) for block in llm.engine.block_map()) == 5
    with pytest.raises(BlocksInUse):
        llm.reset_prefix_cache()
    llm.unregister_prefix(registered)
    assert llm.engine.stats().usage.free == llm.engine.pool_info.num_slots
    with pytest.raises(InvalidRequest, match="is not one that register_prefix gave and that is registered"):
        llm.unregister_prefix(registered)
    llm.engine.reset_stats()
    llm.generate(prompts[0], GREEDY, progress=False)
    assert llm.engine.stats().prefix_hits == int(caching)


def test_prefixes_may_overlap(runs: Runs) -> None:
    llm = make_llm(runs)
    long = runs.prompts(24)[0]
    first, second = (llm.register_prefix({"prompt_token_ids": long[:n]}) for n in (12, 24))
    assert [len(block["prefixes"]) for block in llm.engine.block_map()] == [2, 2, 2, 1, 1, 1]
    llm.unregister_prefix(first)
    assert [block["ref_count"] for block in llm.engine.block_map()] == [1] * 6
    llm.generate({"prompt_token_ids": [*long, 5]}, GREEDY, progress=False)
    assert llm.engine.stats().prefix_hit_tokens >= 24
    llm.unregister_prefix(second)
    assert llm.engine.block_map() == []


def test_prefixes_that_share_nothing_or_fit_nowhere(runs: Runs) -> None:
    llm = make_llm(runs, num_blocks=8)
    for register in (llm.register_prefix, llm.engine.register_prefix):
        with pytest.warns(
            UserWarning, match=r"^the prefix of 3 tokens is shorter than a block of 4: nothing of"
        ) as seen:
            short = register({"prompt_token_ids": [1, 2, 3]})
        assert short.num_blocks == 0 and seen[0].filename == __file__
        llm.unregister_prefix(short)
    for length in (33, 40, 300):
        with pytest.raises(
            RequestTooLong,
            match=rf"^the prefix has {length} tokens, but max_model_len=256 and the whole pool of 8 blocks of 4 tokens "
            "allow at most 32$",
        ):
            llm.register_prefix({"prompt_token_ids": runs.prompts(length)[0]})
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        llm.register_prefix({"prompt_token_ids": []})
    assert llm.engine.block_map() == [] and not llm.engine.has_unfinished()


def test_what_a_registered_prefix_leaves_is_said_when_it_is_too_little(runs: Runs) -> None:
    llm = make_llm(runs, num_blocks=8)
    llm.register_prefix({"prompt_token_ids": runs.prompts(24)[0]})
    (output,) = llm.generate({"prompt_token_ids": runs.prompts(12, seed=5)[0]}, GREEDY, progress=False)
    assert output.outputs[0].finish_reason == "error"
    assert "of which registered prefixes take 24" in str(output.outputs[0].stop_reason)
    growing = SamplingParams(max_tokens=20, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, growing, progress=False)
    assert len(output.outputs[0].token_ids) == 6
    assert "of which registered prefixes take 24" in str(output.outputs[0].stop_reason)


def test_names_of_prefixes_and_of_users_do_not_collide(runs: Runs) -> None:
    engine = runs.engine()
    engine.add_request({"prompt_token_ids": [1, 2]}, GREEDY, request_id="prefix-1")
    prefixes = [engine.register_prefix({"prompt_token_ids": [1, 2, 3, 4, number]}) for number in range(3)]
    assert len({prefix.name for prefix in prefixes} | {"prefix-1"}) == 4
    for prefix in prefixes:
        engine.unregister_prefix(prefix)


def test_the_block_map_says_who_holds_what(runs: Runs) -> None:
    engine: Engine = runs.engine(enable_prefix_caching=True, overlap=False)
    prompt = runs.prompts(6)[0]
    name = engine.add_request({"prompt_token_ids": prompt}, SAMPLED)
    engine.step()
    first, second = engine.block_map()
    assert first == {
        "block": 1,
        "ref_count": 3,
        "cached": True,
        "prefixes": [],
        "num_tokens": 4,
        "token_ids": prompt[:4],
        "sequences": [{"request_id": name, "index": index, "seq_id": index, "logical_block": 0} for index in range(3)],
    }
    assert (second["ref_count"], second["cached"], second["token_ids"]) == (3, False, prompt[4:])
    engine.abort(name)
    assert [(block["ref_count"], block["cached"], block["sequences"]) for block in engine.block_map()] == [
        (0, True, [])
    ]
