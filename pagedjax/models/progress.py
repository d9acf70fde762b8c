"""Progress on stderr: bars in a terminal for whatever takes longer than a second, a plain line a stage elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

SLOW_SECONDS = 1.0
"""What takes no longer is not worth a word."""


def bar(items: Iterable[Any] | None, desc: str, progress: bool, **options: Any) -> tqdm:
    """A bar that appears only when the work takes longer than a second, and goes when it is done.

    Only in a terminal: in a file or a pipe it would be one long line of control characters.
    """
    return tqdm(items, desc=desc, disable=None if progress else True, delay=SLOW_SECONDS, leave=False, **options)


def bytes_bar(desc: str, total: int, progress: bool) -> tqdm:
    """A bar that counts bytes."""
    return bar(None, desc, progress, total=total, unit="B", unit_scale=True)


@contextmanager
def stages(desc: str, total: int, progress: bool) -> Iterator[Callable[[str], None]]:
    """Says which stage of a job has begun: at once, for its insides cannot all be counted.

    Yields a function to be called with the name of each stage as it begins.
    """
    if progress and not sys.stderr.isatty():
        yield lambda name: print(f"{desc}: {name}", file=sys.stderr)
        return
    with tqdm(total=total, desc=desc, disable=not progress, leave=False, bar_format="{desc} [{n}/{total}]") as ticks:

        def begin(name: str) -> None:
            ticks.set_description_str(f"{desc}: {name}", refresh=False)
            ticks.update(1)
            ticks.refresh()

        yield begin


@contextmanager
def said_if_slow(text: str, progress: bool) -> Iterator[None]:
    """Prints a line after a second, if what happens inside (one call, of which nothing can be counted) is not done."""
    if not progress:
        yield
        return
    timer = threading.Timer(SLOW_SECONDS, lambda: tqdm.write(text, file=sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
