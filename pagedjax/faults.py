"""Faults on purpose, for tests and for studies of what pressure and crashes cost. None of them changes a token.

Each function arms one fault of an engine and returns what disarms it.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

from pagedjax.config import require
from pagedjax.engine import Engine
from pagedjax.errors import OutOfBlocks
from pagedjax.host.allocator import PagedAllocator
from pagedjax.host.plan import SequenceUpdate, StepResult
from pagedjax.scalars import is_int

Disarm = Callable[[], None]

MOMENTS = ("schedule", "dispatch", "collect", "update")
"""Of a step: before it is planned, before the device gets it, before its results are awaited (the step after it may be
on the device by then), before the scheduler takes them."""


def preempt_every(engine: Engine, steps: int, num_requests: int | None = 1) -> Disarm:
    """Takes the memory of the latest arrivals after every `steps` steps that gave tokens.

    Steps without tokens do not count, so that whoever is computed again comes to a token before it is preempted again.

    Args:
        num_requests: how many of those that run; None is all of them.
    """
    _check_count("steps", steps)
    ok = num_requests is None or is_int(num_requests, 1)
    require(ok, "num_requests", num_requests, "None or an integer of at least 1")
    scheduler, update = engine.scheduler, engine.scheduler.update
    count = 0

    def counting_update(result: StepResult) -> list[SequenceUpdate]:
        nonlocal count
        updates = update(result)
        count += bool(result.token_ids or result.beams)
        if (result.token_ids or result.beams) and count % steps == 0:
            running = len(scheduler.roster.running)
            for _ in range(running if num_requests is None else min(running, num_requests)):
                scheduler.preempt_latest()
        return updates

    return _replace(scheduler, "update", counting_update)


def fail_allocation(engine: Engine, number: int) -> Disarm:
    """Lets the `number`-th allocation of blocks from now on, from 1, find none, though they were counted."""
    _check_count("number", number)

    def fail() -> None:
        raise OutOfBlocks(f"allocation {number} was made to fail")

    allocator: Any = engine.allocator
    return _at(allocator.pool if isinstance(allocator, PagedAllocator) else allocator.buddies, "allocate", number, fail)


def raise_in_step(
    engine: Engine, number: int, error: BaseException, moment: str = "dispatch", times: int = 1
) -> Disarm:
    """Raises `error` in the step that is the `number`-th from now on, from 1, and in `times - 1` more.

    Args:
        moment: one of `MOMENTS`.
    """
    _check_count("number", number)
    _check_count("times", times)
    require(isinstance(error, BaseException), "error", error, "an exception")

    def fail() -> None:
        raise copy.copy(error)  # one that was raised keeps alive all that it passed

    return _at(*_place(engine, moment), number, fail, times)


def kill_in_step(engine: Engine, number: int, moment: str = "collect") -> Disarm:
    """Kills this process (SIGKILL: nothing is cleaned up) in the step that is the `number`-th from now on, from 1."""
    _check_count("number", number)
    return _at(*_place(engine, moment), number, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _place(engine: Engine, moment: str) -> tuple[Any, str]:
    require(moment in MOMENTS, "moment", moment, f"one of {', '.join(MOMENTS)}")
    return {
        "schedule": (engine.scheduler, "schedule"),
        "dispatch": (engine.runner, "execute"),
        "collect": (engine.runner, "collect"),
        "update": (engine.scheduler, "update"),
    }[moment]


def _check_count(name: str, value: object) -> None:
    require(is_int(value, 1), name, value, "an integer of at least 1")


def _at(owner: Any, name: str, number: int, action: Callable[[], None], times: int = 1) -> Disarm:
    """Lets `action` come before the calls of a method from the `number`-th on, `times` of them."""
    method, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if number <= calls < number + times:
            action()
        return method(*args, **kwargs)

    return _replace(owner, name, counted)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> Disarm:
    """Puts a function in a method's place on one object, until what it gives is called; last armed, first disarmed."""
    before = vars(owner).get(name)
    setattr(owner, name, function)

    def disarm() -> None:
        delattr(owner, name) if before is None else setattr(owner, name, before)

    return disarm
