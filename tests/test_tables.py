"""Tables as a person sees them, and the records that programs read."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from pagedjax.errors import PagedJaxError
from pagedjax.tables import check_writable, format_table, write_json

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


def test_a_link_is_followed_and_what_cannot_be_replaced_is_written_to(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    check_writable(tmp_path / "link.json")
    write_json(tmp_path / "link.json", ROWS)
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "real.json").read_text()) == ROWS
    check_writable("/dev/null")
    write_json("/dev/null", ROWS)
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["", "missing/x.json", "x" * 300])
def test_where_nothing_can_be_written_is_said_before_and_after_and_nothing_is_left(tmp_path, name):
    with pytest.raises(OSError):
        check_writable(tmp_path / name)
    with pytest.raises(PagedJaxError, match=r"cannot write .* \((Is a directory|No such file.*|File name too long)\)"):
        write_json(tmp_path / name, ROWS)
    assert list(tmp_path.iterdir()) == []


def test_asking_leaves_nothing_behind_and_changes_nothing(tmp_path):
    check_writable(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("old")
    check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_fills_up_leaves_no_half_file(tmp_path, monkeypatch):
    def full(self, *args, **options):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(PagedJaxError, match=r"cannot write .*rows\.json \(No space left on device\)"):
        write_json(tmp_path / "rows.json", ROWS)
    assert list(tmp_path.iterdir()) == []


def test_many_records_of_few_fields_have_a_line_each():
    rows = [{"name": "a", "value": 1.0}, {"name": "bc", "value": 12345}, {"name": "d"}]
    assert format_table(rows) == "name   value\n----  ------\na      1.000\nbc    12,345\nd          -"
