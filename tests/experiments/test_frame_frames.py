"""Records as a DataFrame, and figures out of it."""

from __future__ import annotations

import pytest

from experiments.frame.frames import figure_of, ratio, rows_where, to_frame

RECORDS = to_frame(
    [
        ({"system": "vllm", "limit": None}, [{"power": 1, "rate": 2.0}, {"power": 2, "rate": None, "note": "slow"}]),
        ({"system": "ft", "limit": 3}, [{"power": 1, "rate": 0.5, "system": "ft-2"}]),
    ]
)


def test_a_records_own_value_goes_before_the_configurations() -> None:
    assert list(RECORDS["system"]) == ["vllm", "vllm", "ft-2"]
    assert list(RECORDS["power"]) == [1, 2, 1]


def test_rows_are_as_the_records_were() -> None:
    """Though pandas makes NaN of None, and floats of integers beside it."""
    first = {"system": "vllm", "limit": None, "power": 1, "rate": 2.0, "note": None}
    assert rows_where(RECORDS, limit=None, power=1) == [first]
    assert [row["note"] for row in rows_where(RECORDS, system="vllm")] == [None, "slow"]
    assert [row["system"] for row in rows_where(RECORDS, limit=3)] == ["ft-2"]
    assert rows_where(RECORDS, limit=4) == rows_where(RECORDS, nothing=1) == rows_where(to_frame([]), power=1) == []


def test_figure_of_the_one_record() -> None:
    assert figure_of(RECORDS, "rate", system="vllm", power=1) == 2.0
    assert figure_of(RECORDS, "rate", limit=None, power=2) is None
    assert figure_of(RECORDS, "rate", system="orca") is None
    assert figure_of(to_frame([]), "rate", system="vllm") is None
    with pytest.raises(ValueError, match="2 records have {'power': 1}; one must be asked for"):
        figure_of(RECORDS, "rate", power=1)


def test_ratio() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is ratio(3.0, None) is ratio(3.0, 0.0) is None
