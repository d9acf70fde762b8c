"""Many configurations run, each once: what is finished stays, what failed is kept and told, and the rest goes on."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from filelock import FileLock
from tqdm import tqdm

from experiments.frame.executors import Executor
from experiments.frame.runs import DamagedRun
from experiments.frame.store import Store
from experiments.frame.tasks import Outcome, Task, source_hash

_POLL_SECONDS = 0.2


@dataclass
class Tally:
    """What became of the tasks.

    Attributes:
        run: were run now, and finished.
        stale: of those in `found`, made by another version of the experiment's file.
        found: were finished already, or by another process meanwhile.
        failed: have no records; with the error of each.
    """

    run: list[Task] = field(default_factory=list)
    found: list[Task] = field(default_factory=list)
    stale: list[Task] = field(default_factory=list)
    failed: list[tuple[Task, str]] = field(default_factory=list)


class Sweep:
    """Runs tasks through an executor into a store.

    Args:
        force: run also what is finished.

    Raises:
        StoreError: the store cannot be written; all that was finished stays.
    """

    def __init__(self, store: Store, force: bool = False) -> None:
        self.tally = Tally()
        self._store = store
        self._force = force
        self._locks: dict[str, FileLock] = {}  # of what runs, by hash

    def run(self, tasks: Sequence[Task], executor: Executor) -> None:
        """Runs them until all have ended, those that other processes run included."""
        waiting = deque({task.hash: task for task in tasks}.values())
        with _Bar(len(waiting)) as bar:
            try:
                while waiting or executor.busy:
                    if waiting and executor.room > 0 and self._start_one(waiting, executor, bar):
                        continue
                    if executor.busy:
                        for task, outcome in executor.wait(_POLL_SECONDS):
                            self._take(task, outcome, bar)
                        bar.refresh()
                    else:
                        time.sleep(_POLL_SECONDS)  # others run all that is left
            finally:
                for lock in self._locks.values():
                    lock.release()
                self._locks.clear()

    def _start_one(self, waiting: deque[Task], executor: Executor, bar: _Bar) -> bool:
        """Begins the next task that nobody else runs, or finds that it is finished; False if others run them all."""
        for _ in range(len(waiting)):
            task = waiting.popleft()
            lock = self._store.lock(task)
            if lock is None:
                waiting.append(task)
                continue
            self._locks[task.hash] = lock
            self._store.recover(task)
            try:
                is_finished = not self._force and self._is_finished(task)
            except DamagedRun as error:
                self._end(task, bar, error=f"{error}; --force runs it again")
                return True
            if is_finished:
                self._end(task, bar)
            else:
                executor.start(task)
            return True
        return False

    def _is_finished(self, task: Task) -> bool:
        found = self._store.run_of(task)
        if found is None or not found.is_finished:
            return False
        found.records()  # raises if they do not parse
        if found.manifest.get("source_sha256") != source_hash(task):
            self.tally.stale.append(task)
        return True

    def _end(self, task: Task, bar: _Bar, error: str | None = None) -> None:
        """Of a task that is not to be run."""
        self._locks.pop(task.hash).release()
        if error is None:
            self.tally.found.append(task)
        else:
            self.tally.failed.append((task, error))
        bar.found()

    def _take(self, task: Task, outcome: Outcome, bar: _Bar) -> None:
        folder = self._store.put(task, outcome)
        self._locks.pop(task.hash).release()
        if outcome.failed:
            self.tally.failed.append((task, f"{outcome.manifest['error']} ({folder / 'traceback.txt'} says where)"))
        else:
            self.tally.run.append(task)
        bar.ended(task, outcome)


class _Bar:
    """Progress with the time left: a bar on a terminal, elsewhere a line for each task."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, unit="run", disable=None, leave=False)
        self._total, self._left, self._run, self._begun = total, total, 0, time.perf_counter()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def refresh(self) -> None:
        """Shows that time goes by."""
        self._bar.refresh()

    def found(self) -> None:
        self._left -= 1
        self._bar.total -= 1
        self._bar.refresh()

    def ended(self, task: Task, outcome: Outcome) -> None:
        self._left -= 1
        self._run += 1
        self._bar.set_postfix_str(f"{task.name} {task.label}"[:60], refresh=False)
        self._bar.update()
        for key, what in (("error", "failed"), ("figure_error", "no figure")):
            if key in outcome.manifest:
                tqdm.write(f"{what}: {task.name} {task.label}: {outcome.manifest[key]}", file=sys.stderr)
        if self._bar.disable:
            left = self._left * (time.perf_counter() - self._begun) / self._run
            print(
                f"[{self._total - self._left}/{self._total}] {task.name} {task.label}: "
                f"{outcome.manifest['wall_s']:.1f} s; about {_duration(left)} left",
                flush=True,
            )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
