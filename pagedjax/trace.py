"""A log as a trace for https://ui.perfetto.dev or chrome://tracing: who waited, who computed, who held the memory.

Each run of the log is a process, each of its sequences a thread. A sequence's slices are `waiting`, `swapped`,
`prefill` and `decode`; the pool's blocks and the tokens of each step are counters. Times are in microseconds; a run
begins where the one before it ends.

A step that is planned while another one is computed begins when that one's result is there. So the slices of a sequence
never overlap. Decodes in a row make one slice.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from pagedjax.errors import PagedJaxError
from pagedjax.host.scheduler import Scheduler
from pagedjax.log_reader import Event
from pagedjax.request import SequenceStatus

_AWAY = {SequenceStatus.WAITING: "waiting", SequenceStatus.SWAPPED: "swapped"}


class Trace:
    """Watches a replay (`replay(log, observer=trace.observe)`) and makes a trace of what it sees.

    A run that was cut short, or that differs from its replay, ends where that happened.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def observe(self, event: Event, scheduler: Scheduler) -> None:
        """Takes an event that the scheduler has taken."""
        if event["event"] != "start":
            self._runs[-1].observe(event, scheduler)
            return
        before = self._runs[-1] if self._runs else None
        if before is not None:
            before.close()
        begin, last_tid = (before.now, before.last_tid) if before else (0, 0)
        self._runs.append(_Run(len(self._runs) + 1, str(event.get("time")), begin, last_tid))

    def data(self) -> dict[str, Any]:
        """The trace so far, JSON-able. What has not ended ends with the last event."""
        if self._runs:
            self._runs[-1].close()
        events = [event for run in self._runs for event in [*run.metadata(), *run.events]]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace to a file. Raises PagedJaxError if that cannot be written."""
        text = json.dumps(self.data(), separators=(",", ":"))
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise PagedJaxError(f"cannot write {os.fspath(path)} ({error.strerror})") from error


@dataclass(slots=True)
class _Lane:
    """One sequence's slices, one after another.

    Attributes:
        away: "waiting" or "swapped", while it is; None while it runs, and when it has ended.
        since: when that began, or the last slice ended, in microseconds.
        last: the last slice.
    """

    pid: int
    tid: int
    name: str
    arrival: int
    away: str | None
    since: int
    last: dict[str, Any] | None = None

    def go(self, time: int, away: str | None, events: list[dict[str, Any]]) -> None:
        """Where the sequence is from a time on, or from the end of its last slice, if that is later."""
        time = max(time, self.since)
        if self.away is not None and time > self.since:
            self._add(self.away, time, {}, events)
        self.away, self.since = away, time

    def compute(
        self, step: int, chunk: _Chunk, begin: int, end: int, events: list[dict[str, Any]], **args: bool
    ) -> None:
        """Adds a slice for the sequence's part of a step, or makes the last one longer if both are decodes."""
        self.go(begin, None, events)
        last, end_position = self.last, chunk.start + chunk.num_tokens
        if chunk.kind == "decode" and last and self._goes_on(last, step, begin):
            last["dur"] = end - last["ts"]
            last["args"] |= {"last_step": step, "end_position": end_position, **args}
            last["args"]["tokens"] += chunk.num_tokens
            self.since = end
            return
        where = {"tokens": chunk.num_tokens, "start_position": chunk.start, "end_position": end_position}
        self._add(chunk.kind, end, {"first_step": step, "last_step": step, **where, **args}, events)

    def _goes_on(self, last: dict[str, Any], step: int, begin: int) -> bool:
        return last["name"] == "decode" and last["args"]["last_step"] == step - 1 and last["ts"] + last["dur"] == begin

    def _add(self, name: str, end: int, args: dict[str, Any], events: list[dict[str, Any]]) -> None:
        where, times = {"pid": self.pid, "tid": self.tid}, {"ts": self.since, "dur": end - self.since}
        self.last = {"ph": "X", "name": name, "cat": "sequence", **where, **times, "args": args}
        self.since = end
        events.append(self.last)


@dataclass(slots=True)
class _Chunk:
    """What a sequence computes in a step: tokens at the positions from `start` on."""

    lane: _Lane
    kind: str
    start: int
    num_tokens: int


@dataclass(slots=True)
class _Step:
    """A plan whose result has not come, and what happened to sequences meanwhile: it shows when the step is over."""

    number: int
    planned: int
    chunks: list[_Chunk]
    changes: list[tuple[int, _Lane, str | None]] = field(default_factory=list)


class _Run:
    """One process of the trace.

    Attributes:
        events: its slices and counters.
        now: time of the last event, in microseconds.
        last_tid: the highest thread number in use.
    """

    def __init__(self, pid: int, started: str, begin: int, last_tid: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = begin
        self.last_tid = last_tid
        self._pid = pid
        self._started = started
        self._begin = begin
        self._computed = begin  # when the last result came
        self._lanes: list[_Lane] = []
        self._live: dict[int, _Lane] = {}  # by sequence
        self._next_seq_id = 0  # below it, all have been met
        self._num_beams: Counter[int] = Counter()  # met so far, by arrival
        self._steps: deque[_Step] = deque()
        self._counted: dict[str, dict[str, int]] = {}

    # ------------------------------------------------------------------ events

    def observe(self, event: Event, scheduler: Scheduler) -> None:
        """Takes an event that the scheduler has taken."""
        self.now = max(self.now, self._begin + round(event["t"] * 1e6))
        match event["event"]:
            case "plan":
                self._take_plan(event["plan"], scheduler)
            case "result":
                self._take_result(event["result"]["step"])
            case "recover":
                self._cut_steps()
                for seq_id, seq in scheduler.roster.sequences.items():
                    self._note(self._live[seq_id], _AWAY.get(seq.status))
            case "restore":  # perhaps other sequences altogether
                self.close()
                self._next_seq_id = 0
        self._meet(scheduler)
        self._part(scheduler)
        self._count_blocks(scheduler)

    def close(self) -> None:
        """Ends all sequences now."""
        self._cut_steps()
        for lane in self._live.values():
            lane.go(self.now, None, self.events)
        self._live.clear()

    def _take_plan(self, plan: Event, scheduler: Scheduler) -> None:
        sequences = scheduler.roster.sequences
        self._counter("tokens in the step", {"tokens": plan["num_tokens"]})
        for seq_id in plan.get("preempted", ()):
            if seq_id in sequences:
                self._note(self._live[seq_id], _AWAY.get(sequences[seq_id].status))
        chunks = []
        for seq_id, _, start, num_tokens, *_ in plan.get("chunks", ()):
            # One without tokens has its prompt computed by another of its request.
            kind = "prefill" if not num_tokens or start < sequences[seq_id].prefill_len else "decode"
            chunks.append(_Chunk(self._live[seq_id], kind, start, num_tokens))
        if chunks:
            self._steps.append(_Step(plan["step"], self.now, chunks))

    def _take_result(self, number: int) -> None:
        if self._steps and self._steps[0].number == number:  # not of a step planned before this scheduler was restored
            self._compute(self._steps.popleft())
        self._computed = self.now

    def _cut_steps(self) -> None:
        """No results come any more for the steps in flight."""
        while self._steps:
            self._compute(self._steps.popleft(), cut_short=True)
            self._computed = self.now

    def _compute(self, step: _Step, **args: bool) -> None:
        begin = max(step.planned, self._computed)
        for chunk in step.chunks:
            chunk.lane.compute(step.number, chunk, begin, self.now, self.events, **args)
        for time, lane, away in step.changes:
            lane.go(time, away, self.events)

    # ------------------------------------------------------------------ sequences

    def _meet(self, scheduler: Scheduler) -> None:
        """Makes a lane for each new sequence."""
        roster = scheduler.roster
        for seq_id in range(self._next_seq_id, roster.next_seq_id):
            seq = roster.sequences.get(seq_id)
            if seq is None:
                continue
            arrival, index = scheduler.get(seq.request.request_id).arrival, seq.index
            if seq.request.beam is not None:  # all beams are of the same sample
                index = self._num_beams[arrival]
                self._num_beams[arrival] += 1
            self.last_tid += 1
            name = f"{seq.request.request_id}[{index}]"
            self._live[seq_id] = _Lane(self._pid, self.last_tid, name, arrival, _AWAY.get(seq.status), self.now)
            self._lanes.append(self._live[seq_id])
        self._next_seq_id = roster.next_seq_id

    def _part(self, scheduler: Scheduler) -> None:
        """Ends the lanes of sequences that have ended."""
        sequences = scheduler.roster.sequences
        if len(self._live) > len(sequences):
            for seq_id in sorted(self._live.keys() - sequences.keys()):
                self._note(self._live.pop(seq_id), None)

    def _note(self, lane: _Lane, away: str | None) -> None:
        """Where a sequence goes now; it shows behind the steps in flight, in which it may still compute."""
        if self._steps:
            self._steps[-1].changes.append((self.now, lane, away))
        else:
            lane.go(self.now, away, self.events)

    # ------------------------------------------------------------------ counters and names

    def _count_blocks(self, scheduler: Scheduler) -> None:
        blocks = scheduler.allocator.occupancy()
        free = scheduler.allocator.num_blocks - blocks.used - blocks.cached
        self._counter("blocks", {"used": blocks.used, "cached": blocks.cached, "free": free})
        self._counter("blocks in the swap space", {"used": blocks.host_used})

    def _counter(self, name: str, values: dict[str, int]) -> None:
        """Only where it changes."""
        if self._counted.get(name) != values:
            self._counted[name] = values
            self.events.append({"ph": "C", "name": name, "pid": self._pid, "ts": self.now, "args": values})

    def metadata(self) -> list[dict[str, Any]]:
        """Names of the run and of its sequences, which are in order of arrival."""
        named: list[tuple[str, int, dict[str, Any]]] = []
        named.append(("process_name", 0, {"name": f"run {self._pid}, {self._started}"}))
        order = sorted(self._lanes, key=lambda lane: (lane.arrival, lane.tid))
        for place, lane in enumerate(order):
            named.append(("thread_name", lane.tid, {"name": lane.name}))
            named.append(("thread_sort_index", lane.tid, {"sort_index": place}))
        return [{"ph": "M", "name": name, "pid": self._pid, "tid": tid, "args": args} for name, tid, args in named]
