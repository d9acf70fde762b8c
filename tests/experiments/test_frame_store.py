"""The results on disk: whole or not at all, whoever reads or writes them, and complaints that name the place."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import experiments
from experiments.frame import store as store_module
from experiments.frame.compare import compare, results_differ
from experiments.frame.runs import DamagedRun, StoreError
from experiments.frame.store import Store
from experiments.frame.tasks import execute
from pagedjax.errors import ConfigError


def folder_of(lab: Any, task: Any) -> Path:
    return lab.store_path / "squares" / task.hash


def test_what_is_in_a_folder(lab: Any) -> None:
    task = lab.task(number=3, seed=5)
    lab.sweep(task)
    folder = folder_of(lab, task)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "figure.png",
        "figure.svg",
        "manifest.json",
        "records.jsonl",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config == {"number": 3, "factor": 1.0, "what": "", "seed": 5, "bound": None}
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert records == [
        {"power": 1, "result": 3.0, "type": "float"},
        {"power": 2, "result": 9.0, "type": "float"},
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["experiment"] == "squares" and manifest["hash"] == task.hash
    assert manifest["status"] == "finished" and manifest["num_records"] == 2
    assert manifest["seeds"] == {"experiment": 5} and manifest["configuration"] == config
    assert manifest["wall_s"] >= 0 and manifest["packages"]["numpy"]
    assert manifest["git"] is None or manifest["git"].keys() == {"commit", "clean"}  # None outside a checkout


def test_a_configuration_has_one_folder_however_it_is_written(lab: Any) -> None:
    assert lab.task(factor=2).hash == lab.task(factor=2.0).hash != lab.task(factor=2.5).hash
    tally, started = lab.sweep(lab.task(factor=2), lab.task(factor=2.0), lab.task(factor=2))
    assert len(started) == len(tally.run) == 1 and not tally.found
    assert [record["type"] for _, records in lab.records().values() for record in records] == ["float", "float"]


def test_load(lab: Any) -> None:
    lab.sweep(*(lab.task(number=number, seed=seed) for number in (10, 9) for seed in (0, 1)), lab.task(what="raise"))
    found = experiments.load("squares")
    assert list(zip(found["number"], found["seed"], found["power"], found["result"], strict=True)) == [
        (number, seed, power, number**power) for number in (9, 10) for seed in (0, 1) for power in (1, 2)
    ]
    assert found.equals(experiments.load("squares", lab.store_path))


def test_load_of_what_is_not_there(lab: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean 'squares'"):
        experiments.load("square")
    with pytest.raises(StoreError, match="no finished run of squares: python -m experiments run squares"):
        experiments.load("squares")
    assert not lab.store_path.exists()  # to read makes nothing


def test_load_of_an_experiment_whose_file_is_broken(lab: Any) -> None:
    lab.sweep(lab.task())
    lab.write("squares", "class Config: (\n")
    assert len(experiments.load("squares")) == 2


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"power": 1}\n{"power": 2\n', r"records.jsonl, line 2: no JSON"),
        ('{"power": 1}\n\n', r"records.jsonl, line 2: no JSON"),
        ('{"power": 1}\n[2]\n', r"records.jsonl, line 2: a record must be an object, not list"),
        ('{"power": 1}\n', r"records.jsonl has 1 records; its manifest says 2"),
        ('{"power": 1}\n' * 3, r"records.jsonl has 3 records; its manifest says 2"),
        ("", r"records.jsonl has 0 records; its manifest says 2"),
    ],
    ids=["cut", "empty line", "list", "too few", "too many", "none"],
)
def test_records_that_do_not_parse(lab: Any, text: str, message: str) -> None:
    task = lab.task()
    lab.sweep(task, lab.task(number=2))
    (folder_of(lab, task) / "records.jsonl").write_text(text)
    with pytest.raises(DamagedRun, match=message):
        experiments.load("squares")
    tally, started = lab.sweep(task, lab.task(number=3))  # the sweep says so, and goes on
    assert [each.values["number"] for each in started] == [3]
    ((failed, error),) = tally.failed
    assert failed == task and "records.jsonl" in error and error.endswith("--force runs it again")
    tally, _ = lab.sweep(task, force=True)
    assert tally.run == [task] and len(experiments.load("squares")) == 6


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "records.jsonl"])
@pytest.mark.parametrize("how", ["gone", "cut", "no object"])
def test_file_that_is_gone_or_cut(lab: Any, name: str, how: str) -> None:
    task = lab.task()
    lab.sweep(task)
    file = folder_of(lab, task) / name
    file.unlink() if how == "gone" else file.write_text(file.read_text()[:-5] if how == "cut" else "[]\n")
    with pytest.raises(DamagedRun, match=name):
        experiments.load("squares")
    tally, started = lab.sweep(task)
    assert not started and name in tally.failed[0][1]


def test_manifest_that_lacks_something(lab: Any) -> None:
    task = lab.task()
    lab.sweep(task)
    (folder_of(lab, task) / "manifest.json").write_text('{"status": "finished"}\n')
    with pytest.raises(DamagedRun, match=r"manifest.json has no experiment, hash, num_records, timed_columns"):
        experiments.load("squares")


def test_configuration_that_was_changed_afterwards(lab: Any) -> None:
    """It would stand beside records that it did not make."""
    task = lab.task()
    lab.sweep(task)
    file = folder_of(lab, task) / "config.json"
    file.write_text(file.read_text().replace('"number": 1', '"number": 9'))
    with pytest.raises(DamagedRun, match="config.json is not what the run was made with: its hash is not"):
        experiments.load("squares")


def test_other_files_do_not_matter(lab: Any) -> None:
    lab.sweep(lab.task())
    (lab.store_path / "squares" / "notes.txt").write_text("mine")
    (lab.store_path / "notes.txt").write_text("mine")
    (lab.store_path / "squares" / ".part-0123").mkdir()  # of a process that was killed
    assert len(experiments.load("squares")) == 2
    assert len(list(lab.store.runs())) == 1


def test_store_of_another_version(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lab.store_path.mkdir()
    (lab.store_path / "store.json").write_text('{"format": 99}')
    assert lab.main("run", "squares") == 1
    assert "was written in format 99 by another version; this one reads format 1" in capsys.readouterr().err


def test_folder_that_is_no_store(lab: Any) -> None:
    lab.store_path.mkdir()
    (lab.store_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="has files but no store.json: it is no store"):
        Store(lab.store_path)
    with pytest.raises(StoreError, match="cannot be used .*[Nn]ot a directory"):
        Store(lab.store_path / "thesis.tex")


def test_store_that_others_make_at_the_same_time(lab: Any) -> None:
    lab.store_path.mkdir()
    (lab.store_path / ".part-0123").write_text("")  # about to be store.json
    store = Store(lab.store_path)
    assert list(store.runs()) == []
    lock = store.lock(lab.task())
    assert lock is not None and Store(lab.store_path).lock(lab.task()) is None
    lock.release()


# ---------------------------------------------------------------------- put


def test_killed_between_the_renames_of_a_replacement(lab: Any) -> None:
    task = lab.task()
    lab.sweep(task)
    final = folder_of(lab, task)
    shutil.copytree(final, final.with_name(f".part-{task.hash}"))
    final.rename(final.with_name(f".old-{task.hash}"))
    assert len(experiments.load("squares")) == 2  # read where it is
    assert lab.store.named(f"squares/{task.hash}").path == final
    tally, _ = lab.sweep(task)
    assert tally.found == [task]
    assert [path.name for path in final.parent.iterdir()] == [task.hash]


def test_killed_while_it_wrote(lab: Any) -> None:
    task = lab.task()
    part = folder_of(lab, task).with_name(f".part-{task.hash}")
    lab.sweep(lab.task(number=2))
    part.mkdir()
    (part / "records.jsonl").write_text('{"pow')
    assert len(experiments.load("squares")) == 2
    tally, _ = lab.sweep(task)
    assert tally.run == [task] and not part.exists() and len(experiments.load("squares")) == 4


@pytest.mark.parametrize("where", ["_write", "rename", "lock"])
def test_no_space_left(
    lab: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    tasks = [lab.task(number=number) for number in (1, 2, 3)]
    lab.sweep(tasks[0])
    before = lab.records()

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if where == "_write":
            patch.setattr(store_module, "_write", full)
        elif where == "rename":
            patch.setattr(os, "rename", full)
        else:
            patch.setattr(store_module.FileLock, "acquire", full)
        with pytest.raises(StoreError, match="no space is left for it; what is finished in it stays") as caught:
            lab.sweep(*tasks, force=where != "lock")
    assert "\n" not in str(caught.value)
    assert lab.records() == before
    assert not list(lab.store_path.glob("squares/.*"))
    tally, _ = lab.sweep(*tasks)  # no lock is held on, and the rest is run when there is space
    assert tally.found == tasks[:1] and tally.run == tasks[1:]


def test_replacement_that_fails_leaves_what_was_there(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = lab.task()
    lab.sweep(task)
    before, rename = lab.records(), os.rename

    def fails(source: Path, target: Path) -> None:
        if source.name.startswith(".part-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        with pytest.raises(StoreError, match="cannot be used"):
            lab.sweep(task, force=True)
    assert lab.records() == before
    assert [path.name for path in (lab.store_path / "squares").iterdir()] == [task.hash]


def test_reading_while_a_run_is_replaced(lab: Any) -> None:
    """Each reading is of one or of the other, whole."""
    task = lab.task()
    lab.sweep(task)
    outcome = execute(task)
    longer = type(outcome)(outcome.lines * 200, outcome.manifest | {"num_records": 400}, {})
    stop, store = threading.Event(), lab.store

    def replace() -> None:
        while not stop.is_set():
            for each in (longer, outcome):
                store.put(task, each)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        seen = {len(experiments.load("squares")) for _ in range(150)}
        seen |= {len(store.run_of(task).records()) for _ in range(150)}
    finally:
        stop.set()
        writer.join()
    assert seen == {2, 400}


# ---------------------------------------------------------------------- compare


def test_compare(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = lab.task(number=1), lab.task(number=2)
    lab.sweep(one, two)
    rows = compare(f"squares/{one.hash}", two.hash[:8], lab.store)
    assert [(row["part"], row["what"], row["first"], row["second"]) for row in rows] == [
        ("configuration", "number", 1, 2),
        ("results", "record 0: result", 1.0, 2.0),
        ("results", "record 1: result", 1.0, 4.0),
    ]
    assert lab.main("compare", one.hash, two.hash) == 1
    assert lab.main("compare", one.hash, str(folder_of(lab, one))) == 0
    assert "no difference" in capsys.readouterr().out


def test_compare_is_about_results(lab: Any) -> None:
    """Another machine, or another time, makes no other results."""
    lab.sweep(lab.task())
    shutil.copytree(lab.store_path, lab.folder / "copy")
    (manifest,) = (lab.folder / "copy").glob("squares/*/manifest.json")
    values = json.loads(manifest.read_text())
    values["machine"]["cores"] = 4096
    values["timed_columns"] = ["result"]
    manifest.write_text(json.dumps(values))
    records = manifest.with_name("records.jsonl")
    records.write_text(records.read_text().replace('"result": 1.0', '"result": 7.0'))
    rows = compare(str(manifest.parent), lab.task().hash, lab.store)
    assert [(row["part"], row["what"], row["measures time"]) for row in rows] == [
        ("machine", "cores", False),
        ("results", "record 0: result", True),
        ("results", "record 1: result", True),
    ]
    assert not results_differ(rows)
    assert lab.main("compare", str(lab.store_path), str(lab.folder / "copy")) == 0
    records.write_text(records.read_text().replace('"power": 2', '"power": 3'))
    assert lab.main("compare", str(lab.store_path), str(lab.folder / "copy")) == 1


def test_compare_stores(lab: Any) -> None:
    lab.sweep(lab.task(number=1), lab.task(number=2))
    shutil.copytree(lab.store_path, lab.folder / "copy")
    shutil.rmtree(lab.folder / "copy" / "squares" / lab.task(number=2).hash)
    (row,) = compare(str(lab.store_path), str(lab.folder / "copy"), lab.store)
    assert (row["run"], row["what"], row["first"]) == (f"squares/{lab.task(number=2).hash}", "is there", True)
    assert results_differ([row])
    with pytest.raises(StoreError, match="one is a whole store, and the other is not"):
        compare(str(lab.store_path), lab.task().hash, lab.store)


@pytest.mark.parametrize("name", ["ffffffffffff", "squares/", "cubes/0", "", "/", "x" * 5000])
def test_compare_of_what_is_not_there(lab: Any, capsys: pytest.CaptureFixture[str], name: str) -> None:
    lab.sweep(lab.task())
    assert lab.main("compare", lab.task().hash, name) == 2  # 1 is what differing results give
    assert "no run is named so" in capsys.readouterr().err


def test_hash_that_several_begin_with(lab: Any) -> None:
    first = lab.task()
    second = next(task for n in range(2, 1000) if (task := lab.task(number=n)).hash[0] == first.hash[0])
    lab.sweep(first, second)
    with pytest.raises(StoreError, match=rf"'squares/{first.hash[0]}': 2 runs begin like that"):
        lab.store.named(f"squares/{first.hash[0]}")
