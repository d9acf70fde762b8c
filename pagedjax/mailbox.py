"""Where outputs wait for who asked for them: all together for `step()`, or by request for who waits for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pagedjax.request import RequestOutput


class Mailboxes:
    """Outputs that were made and not taken yet.

    Attributes:
        undelivered: the latest state of each request that has no mailbox.
    """

    def __init__(self) -> None:
        self.undelivered: dict[str, RequestOutput] = {}
        self._boxes: dict[str, deque[RequestOutput]] = {}

    def open(self, request_id: str, every: bool) -> None:
        """From now on keeps a request's outputs apart: every one of them, or the latest."""
        early = self.undelivered.pop(request_id, None)
        self._boxes[request_id] = deque(() if early is None else (early,), None if every else 1)

    def close(self, request_id: str) -> bool:
        """Forgets a mailbox and what is in it; whether there was one."""
        return self._boxes.pop(request_id, None) is not None

    def get(self, request_id: str) -> deque[RequestOutput] | None:
        """A request's mailbox, oldest output first; None if none was opened."""
        return self._boxes.get(request_id)

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Puts outputs where they belong."""
        for output in outputs:
            box = self._boxes.get(output.request_id)
            if box is None:
                self.undelivered[output.request_id] = output
            else:
                box.append(output)

    def take(self) -> list[RequestOutput]:
        """All that have no mailbox."""
        outputs, self.undelivered = list(self.undelivered.values()), {}
        return outputs

    def all(self) -> list[RequestOutput]:
        """The latest state of every request that has one waiting, in a mailbox or not."""
        return [*self.undelivered.values(), *(box[-1] for box in self._boxes.values() if box)]
