"""The host's own time, without a device: planning steps, finding prefixes, allocating blocks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from pagedjax.config import CacheConfig, SchedulerConfig
from pagedjax.host import BlockPool, PagedAllocator, Scheduler, StepPlan, StepResult
from pagedjax.request import Request, SamplingParams, Sequence

BLOCK_SIZE = 16
PROMPT_LEN = 64
HIT_LEN = 1024
NUM_STEPS = 256


def host_rows(repeats: int) -> list[dict[str, object]]:
    """What is measured, the best of `repeats` each: others may disturb a machine, nobody makes it faster."""
    rows: list[dict[str, object]] = []
    for running in (32, 256):
        for caching in (False, True):
            measure = f"plan and update, {running} decodes, prefix caching {'on' if caching else 'off'}"
            rows.append(_row(measure, "us a step", _best(min, repeats, lambda r=running, c=caching: step_us(r, c))))
    rows.append(_row(f"prefix hits, prompts of {HIT_LEN} tokens", "a second", _best(max, repeats, hits_per_s)))
    for count in (1, 16):
        per_s = _best(max, repeats, lambda n=count: allocations_per_s(n))
        rows.append(_row(f"blocks allocated, {count} at a time", "a second", per_s))
    return rows


def _row(measure: str, unit: str, value: float) -> dict[str, object]:
    return {"measure": measure, "value": value, "unit": unit}


def _best(choose: Callable[..., float], repeats: int, measure: Callable[[], float]) -> float:
    return choose(measure() for _ in range(repeats))


def step_us(num_running: int, caching: bool) -> float:
    """Mean microseconds of `schedule` and `update` together, over 256 steps of `num_running` decodes.

    Blocks hold 16 tokens, so one decode in 16 takes a new block and, with prefix caching, seals the one before.
    Nothing starts or ends meanwhile. Tokens are random, so that no two sequences fill equal blocks.
    """
    max_len = PROMPT_LEN + NUM_STEPS + 8
    num_blocks = num_running * -(-max_len // BLOCK_SIZE) * 2
    scheduler = Scheduler(
        SchedulerConfig(num_running, num_running * PROMPT_LEN, max_len),
        PagedAllocator(CacheConfig(BLOCK_SIZE, num_blocks, enable_prefix_caching=caching)),
    )
    rng = random.Random(0)
    for number in range(num_running):
        prompt = tuple(rng.choices(range(50_000), k=PROMPT_LEN))
        scheduler.add(Request(str(number), number, prompt, SamplingParams(), 0, frozenset({0}), max_len))
    scheduler.update(_result(scheduler.schedule(), rng))  # all prompts
    seconds = 0.0
    for _ in range(NUM_STEPS):
        began = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        result = _result(plan, rng)
        answered = time.perf_counter()
        scheduler.update(result)
        seconds += time.perf_counter() - answered + planned - began
    return 1e6 * seconds / NUM_STEPS


def _result(plan: StepPlan | None, rng: random.Random) -> StepResult:
    assert plan is not None, "every sequence has tokens to go"
    return StepResult(plan.step, rng.choices(range(1, 50_000), k=len(plan.chunks)))


def hits_per_s(count: int = 200) -> float:
    """Requests a second that find a prompt of 1,024 tokens in the cache: hashed, found, admitted and freed."""
    allocator = PagedAllocator(CacheConfig(BLOCK_SIZE, 4 * HIT_LEN // BLOCK_SIZE, enable_prefix_caching=True))
    prompt = tuple(random.Random(0).choices(range(50_000), k=HIT_LEN))

    def sequence(number: int) -> Sequence:
        request = Request(str(number), number, prompt, SamplingParams(), 0, frozenset(), HIT_LEN + 1)
        return Sequence(number, request, token_ids=list(prompt))

    first, *others = map(sequence, range(count + 1))
    allocator.admit([first], alone=True)
    first.num_computed = HIT_LEN
    allocator.seal(first)
    allocator.free(first)
    began = time.perf_counter()
    for other in others:
        allocator.admit([other], alone=True)
        allocator.free(other)
    seconds = time.perf_counter() - began
    assert allocator.prefix_stats.hits == count
    return count / seconds


def allocations_per_s(at_a_time: int, num_blocks: int = 100_000) -> float:
    """Blocks a second that an empty pool hands out."""
    pool = BlockPool(num_blocks)
    allocate, calls = pool.allocate, num_blocks // at_a_time
    began = time.perf_counter()
    for _ in range(calls):
        allocate(at_a_time)
    return calls * at_a_time / (time.perf_counter() - began)
