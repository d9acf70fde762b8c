"""What an engine's log holds, and that it outlives kills, full disks and other programs, and never stops a run."""

from __future__ import annotations

import errno
import gc
import json
import os
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from host_harness import Pipeline, make_request, make_scheduler
from log_harness import header_of, log_of, make_recorder, read, ticking

from pagedjax.errors import BlocksInUse, ConfigError, InvalidRequest, UnknownRequest
from pagedjax.event_log import EventLog
from pagedjax.host import Scheduler, StepResult
from pagedjax.replay import replay

HEADER: dict[str, Any] = {
    "config": {"cache": {"block_size": 4, "num_blocks": 8}, "scheduler": {"max_num_seqs": 2}},
    "engine": {"model": "tiny"},
}


def open_log(path: Path, **cache: object) -> EventLog:
    """A log whose configuration has these fields of the cache besides the usual ones."""
    config = {**HEADER["config"], "cache": {**HEADER["config"]["cache"], **cache}}
    return EventLog(path, {**HEADER, "config": config}, ticking())


def events_of(path: Path) -> list[str]:
    return [event["event"] for event in read(path)]


# ---------------------------------------------------------------------- what is written


def test_a_log_begins_with_what_a_replay_needs(tmp_path):
    log = EventLog(tmp_path / "log", HEADER)
    (line,) = (tmp_path / "log").read_text().splitlines()  # at once
    start = json.loads(line)
    assert list(start) == ["event", "version", "time", "clock", "config", "engine"]
    assert (start["event"], start["version"]) == ("start", 1)
    assert (start["config"], start["engine"]) == (HEADER["config"], HEADER["engine"])
    assert datetime.fromisoformat(start["time"]).tzinfo is not None
    log.close()


def test_events_are_stamped_with_the_seconds_since_the_start(tmp_path):
    log = EventLog(tmp_path / "log", HEADER, clock=iter([50.0, 50.25, 51.0000014]).__next__)
    log.write({"event": "unpin", "name": "é"})
    log.write({"event": "preempt"})
    log.close()
    assert (tmp_path / "log").read_text().splitlines()[1:] == [
        '{"event":"unpin","t":0.25,"name":"\\u00e9"}',
        '{"event":"preempt","t":1.000001}',
    ]


def test_every_change_is_logged_once_and_what_raises_is_not(tmp_path):
    scheduler = make_recorder(tmp_path / "log")
    scheduler.add(make_request(0, 4, registers_prefix=True))
    scheduler.add(make_request(1, 3, n=2))
    with pytest.raises(InvalidRequest):
        scheduler.add(make_request(0, 4))
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(ValueError, match="samples 3 tokens"):
        scheduler.update(StepResult(0, [1]))
    scheduler.update(StepResult(0, [1, 2, 3], {2: "not finite"}))
    scheduler.fork("r0", make_request(0, 4, request_id="fork"))
    with pytest.raises(BlocksInUse):
        scheduler.reset_prefix_cache()
    scheduler.abort("r0")
    scheduler.finish("fork", "stop", "END")
    scheduler.finish_sequence(1, "stop", 7)
    with pytest.raises(UnknownRequest):
        scheduler.abort("r0")
    with pytest.raises(KeyError):
        scheduler.unpin("r1")
    scheduler.unpin("r0")
    scheduler.reset_prefix_cache()
    assert scheduler.schedule() is None
    scheduler.preempt_latest()
    scheduler.recover()
    scheduler.restore(scheduler.snapshot())
    log_of(scheduler).close()
    events = [{key: value for key, value in event.items() if key != "t"} for event in read(tmp_path / "log")]
    assert [event["event"] for event in events[:6]] == ["start", "add", "add", "plan", "result", "fork"]
    assert events[4]["result"] == {"step": 0, "token_ids": [1, 2, 3], "errors": [[2, "not finite"]]}
    assert events[5]["request_id"] == "r0" and events[5]["request"]["request_id"] == "fork"
    assert events[6:12] == [
        {"event": "finish", "request_id": "r0", "reason": "abort", "stop_reason": None},
        {"event": "finish", "request_id": "fork", "reason": "stop", "stop_reason": "END"},
        {"event": "finish_sequence", "seq_id": 1, "reason": "stop", "stop_reason": 7},
        {"event": "unpin", "name": "r0"},
        {"event": "reset_prefix_cache"},
        {"event": "preempt"},
    ]
    assert events[12:] == [
        {"event": "recover", "state": scheduler.snapshot()},
        {"event": "restore", "state": scheduler.snapshot()},
    ]


def test_a_plan_is_written_without_its_empty_fields(tmp_path):
    scheduler = make_recorder(tmp_path / "log")
    scheduler.add(make_request(0, 3))
    plan = scheduler.schedule()
    assert plan is not None
    chunk = json.loads(json.dumps(plan.chunks[0]))
    assert read(tmp_path / "log")[-1]["plan"] == {"step": 0, "chunks": [chunk], "num_tokens": 3}


def test_integers_of_other_kinds_are_written_as_integers(tmp_path):
    class Opaque:
        """As numpy's are, json does not know how to write it."""

        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

        __int__ = __index__

    scheduler = make_recorder(tmp_path / "log")
    scheduler.add(make_request(0, 3))
    scheduler.schedule()
    scheduler.update(StepResult(0, [Opaque(5)]))  # pyright: ignore[reportArgumentType]
    assert read(tmp_path / "log")[-1]["result"]["token_ids"] == [5]


# ---------------------------------------------------------------------- when it is written


@pytest.fixture
def writes(monkeypatch):
    """The sizes of all writes."""
    sizes, write = [], os.write

    def counted(fd, data):
        sizes.append(len(data))
        return write(fd, data)

    monkeypatch.setattr("pagedjax.event_log.os.write", counted)
    return sizes


def test_each_plan_and_each_result_is_one_write_with_what_came_before(tmp_path, writes):
    scheduler = make_recorder(tmp_path / "log")
    scheduler.add(make_request(0, 3))
    scheduler.add(make_request(1, 3))
    assert events_of(tmp_path / "log") == ["start"]
    scheduler.schedule()
    assert events_of(tmp_path / "log") == ["start", "add", "add", "plan"]
    scheduler.update(StepResult(0, [1, 2]))
    scheduler.abort("r0")
    assert events_of(tmp_path / "log") == ["start", "add", "add", "plan", "result"]
    log_of(scheduler).close()
    assert events_of(tmp_path / "log")[-1] == "finish"
    assert len(writes) == 4
    assert sum(writes) == (tmp_path / "log").stat().st_size


def test_what_nobody_flushes_does_not_pile_up(tmp_path, writes):
    log = EventLog(tmp_path / "log", HEADER)
    for _ in range(50):
        log.write({"event": "unpin", "name": "x" * 100_000})
    assert len(writes) > 3
    assert max(writes) < 2**20 + 200_000
    log.close()
    assert len(read(tmp_path / "log")) == 51


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr("pagedjax.event_log.os.write", lambda fd, data: write(fd, data[:7]))
    log = EventLog(tmp_path / "log", HEADER)
    log.write({"event": "preempt"})
    log.close()
    assert events_of(tmp_path / "log") == ["start", "preempt"]


def test_a_log_that_is_dropped_has_written_all_and_let_go_of_its_file(tmp_path):
    log = EventLog(tmp_path / "log", HEADER)
    fd = log._fd
    log.write({"event": "preempt"})
    del log
    gc.collect()
    assert events_of(tmp_path / "log") == ["start", "preempt"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_closed_log_takes_no_more(tmp_path):
    log = EventLog(tmp_path / "log", HEADER)
    log.close()
    log.write({"event": "preempt"})
    log.flush()
    log.close()
    assert events_of(tmp_path / "log") == ["start"]
    assert not log.failed


# ---------------------------------------------------------------------- when it cannot be written


class Disk:
    """Has room for so many bytes more."""

    def __init__(self, monkeypatch) -> None:
        self.room: float = float("inf")
        self._write = os.write
        monkeypatch.setattr("pagedjax.event_log.os.write", self.write)

    def write(self, fd, data) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(fd, data[: int(min(self.room, len(data)))])
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def run_of(scheduler: Scheduler) -> Pipeline:
    pipeline = Pipeline(scheduler, depth=1)
    for number in range(4):
        pipeline.add(make_request(number, 4, 9))
    pipeline.run_to_end()
    return pipeline


@pytest.mark.parametrize("room", [0, 1, 700, 4096, 5000])
def test_a_disk_that_fills_up_ends_the_log_and_not_the_run(tmp_path, disk, room):
    scheduler = make_recorder(tmp_path / "log")
    disk.room = room
    with pytest.warns(RuntimeWarning) as told:
        pipeline = run_of(scheduler)
    (warning,) = told
    log = log_of(scheduler)
    assert str(warning.message) == (
        f"event_log='{tmp_path}/log' cannot be written (No space left on device): it ends with event "
        f"{len(read(tmp_path / 'log'))} of this run, and what comes after is not logged"
    )
    assert log.failed
    assert log.num_events == len(read(tmp_path / "log")) == replay(tmp_path / "log").events
    assert pipeline.outputs == run_of(make_scheduler(9, 2, max_num_batched_tokens=9, max_model_len=24)).outputs


def test_a_limit_of_the_system_ends_the_log_and_not_the_run(tmp_path):
    resource = pytest.importorskip("resource")
    scheduler = make_recorder(tmp_path / "log")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.warns(RuntimeWarning, match=r"cannot be written \(File too large\): it ends with event \d+ "):
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        try:
            run_of(scheduler)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    report = replay(tmp_path / "log")
    assert 0 < report.same_plans == report.plans < scheduler.num_steps
    assert not report.last_line_torn


def test_what_json_cannot_hold_ends_the_log_and_not_the_run(tmp_path):
    log = EventLog(tmp_path / "log", HEADER)
    log.write({"event": "preempt"})
    with pytest.warns(RuntimeWarning, match=r"\(result cannot be written as JSON, .*\): it ends with event 2 of"):
        log.write({"event": "result", "result": [float("nan")]})
    log.write({"event": "preempt"})
    log.close()
    assert events_of(tmp_path / "log") == ["start", "preempt"]


@pytest.mark.parametrize("change", [lambda data: data + b"x\n", lambda data: b""])
def test_a_log_that_something_else_changes_is_left_to_it(tmp_path, change):
    log = EventLog(tmp_path / "log", HEADER)
    left = change((tmp_path / "log").read_bytes())
    (tmp_path / "log").write_bytes(left)
    log.write({"event": "preempt"})
    with pytest.warns(
        RuntimeWarning, match=r"cannot be written \(something else writes to it\): it ends with event 1 "
    ):
        log.flush()
    assert (tmp_path / "log").read_bytes() == left


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("", "Is a directory"),
        ("missing/log", "No such file or directory"),
        ("file/log", "Not a directory"),
        ("/dev/full", "it is no file"),
        ("/dev/null", "it is no file"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path, where, why):
    if where.startswith("/dev") and not Path(where).exists():
        pytest.skip("there is no such device here")
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError,
        match=rf"^event_log='.*' is not allowed \({why}\): event_log must be a file that can be written$",
    ):
        EventLog(tmp_path / where, HEADER)


def test_a_disk_that_is_full_from_the_beginning_is_told_at_once(tmp_path, disk):
    log = EventLog(tmp_path / "log", HEADER)
    log.close()
    before = (tmp_path / "log").read_bytes()
    disk.room = 40
    with pytest.raises(ConfigError, match=r"is not allowed \(No space left on device\): event_log must be a file"):
        EventLog(tmp_path / "log", HEADER)
    assert (tmp_path / "log").read_bytes() == before


# ---------------------------------------------------------------------- going on with a log


def test_a_log_of_the_same_configuration_is_appended_to(tmp_path):
    for seed in (1, 2):  # drawn for each engine
        log = open_log(tmp_path / "log", prefix_hash_seed=seed)
        log.write({"event": "preempt"})
        log.close()
    assert events_of(tmp_path / "log") == ["start", "preempt"] * 2
    assert read(tmp_path / "log")[2]["config"]["cache"]["prefix_hash_seed"] == 2


def test_an_empty_file_is_a_new_log(tmp_path):
    (tmp_path / "log").touch()
    open_log(tmp_path / "log").close()
    assert events_of(tmp_path / "log") == ["start"]


def test_a_log_of_another_configuration_is_refused_and_left_alone(tmp_path):
    open_log(tmp_path / "log", num_blocks=9, watermark=0.5).close()
    with open(tmp_path / "log", "ab") as file:
        file.write(b'{"event":"torn')
    before = (tmp_path / "log").read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"^event_log='.*log' is a log of another configuration \(cache\.num_blocks is 9 there and 8 here, "
        r"cache\.watermark is 0\.5 there and unknown here\): give another path$",
    ):
        open_log(tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == before


def test_a_log_of_another_version_is_refused(tmp_path):
    open_log(tmp_path / "log").close()
    text = (tmp_path / "log").read_text().replace('"version":1', '"version":2')
    (tmp_path / "log").write_text(text)
    with pytest.raises(ConfigError, match=r"of another configuration \(version is 2 there and 1 here\): give another"):
        open_log(tmp_path / "log")


@pytest.mark.parametrize(
    "content",
    [
        b"notes\n",
        b"notes",
        b"[]\n",
        b'{"event":"add","t":1}\n',
        b'{\n  "a": 1\n}',
        b'{"event":"start","vers\n',
        b"\0" * 10_000,
        b'{"event":"start","version":1}\n',
    ],
)
def test_a_file_that_is_no_log_of_it_is_refused_and_left_alone(tmp_path, content):
    (tmp_path / "notes").write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"^event_log='.*notes' is (not allowed \(it holds something else\)|a log of)"
    ):
        open_log(tmp_path / "notes")
    assert (tmp_path / "notes").read_bytes() == content


def test_a_run_killed_anywhere_can_be_gone_on_from(tmp_path):
    whole = tmp_path / "whole"
    scheduler = make_recorder(whole)
    run_of(scheduler)
    log_of(scheduler).close()
    data, header = whole.read_bytes(), header_of(scheduler)
    cut = tmp_path / "cut"
    ends = [*range(0, 500, 7), *range(len(data) - 400, len(data) + 1)]
    for end in ends:
        cut.write_bytes(data[:end])
        num_torn = len(data[:end].rpartition(b"\n")[2])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            EventLog(cut, header).close()
        assert [str(warning.message) for warning in told] == [
            f"event_log='{cut}': its last line was torn, as when a run is killed, and is cut off ({num_torn} bytes)"
        ] * bool(num_torn)
        assert cut.read_bytes().startswith(data[: end - num_torn])
        report = replay(cut)
        assert (report.events, report.first_difference) == (data[:end].count(b"\n") + 1, None)
        assert not report.last_line_torn
    assert {data[:end].count(b"\n") for end in ends} >= {0, 1, data.count(b"\n")}


def test_a_last_line_that_is_no_event_is_torn(tmp_path):
    open_log(tmp_path / "log").close()
    with open(tmp_path / "log", "ab") as file:
        file.write(b'{"event":"pl\0\0\0\n')
    with pytest.warns(RuntimeWarning, match=r"its last line was torn, .* \(16 bytes\)$"):
        open_log(tmp_path / "log").close()
    assert events_of(tmp_path / "log") == ["start", "start"]


def test_a_log_that_was_deleted_ends_with_a_warning(tmp_path):
    log = EventLog(tmp_path / "log", HEADER)
    (tmp_path / "log").unlink()
    log.write({"event": "preempt"})
    with pytest.warns(RuntimeWarning, match=r"cannot be written \(it was deleted\): it ends with event 1 of this run"):
        log.flush()
    assert log.failed
