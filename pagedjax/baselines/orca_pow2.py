"""Orca (Pow2): the output's length is known up to a factor of two (paper section 6.1)."""

from __future__ import annotations

from pagedjax.request import Request


def estimate(request: Request, max_model_len: int) -> int:
    """The next power of two of the output's length, which is taken to be the most that the request allows."""
    return 1 << (request.max_len - len(request.prompt_token_ids) - 1).bit_length()
