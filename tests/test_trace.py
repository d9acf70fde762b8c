"""A trace says who waited, computed and was swapped when, and is well-formed however its log ended."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict

import pytest
from host_harness import Pipeline, answer, make_request, paged, run
from log_harness import TINY, log_of, make_recorder, read, record, rewrite, ticking

from pagedjax.errors import PagedJaxError
from pagedjax.event_log import parse_line
from pagedjax.replay import replay
from pagedjax.request import BeamSearchParams
from pagedjax.trace import Trace

SEEDS = range(20)


class Clock:
    """Shows the time, in seconds, that it is set to."""

    now = 0.0

    def __call__(self):
        return self.now


def trace_of(path):
    trace = Trace()
    replay(path, observer=trace.observe)
    data = json.loads(json.dumps(trace.data(), allow_nan=False))
    assert set(data) == {"traceEvents", "displayTimeUnit"}
    return data["traceEvents"]


def lanes_of(events):
    """Slices by (run, thread), in order of time."""
    lanes = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], e["dur"])):
        lanes[event["pid"], event["tid"]].append(event)
    return lanes


def names_of(events):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def shown(events):
    """Slices by the lane's name: (name, begin, end) in seconds."""
    names = names_of(events)
    return {
        names[lane]: [(s["name"], s["ts"] / 1e6, (s["ts"] + s["dur"]) / 1e6) for s in slices]
        for lane, slices in lanes_of(events).items()
    }


def check(events, num_blocks, num_host_blocks):
    """What holds of every trace."""
    names = names_of(events)
    assert len(set(names)) == len({tid for _, tid in names}) == sum(e["name"] == "thread_name" for e in events)
    for lane, slices in lanes_of(events).items():
        assert lane in names
        end = 0
        for one in slices:
            assert one["name"] in ("waiting", "swapped", "prefill", "decode")
            assert one["dur"] >= 0
            assert one["ts"] >= end, f"{one} begins before the slice before it ends"
            end = one["ts"] + one["dur"]
    for event in events:
        if event["name"] == "blocks":
            assert sum(event["args"].values()) == num_blocks
            assert min(event["args"].values()) >= 0
        if event["name"] == "blocks in the swap space":
            assert 0 <= event["args"]["used"] <= num_host_blocks


def computed(slices):
    """What a lane computes: (step, first position, end), one for each step, from slices that may hold several."""
    chunks = []
    for one in slices:
        if one["name"] in ("waiting", "swapped"):
            assert not one["args"]
            continue
        args = one["args"]
        first, last, start, end = (args[k] for k in ("first_step", "last_step", "start_position", "end_position"))
        assert end - start == args["tokens"]
        if first == last:
            chunks.append((first, start, end))
        else:
            assert one["name"] == "decode" and last - first == end - start - 1
            chunks += [
                (step, position, position + 1)
                for step, position in zip(range(first, last + 1), range(start, end), strict=True)
            ]
    return chunks


def planned(events):
    """The same by sequence, from the plans of a log."""
    chunks = defaultdict(list)
    for event in events:
        for seq_id, _, start, num_tokens, *_ in event.get("plan", {}).get("chunks", ()):
            chunks[seq_id].append((event["plan"]["step"], start, start + num_tokens))
    return chunks


def whole_events(path):
    return [event for line in path.read_bytes().splitlines(keepends=True) if (event := parse_line(line))]


def check_tokens(log, trace):
    """Every token that was planned is in a slice, in one only, and in the right lane."""
    logged, lanes = planned(log), {lane: computed(slices) for lane, slices in lanes_of(trace).items()}
    assert Counter(c for lane in lanes.values() for c in lane) == Counter(c for seq in logged.values() for c in seq)
    if not any(event["event"] == "restore" for event in log):  # which begins new lanes
        assert sorted(filter(None, lanes.values())) == sorted(logged.values())


def sizes(path):
    cache = read_start(path)["config"]["cache"]
    return cache["num_blocks"], cache["num_host_blocks"]


def read_start(path):
    with open(path, "rb") as file:
        return json.loads(file.readline())


@pytest.mark.parametrize("seed", SEEDS)
def test_traces_of_all_workloads_are_well_formed_and_complete(tmp_path, seed):
    record(tmp_path / "log", seed)
    trace = trace_of(tmp_path / "log")
    check(trace, *sizes(tmp_path / "log"))
    check_tokens(read(tmp_path / "log"), trace)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_was_killed_gives_one_too(tmp_path, seed):
    record(tmp_path / "log", seed)
    data = (tmp_path / "log").read_bytes()
    start, dice = data.index(b"\n") + 1, random.Random(seed)
    for _ in range(8):
        (tmp_path / "cut").write_bytes(data[: dice.randint(start, len(data))])
        trace = trace_of(tmp_path / "cut")
        check(trace, *sizes(tmp_path / "cut"))
        check_tokens(whole_events(tmp_path / "cut"), trace)


def test_the_workloads_have_slices_and_counters_of_every_kind(tmp_path):
    kinds, swapped, cached = Counter(), 0, 0
    for seed in SEEDS:
        record(tmp_path / str(seed), seed)
        for event in trace_of(tmp_path / str(seed)):
            kinds[event["name"]] += 1
            kinds["several steps"] += event["ph"] == "X" and event["args"].get("last_step") != event["args"].get(
                "first_step"
            )
            kinds["cut short"] += "cut_short" in event["args"]
            swapped += event["name"] == "blocks in the swap space" and event["args"]["used"]
            cached += event["name"] == "blocks" and event["args"]["cached"]
    assert set(kinds) == {
        *("process_name", "thread_name", "thread_sort_index", "blocks", "blocks in the swap space"),
        *("tokens in the step", "waiting", "swapped", "prefill", "decode", "several steps", "cut short"),
    }
    assert min(*kinds.values(), swapped, cached) > 5


def timed(path, **shape):
    """A recorder, and a function that does something at a time."""
    clock = Clock()
    scheduler = make_recorder(path, clock, **shape)

    def at(time, do, *args):
        clock.now = time
        return do(*args)

    return scheduler, at


def test_times_are_those_of_the_log_and_decodes_in_a_row_are_one(tmp_path):
    scheduler, at = timed(tmp_path / "log")
    at(1, scheduler.add, make_request(0, 3, 4))
    for time, result in ((2, 2.5), (3, 3.5), (3.5, 4), (4.5, 5)):  # before the third step the host takes no time
        plan = at(time, scheduler.schedule)
        at(result, answer, scheduler, plan)
    log_of(scheduler).close()
    trace = trace_of(tmp_path / "log")
    assert shown(trace) == {"r0[0]": [("waiting", 1, 2), ("prefill", 2, 2.5), ("decode", 3, 4), ("decode", 4.5, 5)]}
    (_, prefill, decode, _) = [event for event in trace if event["ph"] == "X"]
    step = {"first_step": 0, "last_step": 0, "tokens": 3, "start_position": 0, "end_position": 3}
    assert prefill["args"] == step
    assert decode["args"] == {"first_step": 1, "last_step": 2, "tokens": 2, "start_position": 3, "end_position": 5}
    counted = [(e["ts"] / 1e6, e["args"]["tokens"]) for e in trace if e["name"] == "tokens in the step"]
    assert counted == [(2, 3), (3, 1)]
    used = [(e["ts"] / 1e6, e["args"]) for e in trace if e["name"] == "blocks"]
    assert used[0] == (1, {"used": 0, "cached": 0, "free": 9})
    assert used[1] == (2, {"used": 2, "cached": 0, "free": 7})
    assert used[-1] == (5, {"used": 0, "cached": 3, "free": 6})


def test_a_step_planned_ahead_begins_when_the_result_before_it_is_there(tmp_path):
    scheduler, at = timed(tmp_path / "log", max_num_batched_tokens=4)
    scheduler.add(make_request(0, 3, 3))
    scheduler.add(make_request(1, 5, 3))
    first = at(1, scheduler.schedule)
    second = at(2, scheduler.schedule)
    at(5, answer, scheduler, first)
    third = at(6, scheduler.schedule)
    at(7, answer, scheduler, second)
    at(9, answer, scheduler, third)
    log_of(scheduler).close()
    assert shown(trace_of(tmp_path / "log")) == {
        "r0[0]": [("waiting", 0, 1), ("prefill", 1, 5), ("decode", 5, 9)],
        "r1[0]": [("waiting", 0, 1), ("prefill", 1, 5), ("prefill", 5, 7), ("prefill", 7, 9)],
    }


@pytest.mark.parametrize(
    ("preemption", "away", "again"), [("recompute", "waiting", "prefill"), ("swap", "swapped", "decode")]
)
def test_a_preempted_sequence_is_away_until_it_computes_again(tmp_path, preemption, away, again):
    scheduler, at = timed(tmp_path / "log", preemption=preemption)
    scheduler.add(make_request(0, 3, 9))
    at(1, run, scheduler)
    ahead = at(2, scheduler.schedule)
    scheduler.preempt_latest()
    assert at(3, scheduler.schedule).preempted == (0,)
    at(4, answer, scheduler, ahead)  # it still computed in that step
    plan = at(6, scheduler.schedule)
    at(7, answer, scheduler, plan)
    log_of(scheduler).close()
    trace = trace_of(tmp_path / "log")
    assert shown(trace) == {
        "r0[0]": [("waiting", 0, 1), ("prefill", 1, 1), ("decode", 2, 4), (away, 4, 6), (again, 6, 7)]
    }
    swapped = {e["args"]["used"] for e in trace if e["name"] == "blocks in the swap space"}
    assert swapped == ({0, 2} if preemption == "swap" else {0})


def test_what_a_failed_step_computed_ends_with_it_and_waits_again(tmp_path):
    scheduler, at = timed(tmp_path / "log")
    scheduler.add(make_request(0, 3, 9))
    at(1, scheduler.schedule)
    at(3, scheduler.recover)
    plan = at(4, scheduler.schedule)
    at(5, answer, scheduler, plan)
    log_of(scheduler).close()
    assert shown(trace_of(tmp_path / "log")) == {
        "r0[0]": [("waiting", 0, 1), ("prefill", 1, 3), ("waiting", 3, 4), ("prefill", 4, 5)]
    }


def test_decodes_before_and_behind_a_swap_are_not_one_even_where_the_clock_stands_still(tmp_path):
    scheduler, _ = timed(tmp_path / "log", preemption="swap")
    scheduler.add(make_request(0, 3, 9))
    run(scheduler)
    run(scheduler)
    scheduler.preempt_latest()
    scheduler.schedule()
    run(scheduler)
    log_of(scheduler).close()
    decodes = [event["args"] for event in trace_of(tmp_path / "log") if event["name"] == "decode"]
    assert [(args["first_step"], args["last_step"]) for args in decodes] == [(1, 1), (3, 3)]


def test_what_waits_does_so_until_it_is_ended_or_the_log_is(tmp_path):
    scheduler, at = timed(tmp_path / "log", max_num_seqs=1)
    for number in range(3):
        at(number, scheduler.add, make_request(number, 3))
    at(3, scheduler.schedule)
    at(4, scheduler.abort, "r1")
    at(6, scheduler.abort, "r0")
    log_of(scheduler).close()
    trace = trace_of(tmp_path / "log")
    assert shown(trace) == {
        "r0[0]": [("waiting", 0, 3), ("prefill", 3, 6)],
        "r1[0]": [("waiting", 1, 4)],
        "r2[0]": [("waiting", 2, 6)],
    }
    assert [e["args"].get("cut_short") for e in trace if e["name"] == "prefill"] == [True]


def test_lanes_are_named_by_request_and_sample_in_order_of_arrival(tmp_path):
    scheduler = make_recorder(tmp_path / "log")
    pipeline = Pipeline(scheduler, depth=0)
    pipeline.add(make_request(0, 3, 8))
    pipeline.add(make_request(1, 3, 4, n=2))
    pipeline.add(make_request(2, 3, 2, beam=BeamSearchParams(2, 2)))
    pipeline.step()
    pipeline.fork("r0", make_request(0, 3, 8, request_id="fork"))
    pipeline.run_to_end()
    log_of(scheduler).close()
    trace = trace_of(tmp_path / "log")
    places = {e["tid"]: e["args"]["sort_index"] for e in trace if e["name"] == "thread_sort_index"}
    names = [name for (_, tid), name in sorted(names_of(trace).items(), key=lambda item: places[item[0][1]])]
    assert names == ["r0[0]", "fork[1]", "r1[0]", "r1[1]", "r2[0]", "r2[1]"]


def test_each_run_is_a_process_behind_the_one_before(tmp_path):
    for seed in (1, 2):
        scheduler = make_recorder(tmp_path / "log", ticking(seed))
        pipeline = Pipeline(scheduler, depth=1)
        pipeline.add(make_request(seed, 3, 4))
        pipeline.step()
        log_of(scheduler).close()
    events = trace_of(tmp_path / "log")
    check(events, TINY["num_blocks"], TINY["num_host_blocks"])
    assert names_of(events) == {(1, 1): "r1[0]", (2, 2): "r2[0]"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {
        number: f"run {number}, {start['time']}"
        for number, start in enumerate((e for e in read(tmp_path / "log") if e["event"] == "start"), 1)
    }
    assert shown(events) == {
        "r1[0]": [("waiting", 1, 2), ("prefill", 2, 2)],
        "r2[0]": [("waiting", 2 + 2, 2 + 4), ("prefill", 6, 6)],
    }


def test_a_run_that_differs_from_its_replay_ends_there(tmp_path):
    record(tmp_path / "log", 3)
    events = read(tmp_path / "log")
    plans = [event for event in events if event["event"] == "plan"]
    plans[5]["plan"]["num_tokens"] += 1
    trace = trace_of(rewrite(tmp_path / "log", events))
    check(trace, *sizes(tmp_path / "log"))
    steps = [e["args"]["last_step"] for e in trace if e["name"] in ("prefill", "decode")]
    assert max(steps) == 4


def test_a_trace_is_written_as_json(tmp_path):
    record(tmp_path / "log", 3)
    trace = Trace()
    replay(tmp_path / "log", observer=trace.observe)
    trace.write(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(json.dumps(trace.data()))
    with pytest.raises(PagedJaxError, match=r"^cannot write .* \(Is a directory\)$"):
        trace.write(tmp_path)


def test_counters_follow_the_pool(tmp_path):
    scheduler = make_recorder(tmp_path / "log")
    pool, expected = paged(scheduler).pool, []
    scheduler.add(make_request(0, 5, 4))
    scheduler.add(make_request(1, 4, 4))
    while scheduler.has_unfinished():
        run(scheduler)
        expected.append((pool.num_used, pool.num_cached))
    log_of(scheduler).close()
    counted = [(e["args"]["used"], e["args"]["cached"]) for e in trace_of(tmp_path / "log") if e["name"] == "blocks"]
    assert set(expected) <= set(counted)
    assert counted[-1] == expected[-1] == (0, pool.num_cached)
