"""Schedulers that write a log, and workloads in which everything happens that a log can hold."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from host_harness import STOP, Pipeline, make_request, make_scheduler, paged

from pagedjax.errors import BlocksInUse, InvalidRequest, OutOfSlots
from pagedjax.event_log import EventLog
from pagedjax.host import Scheduler
from pagedjax.recorder import RecordingScheduler
from pagedjax.request import BeamSearchParams, Request

TINY: dict[str, Any] = {
    "num_blocks": 9,
    "block_size": 2,
    "max_num_batched_tokens": 9,
    "max_model_len": 24,
    "enable_prefix_caching": True,
    "num_host_blocks": 6,
}


def ticking(seconds: float = 0.001) -> Callable[[], float]:
    """A clock that goes on by as much with every look at it."""
    return itertools.count(100, seconds).__next__


def header_of(scheduler: Scheduler, **engine: object) -> dict[str, Any]:
    """The header of a scheduler's log."""
    config = {"cache": asdict(paged(scheduler)._config), "scheduler": asdict(scheduler.config)}
    return {"config": config, "engine": engine}


def make_recorder(path: Path, clock: Callable[[], float] | None = None, **shape: Any) -> RecordingScheduler:
    """A scheduler of that shape that writes to a log at `path`."""
    made = make_scheduler(**{**TINY, **shape})
    log = EventLog(path, header_of(made), clock or ticking())
    return RecordingScheduler(made.config, made.allocator, log)


def log_of(scheduler: Scheduler) -> EventLog:
    """What a recording scheduler writes to."""
    assert isinstance(scheduler, RecordingScheduler) and scheduler._log is not None
    return scheduler._log


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a log, all of which must be whole."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def rewrite(path: Path, events: list[dict[str, Any]]) -> Path:
    """Writes a log anew."""
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


class Workload:
    """Random events for a recording scheduler, the same for the same seed."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.random = random.Random(seed)
        self.pipeline = Pipeline(scheduler, depth=self.random.randint(0, 1))
        self.number = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.pipeline.scheduler

    def run(self, num_events: int, finish: bool = True) -> Pipeline:
        """Lets so many things happen, and then works off what is left."""
        actions = [self.add] * 4 + [self.step] * 12 + [self.search, self.register, self.unregister, self.fork]
        actions += [self.abort, self.end_sample, self.fail_sample, self.preempt, self.reset, self.recover, self.restore]
        for _ in range(num_events):
            self.random.choice(actions)()
        if finish:
            self.pipeline.run_to_end()
        return self.pipeline

    def _request(self, max_tokens: int, **more: Any) -> Request:
        self.number += 1
        family, salt = self.random.choice([None, 0, 1]), self.random.choice([None, None, "a"])
        prompt_len = self.random.randint(1, 7)
        stops = self.random.choice([(), (STOP,), (STOP, 3)])
        return make_request(self.number, prompt_len, max_tokens, stop_ids=stops, family=family, salt=salt, **more)

    def add(self) -> None:
        self.pipeline.add(self._request(self.random.randint(1, 8), n=self.random.choice([1, 1, 3])))

    def search(self) -> None:
        width, max_tokens = self.random.randint(1, 3), self.random.randint(1, 6)
        self.pipeline.add(self._request(max_tokens, beam=BeamSearchParams(width, max_tokens, 0.7)))

    def register(self) -> None:
        if len(paged(self.scheduler).pins()) < 2:
            self.pipeline.add(self._request(1, registers_prefix=True))

    def unregister(self) -> None:
        if pinned := sorted(paged(self.scheduler).pins()):
            self.scheduler.unpin(self.random.choice(pinned))

    def fork(self) -> None:
        self.pipeline.read_all()
        if groups := list(self.scheduler.roster.groups.values()):
            old = self.random.choice(groups).request
            new = copy.copy(old)
            self.number += 1
            new.request_id, new.registers_prefix = f"fork{self.number}", False
            with contextlib.suppress(InvalidRequest, OutOfSlots):
                self.pipeline.fork(old.request_id, new)

    def step(self) -> None:
        self.pipeline.step()

    def abort(self) -> None:
        if groups := list(self.scheduler.roster.groups.values()):
            group = self.random.choice(groups)
            self.pipeline.ends.update({seq.seq_id: "abort" for seq in group.unfinished if group.beam is None})
            self.scheduler.abort(group.request.request_id)

    def end_sample(self) -> None:
        sequences = [seq for seq in self.scheduler.roster.sequences.values() if seq.request.beam is None]
        if sequences:
            seq = self.random.choice(sequences)
            self.pipeline.ends[seq.seq_id] = "stop"
            self.scheduler.finish_sequence(seq.seq_id, "stop", "END")

    def fail_sample(self) -> None:
        if self.pipeline.results:
            result = self.pipeline.results[0]
            chunks = self.pipeline.plans[result.step].chunks
            if sampling := [chunk.seq_id for chunk in chunks if chunk.samples]:
                self.pipeline.results[0] = result._replace(errors={self.random.choice(sampling): "not finite"})

    def preempt(self) -> None:
        self.scheduler.preempt_latest()

    def reset(self) -> None:
        with contextlib.suppress(BlocksInUse):
            self.scheduler.reset_prefix_cache()

    def recover(self) -> None:
        if not self.random.randrange(4):
            self.pipeline.fail()

    def restore(self) -> None:
        if not self.random.randrange(4):
            self.scheduler.restore(json.loads(json.dumps(self.scheduler.snapshot())))


def record(path: Path, seed: int, num_events: int = 120, finish: bool = True) -> Scheduler:
    """Writes the log of a random workload, and gives the scheduler as it was at its end."""
    shapes: list[dict[str, Any]] = [
        {},
        {"preemption": "swap"},
        {"num_host_blocks": 0},
        {"enable_prefix_caching": False},
        {"num_blocks": 14},
    ]
    scheduler = make_recorder(path, None, **random.Random(seed).choice(shapes))
    Workload(scheduler, seed).run(num_events, finish)
    log_of(scheduler).close()
    return scheduler
