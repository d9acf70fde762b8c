"""Experiments: one file each. `python -m experiments list` names them; `load` gives their records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load"]


def load(name: str, store: str | Path | None = None) -> pd.DataFrame:
    """All finished records of an experiment: a row for each, the configuration's fields among its columns.

    Args:
        name: of the experiment.
        store: folder of the results; None is PAGEDJAX_STORE, or else `experiments/results/store`.

    Raises:
        StoreError: nothing of the experiment is there, or a record does not parse.
        ConfigError: there is no such experiment.
    """
    from experiments.frame.experiment import path_of
    from experiments.frame.frames import to_frame
    from experiments.frame.runs import StoreError, finished_records
    from experiments.frame.store import Store, default_store

    path_of(name)
    found = Store(store or default_store())
    recorded = finished_records(found.runs(name))
    if not recorded:
        raise StoreError(f"{found.path} has no finished run of {name}: python -m experiments run {name}")
    return to_frame(recorded)
