"""A claim of the paper, or of the seed note: what it says, what we found, and whether that is the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
NEEDS_ACCELERATOR = "needs an accelerator"
NO_RECORDS = "no records"
HOLDS = "holds"
DOES_NOT_HOLD = "does not hold"


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the report.

    Attributes:
        text: what is claimed, in words.
        source: where: "Fig. 2", "section 6.2", "seed".
        ours: our figure, computed from records; None if they are missing.
        low, high: what counts as reproduced, both included; None is open.
        paper: what the paper says, with its unit.
        seed: what the seed note says.
        unit: of `ours`, `low` and `high`; "%" has them printed times 100.
        how: how ours was obtained.
        lengths: of requests, where it depends on them; see `traces.lengths_used`.
        needs_accelerator: a CPU's figure is shown, and decides nothing.
        timed: it measures time, so that another run gives another figure.
    """

    text: str
    source: str
    ours: float | None
    low: float | None
    high: float | None
    paper: str | None = None
    seed: str | None = None
    unit: str = ""
    how: str = ""
    lengths: str = ""
    needs_accelerator: bool = False
    timed: bool = False

    @property
    def verdict(self) -> str:
        """One of those above: what neither the paper nor the seed says can only hold, or not."""
        if self.ours is None or math.isnan(self.ours):
            return NEEDS_ACCELERATOR if self.needs_accelerator else NO_RECORDS
        if self.needs_accelerator:
            return NEEDS_ACCELERATOR
        above = self.low is None or self.ours >= self.low
        ok = above and (self.high is None or self.ours <= self.high)
        if self.paper is None and self.seed is None:
            return HOLDS if ok else DOES_NOT_HOLD
        return REPRODUCED if ok else NOT_REPRODUCED

    @property
    def accepted(self) -> str:
        """The bounds, as printed."""
        low, high = self._shown(self.low), self._shown(self.high)
        if self.low is None and self.high is None:
            return "-"
        if self.low is None:
            return f"<= {high}"
        if self.high is None:
            return f">= {low}"
        return low if self.low == self.high else f"{low} to {high}"

    @property
    def figure(self) -> str:
        """Ours, as printed."""
        return self._shown(self.ours)

    def _shown(self, value: float | None) -> str:
        if value is None or math.isnan(value):
            return "-"
        number = 100 * value if self.unit == "%" else value
        text = f"{number:.4g}" if abs(number) < 9999.5 else f"{number:,.0f}"
        return f"{text} {self.unit}".rstrip()
