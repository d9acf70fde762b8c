"""The scheduler as plain JSON-able data, and back."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from pagedjax.errors import PagedJaxError, SnapshotError
from pagedjax.host.beam import BeamSearch, Hypothesis
from pagedjax.host.plan import InFlight
from pagedjax.request import BeamSearchParams, Request, SamplingParams, Sequence, SequenceGroup, SequenceStatus

if TYPE_CHECKING:
    from pagedjax.host.scheduler import Scheduler

VERSION = 3

_PARAMS = tuple(field.name for field in fields(SamplingParams))


def dump_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as data; JSON knows no integer keys, so `logit_bias` is a list of pairs."""
    data = {name: getattr(params, name) for name in _PARAMS}
    data["stop"] = list(params.stop)
    data["stop_token_ids"] = list(params.stop_token_ids)
    if params.logit_bias is not None:
        data["logit_bias"] = [[token, bias] for token, bias in params.logit_bias.items()]
    return data


def load_params(data: dict[str, Any]) -> SamplingParams:
    """Inverse of `dump_params`; checks the values as a user's would be."""
    bias = data["logit_bias"]
    return SamplingParams(**{**data, "logit_bias": None if bias is None else {token: value for token, value in bias}})


def dump_request(request: Request) -> dict[str, Any]:
    """A request as data. Token ids become plain integers, whatever kind of integer they were."""
    return {
        "request_id": request.request_id,
        "number": int(request.number),
        "prompt_token_ids": [int(token) for token in request.prompt_token_ids],
        "params": dump_params(request.params),
        "seed": int(request.seed),
        "stop_ids": sorted(int(token) for token in request.stop_ids),
        "max_len": int(request.max_len),
        "arrival_time": float(request.arrival_time),
        "prompt": request.prompt,
        "beam": None if request.beam is None else asdict(request.beam),
        "cache_salt": request.cache_salt,
        "registers_prefix": request.registers_prefix,
    }


def load_request(data: dict[str, Any]) -> Request:
    """Inverse of `dump_request`."""
    return Request(
        **{
            **data,
            "number": int(data["number"]),
            "prompt_token_ids": tuple(int(token) for token in data["prompt_token_ids"]),
            "params": load_params(data["params"]),
            "seed": int(data["seed"]),
            "stop_ids": frozenset(int(token) for token in data["stop_ids"]),
            "max_len": int(data["max_len"]),
            "arrival_time": float(data["arrival_time"]),
            "beam": None if data["beam"] is None else BeamSearchParams(**data["beam"]),
        }
    )


_COUNTS = (
    "seq_id",
    "index",
    "num_pending",
    "num_computed",
    "slot",
    "prefill_len",
    "capacity",
    "decode_until",
    "check_len",
    "num_cached",
    "num_sealed",
    "num_preemptions",
)


def dump_sequence(sequence: Sequence) -> dict[str, Any]:
    """A sequence as data; of its tokens only the output, the prompt being the request's. Its hashes are made anew."""
    return {
        **{name: getattr(sequence, name) for name in _COUNTS},
        "output": [int(token) for token in sequence.token_ids[sequence.prompt_len :]],
        "fresh": sequence.fresh,
        "leader_id": sequence.leader_id,
        "status": sequence.status.value,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "done": sequence.done and list(sequence.done),
    }


def load_sequence(data: dict[str, Any], request: Request) -> Sequence:
    """Inverse of `dump_sequence`."""
    counts: dict[str, Any] = {name: int(data[name]) for name in _COUNTS}
    return Sequence(
        request=request,
        token_ids=[*request.prompt_token_ids, *map(int, data["output"])],
        status=SequenceStatus(data["status"]),
        fresh=bool(data["fresh"]),
        leader_id=None if data["leader_id"] is None else int(data["leader_id"]),
        finish_reason=data["finish_reason"],
        stop_reason=data["stop_reason"],
        done=_load_done(data["done"]),
        **counts,
    )


def _load_done(data: Any) -> tuple[str, Any] | None:
    if data is None:
        return None
    reason, stop_reason = data
    return str(reason), stop_reason


def dump_group(group: SequenceGroup) -> dict[str, Any]:
    """An unfinished request with its sequences as data, those included that have ended before the others."""
    beam = group.beam
    return {
        "request": dump_request(group.request),
        "sequences": [dump_sequence(seq) for seq in group.sequences],
        "arrival": group.arrival,
        "spare_slots": list(group.spare_slots),
        "beam": beam and {"logprobs": list(beam.logprobs), "hypotheses": [list(h) for h in beam.hypotheses]},
    }


def load_group(data: dict[str, Any]) -> SequenceGroup:
    """Inverse of `dump_group`."""
    request = load_request(data["request"])
    group = SequenceGroup(
        request,
        [load_sequence(seq, request) for seq in data["sequences"]],
        int(data["arrival"]),
        spare_slots=[int(slot) for slot in data["spare_slots"]],
    )
    if request.beam is None and request.width == 1:
        (group.only,) = group.sequences
    if request.beam is not None:
        beam = group.beam = BeamSearch(request.beam, request.stop_ids, request.max_len - len(request.prompt_token_ids))
        beam.logprobs = [float(value) for value in data["beam"]["logprobs"]]
        beam.hypotheses = [
            Hypothesis(float(score), float(logprob), tuple(map(int, tokens)), str(reason))
            for score, logprob, tokens, reason in data["beam"]["hypotheses"]
        ]
    return group


def dump_scheduler(scheduler: Scheduler) -> dict[str, Any]:
    """A scheduler and its allocator as data. Sequences in flight are named by number: those that ended need no more."""
    return {
        "version": VERSION,
        "config": asdict(scheduler.config),
        "allocator": scheduler.allocator.snapshot(),
        "num_steps": scheduler.num_steps,
        "num_preemptions": scheduler.num_preemptions,
        "next_seq_id": scheduler.roster.next_seq_id,
        "num_arrivals": scheduler.roster.num_arrivals,
        "next_index": [[arrival, index] for arrival, index in scheduler.roster.next_index.items()],
        "groups": [dump_group(group) for group in scheduler.roster.groups.values()],
        "waiting": [group.request.request_id for group in scheduler.roster.waiting],
        "running": [group.request.request_id for group in scheduler.roster.running],
        "swapped": [group.request.request_id for group in scheduler.roster.swapped],
        "num_asked": scheduler._num_asked,
        "filling": scheduler.roster.filling,
        "free_slots": list(scheduler.roster.free_slots),
        "in_flight": [
            [step, [seq.seq_id for seq in sampling], [group.arrival for group in searching]]
            for step, sampling, searching in scheduler._in_flight
        ],
    }


def load_scheduler(scheduler: Scheduler, data: Any) -> None:
    """Puts the state of `data` into a scheduler and its allocator, or raises SnapshotError and changes neither."""
    _check_header(scheduler, data)
    before = scheduler.allocator.snapshot()
    try:
        scheduler.allocator.restore(data["allocator"])
        candidate = type(scheduler)(scheduler.config, scheduler.allocator)
        _fill(candidate, data)
        candidate.check_invariants()
    except (KeyError, TypeError, ValueError, AttributeError, PagedJaxError) as error:
        scheduler.allocator.restore(before)
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"not a snapshot of a scheduler: {error!r}") from error
    vars(scheduler).update(vars(candidate))


def _check_header(scheduler: Scheduler, data: object) -> None:
    if not isinstance(data, dict) or "version" not in data:
        raise SnapshotError("not a snapshot of a scheduler: it has no version")
    if data["version"] != VERSION:
        raise SnapshotError(f"snapshot of version {data['version']!r}, but this program reads version {VERSION}")
    config = asdict(scheduler.config)
    if data.get("config") != config:
        raise SnapshotError(f"snapshot of a scheduler with {data.get('config')}, but this one has {config}")


def _fill(scheduler: Scheduler, data: dict[str, Any]) -> None:
    groups = [load_group(group) for group in data["groups"]]
    sequences = {seq.seq_id: seq for group in groups for seq in group.unfinished}
    searches = {group.arrival: group for group in groups if group.beam is not None}
    scheduler.num_steps = int(data["num_steps"])
    scheduler.roster.num_preemptions = int(data["num_preemptions"])
    scheduler.roster.next_seq_id = int(data["next_seq_id"])
    scheduler.roster.num_arrivals = int(data["num_arrivals"])
    scheduler.roster.next_index = {int(arrival): int(index) for arrival, index in data["next_index"]}
    scheduler.roster.groups = {group.request.request_id: group for group in groups}
    scheduler.roster.sequences = sequences
    scheduler.roster.waiting = deque(scheduler.roster.groups[request_id] for request_id in data["waiting"])
    scheduler.roster.running = [scheduler.roster.groups[request_id] for request_id in data["running"]]
    scheduler.roster.swapped = [scheduler.roster.groups[request_id] for request_id in data["swapped"]]
    scheduler._num_asked = int(data["num_asked"])
    scheduler.roster.filling = bool(data["filling"])
    scheduler.roster.free_slots = [int(slot) for slot in data["free_slots"]]
    scheduler._in_flight = deque(
        InFlight(
            int(step),
            [sequences.get(seq_id) or _ended(seq_id) for seq_id in sampling],
            [searches.get(arrival) or SequenceGroup(_NOBODY, [], int(arrival)) for arrival in searching],
        )
        for step, sampling, searching in data["in_flight"]
    )


_NOBODY = Request("", -1, (), SamplingParams(), 0, frozenset(), 0)


def _ended(seq_id: int) -> Sequence:
    """Stands for a sequence that ended with a step in flight: its token will be ignored."""
    return Sequence(seq_id, _NOBODY, status=SequenceStatus.FINISHED)
