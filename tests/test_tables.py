"""Tables as a person sees them, and the records that programs read."""

from __future__ import annotations

import json

from pagedjax.tables import format_table, write_json

ROWS = [
    {"system": "ours", "tokens": 12345, "seconds": 1.23456, "only": 7},
    {"system": "theirs", "tokens": 5, "seconds": 123.456},
]


def test_a_record_a_column_and_a_dash_where_a_record_has_no_value():
    assert format_table(ROWS).splitlines() == [
        "system     ours  theirs",
        "-------  ------  ------",
        "tokens   12,345       5",
        "seconds   1.235   123.5",
        "only          7       -",
    ]


def test_one_record_is_a_list_of_names_and_values():
    assert format_table([{"name": "x", "value": None}]).splitlines() == ["name   x", "value  -"]


def test_json_keys_are_the_column_names_and_values_keep_their_precision(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text("older, and longer than nothing")
    write_json(file, ROWS)
    assert json.loads(file.read_text()) == ROWS
    assert list(tmp_path.iterdir()) == [file]
