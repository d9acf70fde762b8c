"""Checks that the kernels' configurations share."""

from __future__ import annotations

NUM_WARPS = (1, 2, 4, 8, 16)
MAX_STAGES = 8


def check_launch(num_warps: int, num_stages: int) -> None:
    """Raises ValueError for what Triton could not launch."""
    if num_warps not in NUM_WARPS:
        raise ValueError(f"num_warps is {num_warps!r}; it must be one of {', '.join(map(str, NUM_WARPS))}")
    if type(num_stages) is not int or not 1 <= num_stages <= MAX_STAGES:
        raise ValueError(f"num_stages is {num_stages!r}; it must be an integer from 1 to {MAX_STAGES}")


def check_power_of_two(name: str, value: int, low: int, high: int) -> None:
    """Raises ValueError unless `value` is a power of two within the limits."""
    if type(value) is not int or not low <= value <= high or value & (value - 1):
        raise ValueError(f"{name} is {value!r}; it must be a power of two from {low} to {high}")
