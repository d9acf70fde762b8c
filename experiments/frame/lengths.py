"""Whether requests have the real lengths of the workloads, or those of the statistics that pagedjax ships."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd

from experiments.frame.experiment import OWN_FOLDER
from experiments.frame.values import require_choice
from pagedjax.config import require
from pagedjax.sim.traces import DATA_VARIABLE, Trace, workload_names

REAL, STATISTICS = "real", "statistics"


def find_data() -> None:
    """Sets PAGEDJAX_DATA, where it is not set, to the folder of data that lies beside a checkout."""
    beside = OWN_FOLDER.parent.parent / "shared" / "data"
    if DATA_VARIABLE not in os.environ and beside.is_dir():
        os.environ[DATA_VARIABLE] = str(beside)


def default_lengths() -> str:
    """Real ones where PAGEDJAX_DATA says where they are."""
    return REAL if os.environ.get(DATA_VARIABLE) else STATISTICS


@contextmanager
def lengths(kind: str) -> Iterator[None]:
    """With traces opened that are of this kind.

    Raises:
        ConfigError: it is no kind, or the real ones are wanted and PAGEDJAX_DATA is not set.
    """
    require_choice("lengths", kind, (REAL, STATISTICS))
    folder = os.environ.get(DATA_VARIABLE)
    require(kind == STATISTICS or bool(folder), "lengths", kind, f"{STATISTICS} where {DATA_VARIABLE} is not set")
    try:
        if kind == STATISTICS:
            os.environ.pop(DATA_VARIABLE, None)
        yield
    finally:
        if folder is not None:
            os.environ[DATA_VARIABLE] = folder


def require_real(trace: Trace, kind: str) -> None:
    """Raises ConfigError if a trace that was to have real lengths has those of statistics."""
    real = kind == STATISTICS or not trace.is_statistics or trace.name not in workload_names()
    require(real, "lengths", kind, f"{STATISTICS} for {trace.name}: {trace.description.partition(': ')[0]}")


def lengths_used(records: pd.DataFrame) -> str:
    """For the report: what the records' column `lengths_are_statistics` says, and which workloads they are of."""
    if records.empty:
        return ""
    if any(records["lengths_are_statistics"]):
        return "shipped statistics"
    return "the paper's" if set(records["workload"]) == {"sharegpt"} else "real"
