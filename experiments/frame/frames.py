"""Records as a DataFrame: a row for each, the configuration's fields among its columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

Recorded = tuple[dict[str, Any], list[dict[str, Any]]]
"""A configuration, and its records."""


def to_frame(recorded: Iterable[Recorded], keys: Iterable[str] = ()) -> pd.DataFrame:
    """A record's own value goes before that of the configuration's field of the same name.

    Args:
        keys: of the configuration, which are columns even if there are no records.
    """
    rows = [{**config, **record} for config, records in recorded for record in records]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(keys))


def rows_where(records: pd.DataFrame, **values: Any) -> list[dict[str, Any]]:
    """The records that have these values in these columns, as they were; a column that is not there has none."""
    found: list[dict[str, Any]] = records.to_dict("records")  # type: ignore[call-overload]
    # pandas has NaN for what is not there
    rows = [{name: None if value != value else value for name, value in row.items()} for row in found]
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def figure_of(records: pd.DataFrame, column: str, **values: Any) -> float | None:
    """A column of the one record that has these values; None if there is no such record, or it has no figure.

    Raises:
        ValueError: there are several such records.
    """
    rows = rows_where(records, **values)
    if len(rows) > 1:
        raise ValueError(f"{len(rows)} records have {values}; one must be asked for")
    value = rows[0].get(column) if rows else None
    return None if value is None else float(value)


def ratio(one: float | None, other: float | None) -> float | None:
    """Of two figures; None if one is missing."""
    return None if one is None or not other else one / other
