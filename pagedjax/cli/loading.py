"""Loading `LLM` late, as JAX takes seconds that --help and a mistyped flag need not wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedjax.interrupt import interrupts_deferred

if TYPE_CHECKING:
    from pagedjax.llm import LLM


def llm_class() -> type[LLM]:
    """`LLM`. Ctrl-C waits until it is there: in the middle of loading jaxlib it would come out as an ImportError."""
    with interrupts_deferred():
        from pagedjax.llm import LLM
    return LLM
