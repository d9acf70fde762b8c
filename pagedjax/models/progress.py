"""Progress bars for whatever takes longer than a second."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


def bar(items: Iterable[Any] | None, desc: str, progress: bool, **options: Any) -> tqdm:
    """A bar on stderr that appears only when the work takes longer than a second, and goes when it is done."""
    return tqdm(items, desc=desc, disable=not progress, delay=1, leave=False, **options)


def bytes_bar(desc: str, total: int, progress: bool) -> tqdm:
    """A bar that counts bytes."""
    return bar(None, desc, progress, total=total, unit="B", unit_scale=True)


@contextmanager
def stages(desc: str, total: int, progress: bool) -> Iterator[Callable[[str], None]]:
    """A bar, shown at once, for a job of a few stages whose insides cannot all be counted.

    Yields a function to be called with the name of each stage as it begins.
    """
    with tqdm(total=total, desc=desc, disable=not progress, leave=False, bar_format="{desc} [{n}/{total}]") as ticks:

        def begin(name: str) -> None:
            ticks.set_description_str(f"{desc}: {name}", refresh=False)
            ticks.update(1)
            ticks.refresh()

        yield begin
