"""Where tasks run: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from experiments.frame.tasks import Outcome, Task, execute, failure
from experiments.frame.values import said
from pagedjax.errors import ConfigError

Done = tuple[Task, Outcome]

_END_SECONDS = 10
"""For a process to end in that has closed its pipe."""


class Executor(Protocol):
    """Takes tasks, and gives their outcomes in the order in which they end."""

    @property
    def room(self) -> int:
        """How many more tasks it would begin at once."""
        ...

    @property
    def busy(self) -> int:
        """How many tasks have not ended."""
        ...

    def start(self, task: Task) -> None:
        """Begins a task."""
        ...

    def wait(self, timeout: float) -> list[Done]:
        """The tasks that have ended; waits so many seconds for the first."""
        ...


# ---------------------------------------------------------------------- processes of this machine


class _Worker:
    """A process that runs one task after another. It ends with its parent, however that ends."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self._begun = 0.0

    def start(self, task: Task) -> None:
        self.task, self._begun = task, time.perf_counter()
        with suppress(OSError):  # if it has died, that is seen when its outcome is asked for
            self.pipe.send(task)

    def outcome(self) -> Outcome:
        """Of the task that has ended, or with which the process has died."""
        task, self.task = self.task, None
        assert task is not None
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_END_SECONDS)
            code = self.process.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            error = f"its process {how} (out of memory?)" if code == -signal.SIGKILL else f"its process {how}"
            return failure(task, error, error + "\n", time.perf_counter() - self._begun)

    def end(self) -> None:
        if self.task is None:  # it waits, and can clear up after itself
            with suppress(OSError):
                self.pipe.send(None)
                self.process.join(_END_SECONDS)
        self.process.kill()  # an experiment may have its own idea of SIGTERM
        self.process.join()
        self.process.close()
        self.pipe.close()


def _serve(pipe: connection.Connection) -> None:
    """The worker's side."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        while True:
            task = pipe.recv()
            if task is None:
                return
            pipe.send(execute(task))
    except (EOFError, OSError):  # the parent has gone
        return


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A Ctrl-C waits; processes that are begun meanwhile never see one.

    A terminal sends it to all processes, and it is for the parent alone, who ends them.
    """
    came: list[Any] = []
    resource_tracker.ensure_running()  # which lifts the mask when it begins
    handler = signal.signal(signal.SIGINT, lambda *_: came.append(_))  # the mask is not one of other threads
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


class LocalExecutor:
    """So many processes of this machine, each of which runs one task after another.

    One that has loaded JAX runs no second task: its compiled programs and memory would be there still.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._workers: list[_Worker] = []

    @property
    def busy(self) -> int:
        return sum(worker.task is not None for worker in self._workers)

    @property
    def room(self) -> int:
        return self._jobs - self.busy

    def start(self, task: Task) -> None:
        idle = [worker for worker in self._workers if worker.task is None]
        for dead in [worker for worker in idle if not worker.process.is_alive()]:  # nobody's task died with it
            idle.remove(dead)
            self._workers.remove(dead)
            dead.end()
        if not idle:
            with _uninterrupted():
                idle = [_Worker()]
                self._workers += idle
        idle[0].start(task)

    def wait(self, timeout: float) -> list[Done]:
        by_pipe = {worker.pipe: worker for worker in self._workers if worker.task is not None}
        done: list[Done] = []
        for pipe in connection.wait(list(by_pipe), timeout):
            worker = by_pipe[pipe]  # type: ignore[index]
            task = worker.task
            assert task is not None
            outcome = worker.outcome()
            done.append((task, outcome))
            if outcome.failed or outcome.manifest["device"] is not None:
                self._workers.remove(worker)
                worker.end()
        return done

    def close(self) -> None:
        """Ends all processes, whatever they do."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()


# ---------------------------------------------------------------------- a Ray cluster


class RayExecutor:
    """A Ray cluster: the one at an address, else one that this process starts on its machine.

    Its machines need the same Python environment and this checkout, at the same paths, as a shared disk gives them.
    What they find comes back, so that only this process writes to the store.

    Args:
        address: of a running cluster ("auto" finds one begun on this machine); None is RAY_ADDRESS, or starts one.
        jobs: tasks at the same time; None is as many as the cluster has CPUs.
    """

    def __init__(self, address: str | None, jobs: int | None) -> None:
        # Tasks ask for no accelerator, as they might not need one; Ray is not to hide them all then.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--executor ray needs Ray: pip install 'pagedjax[ray]'") from error
        address = address or os.environ.get("RAY_ADDRESS")
        if address is not None:
            _check_reachable(address)
        self._ray: Any = ray
        root = str(Path(__file__).parent.parent.parent)
        variables = {name: value for name, value in os.environ.items() if name.startswith(("PAGEDJAX_", "JAX_"))}
        environment = {"env_vars": {**variables, "PYTHONPATH": os.pathsep.join([root, *sys.path])}}
        dashboard = False if address is None else None  # None, of a cluster that is there
        try:
            ray.init(address or "local", runtime_env=environment, log_to_driver=False, include_dashboard=dashboard)
        except (OSError, RuntimeError, ValueError) as error:
            what = "a Ray cluster cannot be begun here" if address is None else _no_cluster(address)
            raise ConfigError(f"{what}: {said(error)}") from error
        self._jobs = jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
        # One task a process: see LocalExecutor.
        self._execute = ray.remote(num_cpus=1, max_retries=0, max_calls=1)(execute)
        self._running: dict[Any, tuple[Task, float]] = {}

    @property
    def busy(self) -> int:
        return len(self._running)

    @property
    def room(self) -> int:
        return self._jobs - self.busy

    def start(self, task: Task) -> None:
        self._running[self._execute.remote(task)] = (task, time.perf_counter())

    def wait(self, timeout: float) -> list[Done]:
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout)
        return [self._outcome(reference) for reference in ready]

    def _outcome(self, reference: Any) -> Done:
        task, begun = self._running.pop(reference)
        try:
            return task, self._ray.get(reference)
        except self._ray.exceptions.RayError as error:  # the process or its machine died
            return task, failure(task, f"Ray: {type(error).__name__}", f"{error}\n", time.perf_counter() - begun)

    def close(self) -> None:
        """Leaves the cluster, and ends it if it was begun here."""
        self._ray.shutdown()


def _no_cluster(address: str) -> str:
    return f"--address {address!r} leads to no Ray cluster"


def _check_reachable(address: str) -> None:
    """Raises ConfigError if nobody listens there; Ray itself would ask for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto"; of nonsense, Ray says so itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{_no_cluster(address)}: {error}") from error


@contextmanager
def executor(kind: str, *, jobs: int | None, address: str | None) -> Iterator[LocalExecutor | RayExecutor]:
    """The executor of a kind, "local" or "ray"."""
    made = RayExecutor(address, jobs) if kind == "ray" else LocalExecutor(jobs or 1)
    try:
        yield made
    finally:
        made.close()
