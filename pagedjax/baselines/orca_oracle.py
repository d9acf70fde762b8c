"""Orca (Oracle): the output's length is known beforehand, which no system can do (paper section 6.1)."""

from __future__ import annotations

from pagedjax.request import Request


def estimate(request: Request, max_model_len: int) -> int:
    """The output's length, which is taken to be the most that the request allows."""
    return request.max_len - len(request.prompt_token_ids)
