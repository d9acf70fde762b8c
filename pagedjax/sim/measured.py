"""How long steps take on a machine where they were measured: a linear fit on tokens, sequences and context."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedjax.config import require
from pagedjax.errors import ConfigError
from pagedjax.scalars import is_int, is_number, shown
from pagedjax.sim.records import StepRecord, StepShape

_RATES = (
    "seconds_per_seq",
    "seconds_per_context_token",
    "seconds_per_copied_block",
    "seconds_per_swapped_block",
)

ENGINE_FIELDS = {
    "block_size": int,
    "num_blocks": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "max_model_len": int,
    "enable_chunked_prefill": bool,
    "overlap": bool,
}
"""What of an engine's configuration its step times depend on, and a simulation of it needs."""


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """A program of so many tokens takes a time of its own, to which sequences, context, copies and swaps add.

    Attributes:
        model: whose steps were measured.
        token_sizes: tokens that programs are compiled for, ascending: a step is padded to the next one.
        token_seconds: of each, without what follows.
        seconds_per_seq, seconds_per_context_token, seconds_per_copied_block, seconds_per_swapped_block: what each adds.
        engine: how the engine was configured, as `EngineConfig` names it, with numbers of blocks and lengths resolved.
        mean_error: mean of |fitted - measured| over steps, relative to the mean step.
        num_steps: measured.
    """

    model: str
    token_sizes: tuple[int, ...]
    token_seconds: tuple[float, ...]
    seconds_per_seq: float
    seconds_per_context_token: float
    seconds_per_copied_block: float
    seconds_per_swapped_block: float
    engine: Mapping[str, Any]
    mean_error: float = 0.0
    num_steps: int = 0

    def __post_init__(self) -> None:
        sizes, times = self.token_sizes, (*self.token_seconds, *(getattr(self, name) for name in _RATES))
        _require(len(sizes) == len(self.token_seconds) > 0, "token_sizes and token_seconds of equal lengths")
        _require(all(is_int(size, 1) for size in sizes) and [*sizes] == sorted({*sizes}), "ascending token_sizes")
        _require(all(is_number(time) and time >= 0 for time in times), "times of 0 seconds or more")
        _require(any(self.token_seconds), "a time above 0")
        for name, kind in ENGINE_FIELDS.items():
            value = self.engine.get(name)
            _require(is_int(value, 1) if kind is int else isinstance(value, bool), f"{name} of the engine")

    def seconds(self, step: StepShape) -> float:
        """How long the step takes."""
        base = self.token_seconds[bisect_left(self.token_sizes, step.num_tokens)] if step.num_tokens else 0.0
        rates = [getattr(self, name) for name in _RATES]
        return base + sum([rate * number for rate, number in zip(rates, _extras(step), strict=True)])

    def rows(self, steps: Iterable[StepRecord]) -> list[dict[str, object]]:
        """Of each program size: steps measured, and their mean time measured and fitted, in milliseconds."""
        by_size: dict[int, list[tuple[float, float]]] = {size: [] for size in self.token_sizes}
        for step in steps:
            size = self.token_sizes[bisect_left(self.token_sizes, step.shape.num_tokens)]
            by_size[size].append((step.end - step.start, self.seconds(step.shape)))
        return [
            {
                "tokens": size,
                "steps": len(pairs),
                "measured_ms": 1e3 * sum(pair[0] for pair in pairs) / len(pairs) if pairs else None,
                "fitted_ms": 1e3 * sum(pair[1] for pair in pairs) / len(pairs) if pairs else None,
                "mean_error": sum(abs(a - b) for a, b in pairs) / sum(a for a, _ in pairs) if pairs else None,
            }
            for size, pairs in by_size.items()
        ]

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: str) -> MeasuredCost:
        """Reads what `pagedjax bench --step-times` wrote for a model. Raises ConfigError."""
        name = shown(os.fspath(path))
        try:
            (record,) = json.loads(Path(path).read_text(encoding="utf-8"))
            fields = dict(record["step_times"])
            for part in ("token_sizes", "token_seconds"):
                fields[part] = tuple(fields[part])
            cost = cls(**fields)
        except OSError as error:
            raise ConfigError(f"cost_model={name} cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"cost_model={name} is no file of `bench --step-times`: it is no text") from error
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"cost_model={name} is no file of `bench --step-times`: {shown(str(error))}") from error
        require(cost.model == model, "cost_model", os.fspath(path), f"of {model}; this one is of {cost.model}")
        return cost


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(f"it needs {what}")


def fit(model: str, steps: Sequence[StepRecord], token_sizes: Sequence[int], engine: Mapping[str, Any]) -> MeasuredCost:
    """The least squares of measured steps. What never happened in them is taken to cost nothing.

    A size of which there are no steps lies on the line between its neighbours; no coefficient is below 0.

    Args:
        steps: one at least.
        token_sizes: tokens that programs are compiled for, ascending.
        engine: see `MeasuredCost`.
    """
    import numpy as np
    from scipy.optimize import nnls

    sizes = tuple(token_sizes)
    seen = sorted({bisect_left(sizes, step.shape.num_tokens) for step in steps})
    matrix = np.zeros((len(steps), len(seen) + 4))
    times = np.array([step.end - step.start for step in steps])
    for row, step in zip(matrix, steps, strict=True):
        row[seen.index(bisect_left(sizes, step.shape.num_tokens))] = 1.0
        row[len(seen) :] = _extras(step.shape)
    scale = np.maximum(matrix.max(axis=0), 1.0)  # columns of like size, since contexts are thousands of tokens
    solution = nnls(matrix / scale, times)[0] / scale
    base = np.interp(sizes, [sizes[index] for index in seen], solution[: len(seen)])
    error = float(np.abs(matrix @ solution - times).mean() / times.mean())
    per_seq, per_context_token, per_copied_block, per_swapped_block = map(float, solution[len(seen) :])
    return MeasuredCost(
        model,
        sizes,
        tuple(map(float, base)),
        per_seq,
        per_context_token,
        per_copied_block,
        per_swapped_block,
        {name: engine[name] for name in ENGINE_FIELDS},
        error,
        len(steps),
    )


def _extras(step: StepShape) -> tuple[int, int, int, int]:
    return step.num_seqs, step.num_context, step.num_copied, step.num_swapped
