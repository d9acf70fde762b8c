"""What each format of this package says about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pagedjax.sim.traces.formats.head import Head
from pagedjax.sim.traces.rows import TraceRow


@dataclass(frozen=True, slots=True)
class Format:
    """A form in which traces are published.

    Attributes:
        name: by which it can be chosen.
        kinds: of files that it comes as (see `Head`).
        fields: columns or keys that it is recognised by; of several in one place, any.
        read: of a path, a `Problems` to count in and, if `holds_text`, a function that counts a text's tokens, makes
            the rows, one at a time where the form of the file allows it.
        time: column or key of arrivals: they are there if it is. Of several, any.
        block_tokens: tokens of a prompt for each of its hashes; 0 if it has none.
        holds_text: whether its lengths are to be counted.
    """

    name: str
    kinds: tuple[str, ...]
    fields: tuple[tuple[str, ...], ...]
    read: Callable[..., Iterator[TraceRow]]
    time: tuple[str, ...] = ()
    block_tokens: int = 0
    holds_text: bool = False

    def fits(self, head: Head) -> bool:
        """Whether a file that begins so has all that this format needs."""
        return head.kind in self.kinds and all(not set(names).isdisjoint(head.names) for names in self.fields)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(' or '.join(names) for names in self.fields)})"
