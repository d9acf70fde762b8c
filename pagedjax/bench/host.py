"""The scheduler's own time, without a device: what planning a step and taking in its tokens costs."""

from __future__ import annotations

import time

from pagedjax.config import CacheConfig, SchedulerConfig
from pagedjax.host import PagedAllocator, Scheduler, StepResult
from pagedjax.request import Request, SamplingParams

PROMPT_LEN = 64
NUM_STEPS = 256


def plan_milliseconds(num_running: int) -> float:
    """Mean milliseconds of `schedule` and `update` together, over 256 steps of `num_running` decodes.

    Blocks hold 16 tokens, so one decode in 16 takes a new block; nothing starts or ends meanwhile.
    """
    max_len = PROMPT_LEN + NUM_STEPS + 8
    scheduler = Scheduler(
        SchedulerConfig(num_running, num_running * PROMPT_LEN, max_len),
        PagedAllocator(CacheConfig(16, num_running * -(-max_len // 16) * 2)),
    )
    for number in range(num_running):
        prompt = tuple(range(number, number + PROMPT_LEN))
        scheduler.add(Request(str(number), number, prompt, SamplingParams(), 0, frozenset(), max_len))
    _step(scheduler)  # all prompts
    start = time.perf_counter()
    for _ in range(NUM_STEPS):
        _step(scheduler)
    return 1e3 * (time.perf_counter() - start) / NUM_STEPS


def _step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    assert plan is not None, "every sequence has tokens to go"
    scheduler.update(StepResult(plan.step, [7] * len(plan.chunks)))
