"""Plans run on a device that only keeps books: every chunk finds what it reads, and the outputs are those foretold."""

import random

import pytest
from host_harness import STOP, BookkeepingDevice, Pipeline, expected_end, make_request, make_scheduler

from pagedjax.config import CacheConfig, SchedulerConfig
from pagedjax.host import PagedAllocator, ScheduledChunk, Scheduler, StepPlan


def random_run(seed, depth, num_blocks, block_size, chunk):
    """Twenty requests, added while others run; their outputs and ends by sequence."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks,
        block_size,
        max_num_seqs=5,
        max_num_batched_tokens=chunk or 48,
        max_model_len=48,
        enable_chunked_prefill=chunk is not None,
        watermark=0.1,
    )
    pipeline = Pipeline(scheduler, depth)
    for number in range(20):
        prompt_len = rng.randint(1, 14)
        max_tokens = rng.randint(1, 30)
        stop_ids, min_tokens = rng.choice([((), 0), ((STOP,), 0), ((STOP, 5), min(3, max_tokens))])
        pipeline.add(make_request(number, prompt_len, max_tokens, stop_ids=stop_ids, min_tokens=min_tokens))
        for _ in range(rng.randint(0, 3)):
            pipeline.step()
    pipeline.run_to_end()
    assert scheduler.allocator.usage({}).free == num_blocks * block_size
    return pipeline


@pytest.mark.parametrize("chunk", [2, 3, 7, 48, None])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_outputs_do_not_depend_on_pool_chunks_or_overlap(depth, chunk):
    num_preemptions = 0
    for seed in range(4):
        for num_blocks, block_size in ((64, 16), (14, 4), (20, 1), (5, 8)):
            pipeline = random_run(seed, depth, num_blocks, block_size, chunk)
            num_preemptions += pipeline.scheduler.num_preemptions
            for seq_id, request in pipeline.requests.items():
                expected = expected_end(request, num_blocks * block_size)
                assert (pipeline.outputs[seq_id], pipeline.ends[seq_id]) == expected
    assert num_preemptions > 50


def test_steps_hold_no_more_than_configured():
    for seed in range(4):
        for plan in random_run(seed, 1, 14, 4, 7).plans:
            assert len(plan.chunks) <= 5
            assert plan.num_tokens <= 7
            assert all(1 <= chunk.slot <= 5 for chunk in plan.chunks)


def test_the_papers_configuration_runs():
    pipeline = Pipeline(Scheduler(SchedulerConfig.paper(), PagedAllocator(CacheConfig(16, 200))), depth=1)
    for number in range(12):
        pipeline.add(make_request(number, 200 + 20 * number, max_tokens=60))
    pipeline.run_to_end()
    assert pipeline.scheduler.num_preemptions
    assert all(
        pipeline.outputs[seq_id] == expected_end(request, 3200)[0] for seq_id, request in pipeline.requests.items()
    )


def chunk(seq_id, slot, start, tokens, blocks=(), fresh=False):
    return ScheduledChunk(seq_id, slot, start, max(1, len(tokens)), tokens, 0, blocks, True, fresh)


def test_the_bookkeeping_device_sees_a_block_used_after_it_was_given_away():
    sequences = {number: (make_request(number, 2), 0) for number in range(2)}
    device = BookkeepingDevice(4, 4, 0, sequences)
    prompts = [request.prompt_token_ids for request, _ in sequences.values()]
    device.execute(StepPlan(0, (chunk(0, 1, 0, prompts[0], (3,), True),), 2))
    device.execute(StepPlan(1, (chunk(1, 2, 0, prompts[1], (3,), True),), 2))
    with pytest.raises(AssertionError, match=r"reads another prompt at 0$"):
        device.execute(StepPlan(2, (chunk(0, 1, 2, ()),), 1))


def test_the_bookkeeping_device_sees_what_was_not_computed_again():
    device = BookkeepingDevice(4, 4, 0, {0: (make_request(0, 6), 0)})
    tokens = make_request(0, 6).prompt_token_ids
    device.execute(StepPlan(0, (chunk(0, 1, 0, tokens, (1, 2), True),), 6))
    device.tables[1] = [3, 2]
    with pytest.raises(KeyError):
        device.execute(StepPlan(1, (chunk(0, 1, 6, ()),), 1))


def test_the_bookkeeping_device_sees_a_copy_that_was_forgotten():
    device = BookkeepingDevice(4, 4, 0, {number: (make_request(0, 2, n=2), number) for number in range(2)})
    tokens = make_request(0, 2).prompt_token_ids
    follower = ScheduledChunk(1, 2, 2, 0, (), 0, (1,), True, True)
    device.execute(StepPlan(0, (chunk(0, 1, 0, tokens, (1,), True), follower), 2))
    device.last_sampled.update({1: 3, 2: 4})
    copied = ScheduledChunk(0, 1, 2, 1, (), 0, (2,), True, False)
    device.execute(StepPlan(1, (copied, chunk(1, 2, 2, ())), 2, copies=((1, 2),)))
    device.tables[1] = [1]
    with pytest.raises(AssertionError, match=r"finds other tokens than its own$"):
        device.execute(StepPlan(2, (chunk(0, 1, 3, ()), chunk(1, 2, 3, ())), 2))
