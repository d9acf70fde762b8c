"""One thread at a time, and nothing in between: the lock of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Exclusive:
    """A re-entrant lock; what its owner is asked to do meanwhile, as garbage collection may ask, is done at its end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._later: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        try:
            while self._depth == 1 and self._later:
                self._later.pop(0)()
        finally:
            self._depth -= 1
            self._lock.release()

    def when_free(self, action: Callable[[], None]) -> None:
        """Does it at once, when no other thread is inside; if this one is, at the end of its outermost block."""
        with self._lock:
            self._later.append(action)
            if self._depth == 0:
                with self:
                    pass
