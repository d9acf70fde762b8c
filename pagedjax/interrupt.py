"""Keeps Ctrl-C from striking in the middle of what must not be cut: a step of the engine, Orbax at work."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delivers a SIGINT that arrives inside only at the end. A second one is delivered at once, for who insists.

    Outside the main thread, where Python delivers no signals, and where SIGINT was set to be ignored, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        if held:
            before(signum, frame)
        held.append((signum, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])
