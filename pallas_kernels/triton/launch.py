"""What the kernels' configurations share: checks, and how deep a pipeline fits the chip."""

from __future__ import annotations

import jax

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


def pipeline_stages(row_bytes: int) -> int:
    """Stages for K and V with rows of `row_bytes`: tiles of one stage are not kept in shared memory beside the others.

    A kernel takes up to 105 KiB with two stages and rows of 512 bytes, which is more than the 99 KiB of compute
    capability 8.6, 8.9 and 12. A chip that is not here is taken for one of the larger ones, with 163 KiB at least.
    """
    if row_bytes < 512:
        return 2
    if row_bytes > 512:
        return 1
    here = str(jax.devices()[0].compute_capability) if jax.default_backend() == "gpu" else None
    return 1 if here in ("8.6", "8.7", "8.9") or (here or "").startswith("12.") else 2
