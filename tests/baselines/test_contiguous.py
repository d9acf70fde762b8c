"""Contiguous memory under the same scheduler: the same tokens, nothing shared, nobody preempted, all given back."""

from __future__ import annotations

import copy
import json
import random

import pytest
from host_harness import Pipeline, expected_beams, expected_end, make_request, make_scheduler, run

from pagedjax.baselines import allocator_names, make_allocator
from pagedjax.baselines.contiguous import ContiguousAllocator
from pagedjax.config import CacheConfig
from pagedjax.errors import OutOfBlocks, OutOfSlots, SnapshotError
from pagedjax.request import BeamSearchParams

CONTIGUOUS = [name for name in allocator_names() if name != "paged"]


def test_the_allocators_there_are():
    assert allocator_names() == ("paged", "orca-max", "orca-oracle", "orca-pow2")


def contiguous(scheduler) -> ContiguousAllocator:
    assert isinstance(scheduler.allocator, ContiguousAllocator)
    return scheduler.allocator


@pytest.mark.parametrize(("name", "blocks"), [("orca-max", 16), ("orca-pow2", 8), ("orca-oracle", 4)])
def test_what_is_reserved(name, blocks):
    scheduler = make_scheduler(64, allocator=name)  # blocks of 4, sequences of up to 64 tokens
    scheduler.add(make_request(0, 6, max_tokens=9))
    plan, _ = run(scheduler)
    assert plan.chunks[0].new_blocks == tuple(range(1, 1 + blocks))
    usage = scheduler.usage()
    # 6 tokens are there and 9 will come: 15. Max reserves 64, Pow2 6 + 16, rounded up to 32, Oracle 15, rounded to 16.
    internal = {"orca-max": 64 - 15, "orca-pow2": 22 - 15, "orca-oracle": 0}[name]
    assert usage == (6, 9, internal, 4 * blocks - 15 - internal, 256 - 4 * blocks)


def test_chunks_that_are_too_small_for_who_waits_are_external_fragmentation():
    scheduler = make_scheduler(24, allocator="orca-max")
    for number in range(2):
        scheduler.add(make_request(number, 3))
    run(scheduler)
    assert scheduler.num_running == 1 and scheduler.num_waiting == 1
    assert scheduler.usage().external_fragmentation == 8 * 4 and scheduler.usage().free == 0


def test_samples_and_beams_have_chunks_of_their_own():
    scheduler = make_scheduler(64, allocator="orca-oracle", max_num_seqs=8)
    scheduler.add(make_request(0, 5, max_tokens=8, n=3))
    plan, _ = run(scheduler)
    assert [chunk.num_tokens for chunk in plan.chunks] == [5, 5, 5] and plan.copies == ()
    assert contiguous(scheduler).buddies.num_chunks == 3
    scheduler.add(make_request(1, 5, max_tokens=8, beam=BeamSearchParams(4, 8)))
    scheduler.schedule()
    assert contiguous(scheduler).buddies.num_chunks == 7


def test_chunks_kept_for_beams_to_come_are_internal_fragmentation():
    scheduler = make_scheduler(64, allocator="orca-oracle")
    scheduler.add(make_request(0, 5, max_tokens=8, beam=BeamSearchParams(4, 8)))
    scheduler.schedule()
    # Four chunks of 4 blocks for 13 tokens each; one beam is there, with 5 tokens.
    assert scheduler.usage() == (5, 8, 3 * 13, 4 * 3, 256 - 4 * 16)


def test_a_request_that_needs_more_chunks_than_there_are_takes_none():
    scheduler = make_scheduler(48, allocator="orca-max")
    before = scheduler.allocator.snapshot()
    scheduler.add(make_request(0, 5, n=4))
    plan = scheduler.schedule()
    assert plan is not None and len(plan.failed) == 4
    assert {**scheduler.allocator.snapshot(), "refused": before["refused"]} == before


@pytest.mark.parametrize("name", CONTIGUOUS)
@pytest.mark.parametrize("seed", range(12))
def test_any_workload_gets_its_own_tokens(name, seed):
    rng = random.Random(seed)
    shape = {
        "num_blocks": rng.choice([16, 23, 40]),
        "block_size": rng.choice([1, 2, 4]),
        "max_num_seqs": 6,
        "max_num_batched_tokens": rng.choice([6, 9, 24]),
        "max_model_len": 24,
        "allocator": name,
    }
    pipeline = Pipeline(make_scheduler(**shape), depth=seed % 2)
    allocator, aborted = contiguous(pipeline.scheduler), set()
    limit = 1 << allocator.buddies.largest_free().bit_length() - 1
    for number in range(40):
        longest = min(24, limit * allocator.block_size)
        prompt_len = rng.randint(1, max(1, longest // 2))
        max_tokens = rng.randint(1, max(1, longest // 2 - 1))
        width = rng.choice([1, 1, 1, 2, 3])
        if rng.random() < 0.3:
            request = make_request(number, prompt_len, max_tokens, beam=BeamSearchParams(width, max_tokens))
        else:
            request = make_request(number, prompt_len, max_tokens, stop_ids=(0,), n=width)
        pipeline.add(request)
        for _ in range(rng.randint(0, 4)):
            pipeline.step()
            pipeline.scheduler.check_invariants()
            usage = pipeline.scheduler.usage()
            assert sum(usage) == shape["num_blocks"] * shape["block_size"] and min(usage) >= 0
        groups = list(pipeline.scheduler.roster.groups.values())
        if groups and rng.random() < 0.1:
            group = rng.choice(groups)
            aborted.update(seq.seq_id for seq in group.sequences)
            pipeline.scheduler.abort(group.request.request_id)
        if groups and rng.random() < 0.2:
            pipeline.read_all()
            fork(pipeline, rng)
        if rng.random() < 0.2:
            data = json.loads(json.dumps(pipeline.scheduler.snapshot()))
            scheduler = make_scheduler(**shape)
            scheduler.restore(data)
            assert scheduler.schedule() == copy.deepcopy(pipeline.scheduler).schedule()
    pipeline.run_to_end()
    assert pipeline.scheduler.num_preemptions == 0
    assert allocator.buddies.num_chunks == 0 and allocator.buddies.num_free == shape["num_blocks"]
    for seq_id, request in pipeline.requests.items():
        if seq_id not in aborted and pipeline.ends[seq_id] != "error":
            start, (_, index) = pipeline.starts.get(seq_id), pipeline.sequences[seq_id]
            assert (pipeline.outputs[seq_id], pipeline.ends[seq_id]) == expected_end(request, 10**6, index, start)
    for request_id, found in pipeline.found.items():
        assert found == expected_beams(pipeline.searches[request_id])


def fork(pipeline, rng):
    """Forks somebody with one sequence, if there is memory for it."""
    singles = [group for group in pipeline.scheduler.roster.groups.values() if group.only is not None]
    if not singles:
        return
    old = rng.choice(singles).request
    new = copy.copy(old)
    new.request_id = f"fork{rng.random()}"
    before = pipeline.scheduler.snapshot()
    try:
        pipeline.fork(old.request_id, new)
    except (OutOfBlocks, OutOfSlots):
        after = pipeline.scheduler.snapshot()
        after["allocator"]["refused"] = before["allocator"]["refused"]
        assert after == before


def test_snapshots_of_something_else_are_refused():
    allocator = make_allocator(CacheConfig(4, 16, allocator="orca-max"), 32)
    paged = make_allocator(CacheConfig(4, 16), 32)
    for one, other in ((allocator, paged), (paged, allocator)):
        with pytest.raises(SnapshotError):
            one.restore(other.snapshot())
    data = allocator.snapshot()
    for key, value in (("chunks", [[0, 1, 2, 8, 9, "r"]]), ("block_size", 8), ("buddies", None), ("copies", [[1, []]])):
        with pytest.raises(SnapshotError):
            allocator.restore({**data, key: value})
