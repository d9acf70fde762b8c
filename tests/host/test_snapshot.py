"""Snapshots of the scheduler: plain JSON, refused when they make no sense, and going on identically."""

import copy
import json

import pytest
from host_harness import Pipeline, make_request, make_scheduler

from pagedjax.errors import SnapshotError
from pagedjax.host import StepResult
from pagedjax.request import Request, SamplingParams


def busy_pipeline(depth=1):
    """Some requests run, one was preempted, some wait, one ended, and steps are in flight."""
    pipeline = Pipeline(make_scheduler(num_blocks=6, block_size=2, max_num_batched_tokens=6), depth)
    for number in range(6):
        pipeline.add(make_request(number, 1 + number, max_tokens=1 + 2 * number, stop_ids=(0, 3)))
    for _ in range(5):
        pipeline.step()
    return pipeline


def through_json(scheduler):
    return json.loads(json.dumps(scheduler.snapshot(), allow_nan=False))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_restored_scheduler_goes_on_identically(depth):
    pipeline = busy_pipeline(depth)
    assert pipeline.scheduler.num_preemptions
    assert pipeline.scheduler.num_in_flight == depth
    other = copy.deepcopy(pipeline)  # device and results as they are, a new scheduler
    other.scheduler = make_scheduler(num_blocks=6, block_size=2, max_num_batched_tokens=6)
    other.scheduler.restore(through_json(pipeline.scheduler))
    assert other.scheduler.snapshot() == pipeline.scheduler.snapshot()
    pipeline.run_to_end()
    other.run_to_end()
    assert repr(other.plans) == repr(pipeline.plans)
    assert (other.outputs, other.ends) == (pipeline.outputs, pipeline.ends)
    assert other.scheduler.snapshot() == pipeline.scheduler.snapshot()


def test_a_token_on_its_way_to_a_sequence_that_ended_is_ignored_after_a_restore_too():
    scheduler, restored = make_scheduler(8), make_scheduler(8)
    scheduler.add(make_request(0, 3))
    scheduler.add(make_request(1, 3))
    scheduler.schedule()
    scheduler.abort("r0")
    restored.restore(through_json(scheduler))
    result = StepResult(0, [5, 6], {0: "not finite"})
    assert restored.update(result) == scheduler.update(result)
    assert restored.snapshot() == scheduler.snapshot()


def test_every_field_of_a_request_survives():
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        max_tokens=7,
        min_tokens=1,
        stop=["a", "é"],
        stop_token_ids=[4, 2],
        ignore_eos=True,
        seed=2**62,
        logprobs=3,
        prompt_logprobs=0,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.1,
        logit_bias={7: -1.5, 3: 2.0},
    )
    request = Request("name", 3, (1, 2), params, 2**62, frozenset({4, 2}), 9, 12.25, "text")
    scheduler, restored = make_scheduler(8), make_scheduler(8)
    scheduler.add(request)
    restored.restore(through_json(scheduler))
    found = restored.get("name").request
    assert found == request
    assert list(found.params.logit_bias or ()) == [7, 3]


def test_integers_of_other_kinds_are_written_as_integers():
    class Integer(int):
        """As numpy's are, json does not know how to write it."""

    class Opaque:
        def __init__(self, value):
            self.value = value

        def __int__(self):
            return self.value

        def __eq__(self, other):
            return self.value == int(other)

        def __hash__(self):
            return hash(self.value)

    scheduler = make_scheduler(8)
    request = make_request(0, 2)
    request.prompt_token_ids = (Opaque(3), Opaque(4))  # pyright: ignore[reportAttributeAccessIssue]
    scheduler.add(request)
    scheduler.schedule()
    scheduler.update(StepResult(0, [Opaque(5)]))  # pyright: ignore[reportArgumentType]
    group = through_json(scheduler)["groups"][0]
    assert group["request"]["prompt_token_ids"] == [3, 4]
    assert group["sequences"][0]["output"] == [5]


def test_another_version_is_refused():
    scheduler = make_scheduler(8)
    with pytest.raises(SnapshotError, match=r"^snapshot of version 4, but this program reads version 3$"):
        scheduler.restore({**scheduler.snapshot(), "version": 4})


@pytest.mark.parametrize("nonsense", [None, [], {}, "version", {"config": {}}])
def test_what_is_no_snapshot_is_refused(nonsense):
    with pytest.raises(SnapshotError, match=r"^not a snapshot of a scheduler: it has no version$"):
        make_scheduler(8).restore(nonsense)


def test_another_configuration_is_refused():
    data = make_scheduler(8, max_num_seqs=3).snapshot()
    with pytest.raises(
        SnapshotError,
        match=r"^snapshot of a scheduler with \{'max_num_seqs': 3, .*\}, but this one has \{'max_num_seqs': 4, .*\}$",
    ):
        make_scheduler(8).restore(data)
    with pytest.raises(SnapshotError, match=r"^snapshot of 8 blocks, but this pool has 9$"):
        make_scheduler(9).restore(make_scheduler(8).snapshot())


def every_path(data, path=()):
    if path:
        yield path
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            yield from every_path(data[key], (*path, key))


def changed(data, path, value):
    data = copy.deepcopy(data)
    where = data
    for key in path[:-1]:
        where = where[key]
    if value is KeyError:
        del where[path[-1]]
    else:
        where[path[-1]] = value
    return data


@pytest.mark.parametrize("value", [KeyError, None, "x", -7, []])
def test_no_damage_crashes_or_changes_a_scheduler(value):
    data = through_json(busy_pipeline().scheduler)
    scheduler = make_scheduler(num_blocks=6, block_size=2, max_num_batched_tokens=6)
    scheduler.add(make_request(0, 3))
    scheduler.schedule()
    before = scheduler.snapshot()
    refused = 0
    for path in every_path(data):
        try:
            scheduler.restore(changed(data, path, value))
        except SnapshotError:
            refused += 1
            assert scheduler.snapshot() == before, path
        else:  # harmless damage, such as another token or another seed
            scheduler.check_invariants()
            scheduler.restore(before)
    assert refused > 50
