"""A log replays to the same plans and the same state, and says where it does not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter

import pytest
from host_harness import Pipeline, make_request, make_scheduler
from log_harness import header_of, log_of, make_recorder, read, record, rewrite

from pagedjax.errors import InvariantError, LogError
from pagedjax.event_log import EventLog
from pagedjax.host import Scheduler, StepResult
from pagedjax.recorder import RecordingScheduler
from pagedjax.replay import replay
from pagedjax.request import BeamSearchParams

SEEDS = range(40)


def state(scheduler):
    """A snapshot, but for two things that make no difference to what comes.

    What was asked of a scheduler that has nothing to do, which the next plan forgets; and how far tables are filled,
    which an allocator looks up when it needs to know.
    """
    data = scheduler.snapshot()
    data["allocator"]["tables"] = [[seq_id, blocks] for seq_id, _, blocks in data["allocator"]["tables"]]
    return {**data, "num_asked": 0}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_makes_the_same_plans_and_comes_to_the_same_state(tmp_path, seed):
    recorded = record(tmp_path / "log", seed)
    seen = []
    report = replay(tmp_path / "log", check_invariants=True, observer=lambda event, s: seen.append((event, s)))
    assert report.first_difference is None
    assert report.plans == report.same_plans == recorded.num_steps > 10
    assert [event for event, _ in seen] == read(tmp_path / "log")
    assert state(seen[-1][1]) == state(recorded)


def test_the_workloads_hold_all_that_a_log_can_hold(tmp_path):
    kinds, fields = Counter(), Counter()
    for seed in SEEDS:
        record(tmp_path / str(seed), seed)
        for event in read(tmp_path / str(seed)):
            kinds[event["event"]] += 1
            fields.update([*event.get("plan", ()), *event.get("result", ())])
    assert set(kinds) == {
        *("start", "add", "fork", "plan", "result", "finish", "finish_sequence", "preempt", "unpin"),
        *("reset_prefix_cache", "recover", "restore"),
    }
    assert {"preempted", "failed", "copies", "beams", "swap_outs", "swap_ins", "token_ids", "errors"} <= set(fields)


@pytest.mark.parametrize("seed", SEEDS)
def test_where_nothing_is_planned_nothing_changes_so_it_need_not_be_logged(tmp_path, seed, monkeypatch):
    planned = Scheduler.schedule
    idle = []

    def schedule(self):
        before = state(self)
        plan = planned(self)
        if plan is None:
            idle.append(self)
            assert state(self) == before
        return plan

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    record(tmp_path / "log", seed)
    assert idle


def test_counts(tmp_path):
    pipeline = Pipeline(make_recorder(tmp_path / "log", preemption="swap"), depth=1)
    for number in range(4):
        pipeline.add(make_request(number, 5, 10, n=1 + number % 2))
    pipeline.run_to_end()
    pipeline.scheduler.add(make_request(9, 3, 4))
    pipeline.scheduler.schedule()
    pipeline.scheduler.update(StepResult(pipeline.scheduler.num_steps - 1, [5]))
    pipeline.scheduler.fork("r9", make_request(9, 3, 4, request_id="fork"))
    log_of(pipeline.scheduler).close()
    plans = [event["plan"] for event in read(tmp_path / "log") if event["event"] == "plan"]
    report = replay(tmp_path / "log")
    assert (report.runs, report.requests, report.plans) == (1, 6, len(plans))
    assert report.events == len(read(tmp_path / "log"))
    assert report.preempted_sequences == pipeline.scheduler.num_preemptions > 0
    assert report.swapped_out_blocks == sum(len(plan.get("swap_outs", ())) for plan in plans) > 0
    assert (report.plans_not_compared, report.last_line_torn) == (0, False)


def test_a_log_cut_anywhere_in_its_last_lines_replays_what_is_whole(tmp_path):
    record(tmp_path / "log", 7, num_events=40, finish=False)
    data = (tmp_path / "log").read_bytes()
    last_lines = b"".join(data.splitlines(keepends=True)[-4:])
    cut = tmp_path / "cut"
    for end in range(len(data) - len(last_lines), len(data) + 1):
        cut.write_bytes(data[:end])
        report = replay(cut)
        assert (report.events, report.last_line_torn) == (data[:end].count(b"\n"), not data[:end].endswith(b"\n"))
        assert report.first_difference is None
        assert report.same_plans == report.plans > 5


def test_a_last_line_that_is_no_event_is_torn_and_one_before_it_is_damage(tmp_path):
    record(tmp_path / "log", 1)
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    (tmp_path / "log").write_bytes(b"".join([*lines, b'{"event":"pl\0\0\n']))
    assert replay(tmp_path / "log").last_line_torn
    (tmp_path / "log").write_bytes(b"".join([*lines[:5], b'{"event":"pl\0\0\n', *lines[5:]]))
    with pytest.raises(LogError, match=r"log, line 6: this is no event$"):
        replay(tmp_path / "log")


# ---------------------------------------------------------------------- differences


def first_plan_with(events, field):
    return next(event for event in events if field in event.get("plan", ()))


@pytest.mark.parametrize(
    ("field", "change", "told"),
    [
        ("chunks", lambda plan: plan["chunks"][-1].__setitem__(2, 99), r"plan\.chunks\[\d\]\.start is 99 in the log, "),
        ("chunks", lambda plan: plan["chunks"].pop(), r"plan\.chunks\[\d\] is nothing in the log, but \{'seq_id': "),
        ("chunks", lambda plan: plan["chunks"][0].append(1), r"plan\.chunks\[0\] is \[.*\] in the log, but "),
        ("chunks", lambda plan: plan["chunks"][0].__setitem__(9, 1), r"chunks\[0\]\.writes is 1 .* but True in the re"),
        (
            "preempted",
            lambda plan: plan["preempted"].append(77),
            r"plan\.preempted\[\d\] is 77 in the log, but nothing ",
        ),
        ("beams", lambda plan: plan["beams"][0].__setitem__(0, "x"), r"plan\.beams\[0\]\.request_id is 'x' in the log"),
        ("swap_outs", lambda plan: plan.pop("swap_outs"), r"plan\.swap_outs is nothing in the log, but \[\["),
        ("num_tokens", lambda plan: plan.update(num_tokens=0), r"plan\.num_tokens is 0 in the log, but \d+ in the rep"),
        ("step", lambda plan: plan.update(more=[2]), r"plan\.more is \[2\] in the log, but nothing in the replay$"),
        ("chunks", lambda plan: plan.update(chunks=3), r"plan\.chunks is 3 in the log, but \[\{"),
    ],
)
def test_a_changed_plan_is_found_and_named(tmp_path, field, change, told):
    for seed in SEEDS:
        record(tmp_path / str(seed), seed)
        events = read(tmp_path / str(seed))
        if any(field in event.get("plan", ()) for event in events):
            break
    changed = first_plan_with(events, field)
    change(changed["plan"])
    report = replay(rewrite(tmp_path / "log", events))
    difference = report.first_difference
    assert difference is not None
    assert difference.line == events.index(changed) + 1
    assert f"line {difference.line}, step {difference.step}: " in str(difference)
    assert re.search(told, str(difference)), str(difference)
    assert report.same_plans == difference.step
    assert report.plans == report.same_plans + 1 + report.plans_not_compared


def two_requests(path):
    """One ends by its stop token in the second step, so that the third computes the other one alone."""
    scheduler = make_recorder(path)
    scheduler.add(make_request(0, 3, stop_ids=(5,)))
    scheduler.add(make_request(1, 3))
    for tokens in ([1, 2], [5, 3], [4], [6]):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(StepResult(plan.step, tokens))
    log_of(scheduler).close()
    return read(path)


def test_a_changed_token_is_found_by_the_plan_that_it_changes(tmp_path):
    events = two_requests(tmp_path / "log")
    assert [event["event"] for event in events[3:]] == ["plan", "result"] * 4
    events[6]["result"]["token_ids"] = [7, 3]
    report = replay(rewrite(tmp_path / "log", events))
    difference = report.first_difference
    assert difference is not None
    assert (difference.line, difference.step, difference.field) == (8, 2, "plan.chunks[0].seq_id")
    assert (difference.logged, difference.replayed) == ("1", "0 in the replay")
    assert (report.plans, report.same_plans, report.plans_not_compared) == (4, 2, 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"token_ids": [5]}, "step 1 samples 2 tokens, but its result has 1"),
        ({"step": 4}, "the result of step 4 was given, but step 1 is the next to be answered"),
        ({"errors": [[9, "x"]]}, r"step 1 has errors for sequences \[9\], which do not sample in it"),
    ],
)
def test_a_result_that_cannot_be_of_its_plan_is_named(tmp_path, change, why):
    events = two_requests(tmp_path / "log")
    events[6]["result"] |= change
    report = replay(rewrite(tmp_path / "log", events))
    told = rf"line 7, step 2: result is \{{.*\}} in the log, but the replay cannot do it: {why}"
    assert re.fullmatch(told, str(report.first_difference))
    assert (report.same_plans, report.plans_not_compared) == (2, 2)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"event": "finish", "request_id": "r7", "reason": "abort", "stop_reason": None}, "request 'r7' is not one of"),
        ({"event": "finish_sequence", "seq_id": 70, "reason": "stop", "stop_reason": None}, r"KeyError\(70\)"),
        ({"event": "unpin", "name": "p"}, r"KeyError\('p'\)"),
        ({"event": "restore", "state": {}}, "not a snapshot of a scheduler"),
    ],
)
def test_an_event_that_could_not_have_happened_is_named(tmp_path, event, why):
    events = two_requests(tmp_path / "log")
    events.insert(5, {**event, "t": 0.1})
    difference = replay(rewrite(tmp_path / "log", events)).first_difference
    assert difference is not None
    assert (difference.line, difference.field) == (6, event["event"])
    assert re.match(f"the replay cannot do it: {why}", difference.replayed)


def test_a_plan_too_many_is_a_difference(tmp_path):
    events = two_requests(tmp_path / "log")
    events.insert(4, {"event": "plan", "t": 0.1, "plan": {"step": 1}})
    events[5:5] = [
        {"event": "finish", "t": 0.1, "request_id": f"r{i}", "reason": "x", "stop_reason": None} for i in (0, 1)
    ]
    difference = replay(rewrite(tmp_path / "log", events)).first_difference
    assert difference is not None
    assert difference.line == 5


def test_each_run_of_a_log_is_replayed_by_itself(tmp_path):
    path = tmp_path / "log"
    two_requests(path)
    two_requests(path)
    two_requests(path)
    report = replay(path)
    assert (report.runs, report.plans, report.same_plans, report.requests) == (3, 12, 12, 6)
    events = read(path)
    events[14]["plan"]["num_tokens"] = 7  # of the second run
    report = replay(rewrite(path, events))
    assert report.first_difference is not None
    assert (report.first_difference.line, report.first_difference.step) == (15, 0)
    assert (report.runs, report.plans, report.same_plans, report.plans_not_compared) == (3, 12, 8, 3)


def test_the_observer_is_told_nothing_behind_a_difference(tmp_path):
    events = two_requests(tmp_path / "log")
    events[5]["plan"]["num_tokens"] = 7
    seen = []
    replay(rewrite(tmp_path / "log", events), observer=lambda event, scheduler: seen.append(event))
    assert seen == events[:5]


# ---------------------------------------------------------------------- what a log keeps


def test_floats_come_back_to_the_last_bit(tmp_path):
    scheduler = make_recorder(tmp_path / "log")
    pipeline = Pipeline(scheduler, depth=0)
    for number in range(4):
        pipeline.add(make_request(number, 3, 6, beam=BeamSearchParams(3, 6, 0.7)))
    pipeline.run_to_end()
    log_of(scheduler).close()
    logged = [event["plan"].get("beams", []) for event in read(tmp_path / "log") if event["event"] == "plan"]
    assert any(len(repr(logprob)) > 15 for beams in logged for *_, logprobs, _ in beams for logprob in logprobs)
    assert [[tuple(logprobs) for *_, logprobs, _ in beams] for beams in logged] == [
        [search.logprobs for search in plan.beams] for plan in pipeline.plans
    ]


def test_a_run_goes_on_in_a_new_process_from_a_snapshot(tmp_path):
    first = make_recorder(tmp_path / "log")
    pipeline = Pipeline(first, depth=1)
    for number in range(3):
        pipeline.add(make_request(number, 4, 8))
    for _ in range(4):
        pipeline.step()
    log_of(first).close()
    second = make_recorder(tmp_path / "log")
    second.restore(json.loads(json.dumps(first.snapshot())))
    pipeline.scheduler = second
    pipeline.run_to_end()
    log_of(second).close()
    report = replay(tmp_path / "log", check_invariants=True)
    assert report.runs == 2
    assert report.plans == report.same_plans == second.num_steps > first.num_steps


def test_recovery_from_a_half_planned_step_is_replayed(tmp_path, monkeypatch):
    scheduler = make_recorder(tmp_path / "log")
    pipeline = Pipeline(scheduler, depth=1)
    for number in range(3):
        pipeline.add(make_request(number, 3, 8))
    pipeline.step()
    pipeline.step()

    def broken(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.allocator, "grow", broken)
        with pytest.raises(MemoryError):
            for _ in range(9):
                pipeline.step()
    pipeline.fail()
    pipeline.run_to_end()
    log_of(scheduler).close()
    assert [event["event"] for event in read(tmp_path / "log")].count("recover") == 1
    report = replay(tmp_path / "log", check_invariants=True)
    assert report.plans == report.same_plans == scheduler.num_steps


def test_a_broken_state_is_told_with_its_line(tmp_path, monkeypatch):
    events = two_requests(tmp_path / "log")
    checked = []

    def check(self):
        checked.append(self)
        if len(checked) == 4:
            raise InvariantError("block 3 is in two states")

    monkeypatch.setattr(Scheduler, "check_invariants", check)
    assert replay(tmp_path / "log").first_difference is None
    assert not checked
    with pytest.raises(InvariantError, match=r"^line 4, after 'plan': block 3 is in two states$"):
        replay(tmp_path / "log", check_invariants=True)
    assert events[3]["event"] == "plan"


# ---------------------------------------------------------------------- what is no log


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is no log of events: it is empty"),
        (b"hello\nworld\n", "is no log of events: its first line does not start one"),
        (b'{"event":"add"}\n', "is no log of events: its first line does not start one"),
        (b'{"event":"start","ver', "is no log of events: its first line does not start one"),
        (b"[1]\n", "is no log of events: its first line does not start one"),
        (b"\x80\xff\n" * 9, "is no log of events: its first line does not start one"),
        (b"[" * 100_000 + b"\n", "is no log of events: its first line does not start one"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, content, told):
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(LogError, match=rf"^\S+log {told}$"):
        replay(tmp_path / "log")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(LogError, match=r"nothing cannot be read \(No such file or directory\)$"):
        replay(tmp_path / "nothing")
    with pytest.raises(LogError, match=r" cannot be read \(Is a directory\)$"):
        replay(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 2}, "a log of version 2, but this program reads version 1"),
        ({"version": None}, "a log of version None, but this program reads version 1"),
        ({"config": None}, "the start of a run without its configuration"),
        ({"config": {}}, "the start of a run without a CacheConfig"),
        (
            {"config": {"cache": {"block_size": 4, "num_blocks": 2, "colour": 1}}},
            "a CacheConfig with colour, which this",
        ),
        ({"config": {"cache": {"block_size": 4}}}, "a CacheConfig that makes no sense: .*num_blocks"),
        (
            {"config": {"cache": {"block_size": 3, "num_blocks": 2}}},
            "a CacheConfig that makes no sense: block_size=3 is",
        ),
        ({"config": {"cache": {"block_size": 4, "num_blocks": 2}, "scheduler": 4}}, "without a SchedulerConfig"),
    ],
)
def test_a_start_that_this_program_cannot_read_is_refused(tmp_path, change, told):
    events = two_requests(tmp_path / "log")
    events[0] |= change
    with pytest.raises(LogError, match=rf"log, line 1: .*{told}"):
        replay(rewrite(tmp_path / "log", events))


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"event": "dance", "t": 1}, "an event 'dance', which this program does not know"),
        ({"event": "plan", "plan": {}}, "an event 'plan' without its time"),
        ({"event": "plan", "t": 1}, r"an event 'plan' that cannot be read: KeyError\('plan'\)"),
        ({"event": "plan", "t": 1, "plan": 3}, "an event 'plan' that cannot be read: "),
        ({"event": "plan", "t": 1, "plan": {"preempted": 3}}, "an event 'plan' that cannot be read: "),
        ({"event": "result", "t": 1, "result": {"step": 1, "token_ids": ["x"]}}, "an event 'result' that cannot be"),
        ({"event": "add", "t": 1, "request": {}}, "an event 'add' that cannot be read: "),
        (
            {"event": "finish", "t": 1, "request_id": "r0"},
            r"an event 'finish' that cannot be read: KeyError\('reason'\)",
        ),
    ],
)
def test_an_event_that_cannot_be_read_is_refused_with_its_line(tmp_path, event, told):
    events = two_requests(tmp_path / "log")
    events.insert(4, event)
    with pytest.raises(LogError, match=f"log, line 5: {told}"):
        replay(rewrite(tmp_path / "log", events))


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_numbers_that_no_log_can_hold_are_refused(tmp_path, number):
    two_requests(tmp_path / "log")
    text = (tmp_path / "log").read_text().replace('"num_tokens":6', f'"num_tokens":{number}')
    (tmp_path / "log").write_text(text)
    with pytest.raises(LogError, match="line 4: "):
        replay(tmp_path / "log")


def test_a_replay_needs_neither_jax_nor_numpy(tmp_path):
    two_requests(tmp_path / "log")
    program = (
        "import sys\n"
        "from pagedjax.replay import replay\n"
        "from pagedjax.trace import Trace\n"
        "trace = Trace()\n"
        "print(replay(sys.argv[1], observer=trace.observe).same_plans, len(trace.data()['traceEvents']) > 5)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'jax', 'jaxlib', 'numpy', 'flax'}))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["4 True", "[]"]


def test_a_recording_scheduler_plans_as_any_other(tmp_path):
    plain = Pipeline(make_scheduler(8, 2), depth=1)
    recording = RecordingScheduler(plain.scheduler.config, make_scheduler(8, 2).allocator)
    logged = Pipeline(recording, depth=1)
    recording._log = EventLog(tmp_path / "log", header_of(recording))
    for pipeline in (plain, logged):
        for number in range(4):
            pipeline.add(make_request(number, 4, 9))
        pipeline.run_to_end()
    assert repr(logged.plans) == repr(plain.plans)
    assert (logged.outputs, logged.ends) == (plain.outputs, plain.ends)
