"""Orca (Max): memory for the longest sequence that the model allows (paper section 6.1)."""

from __future__ import annotations

from pagedjax.request import Request


def estimate(request: Request, max_model_len: int) -> int:
    """Output tokens up to the model's limit."""
    return max_model_len - len(request.prompt_token_ids)
