"""Requests and results that a scheduler refuses."""

from __future__ import annotations

from collections.abc import Container

from pagedjax.config import SchedulerConfig
from pagedjax.errors import InvalidRequest, RequestTooLong
from pagedjax.host.plan import InFlight, StepResult
from pagedjax.host.protocol import KVAllocator
from pagedjax.request import Request


def check_request(
    request: Request, config: SchedulerConfig, allocator: KVAllocator, unfinished: Container[str]
) -> None:
    """Raises InvalidRequest or RequestTooLong for a request that can never be served as it is."""
    name, length = f"request {request.request_id!r}", len(request.prompt_token_ids)
    if request.request_id in unfinished:
        raise InvalidRequest(f"{name} exists already and is not finished: request ids must differ")
    if not length:
        raise InvalidRequest(f"{name} has an empty prompt: at least 1 token is needed")
    if length >= config.max_model_len:
        raise RequestTooLong(
            f"{name} has a prompt of {length} tokens, but max_model_len={config.max_model_len} allows at most "
            f"{config.max_model_len - 1} and one output token"
        )
    if not length < request.max_len <= config.max_model_len:
        raise InvalidRequest(
            f"{name} has max_len={request.max_len}, but it must be above its prompt's {length} tokens and at most "
            f"max_model_len={config.max_model_len}"
        )
    what = "n" if request.beam is None else "beam_width"
    for limit in ("max_num_seqs", "max_num_batched_tokens"):
        if request.width > getattr(config, limit):
            raise InvalidRequest(
                f"{name} has {what}={request.width}, but {limit}={getattr(config, limit)} allows no more sequences "
                "at the same time"
            )
    # The last token of all is never computed, so it needs no room.
    needed = min(length + 1, request.max_len - 1)
    num_blocks, block_size = allocator.num_blocks, allocator.block_size
    if needed > num_blocks * block_size:
        raise RequestTooLong(
            f"{name} has a prompt of {length} tokens and needs room for {needed}, but the whole pool holds "
            f"{num_blocks * block_size} ({num_blocks} blocks of {block_size} tokens)"
        )


def check_result(result: StepResult, flight: InFlight | None) -> None:
    """Raises ValueError unless a result answers the oldest step in flight, whole."""
    if flight is None:
        raise ValueError(f"the result of step {result.step} was given, but no step is in flight")
    step, sampling, searching = flight
    if result.step != step:
        raise ValueError(f"the result of step {result.step} was given, but step {step} is the next to be answered")
    if len(result.token_ids) != len(sampling):
        raise ValueError(f"step {step} samples {len(sampling)} tokens, but its result has {len(result.token_ids)}")
    if len(result.beams or ()) != len(searching):
        raise ValueError(
            f"step {step} searches for {len(searching)} requests, but its result has beams of {len(result.beams or ())}"
        )
    known = {seq.seq_id for seq in sampling}.union(seq.seq_id for group in searching for seq in group.sequences)
    if result.errors and (unknown := set(result.errors) - known):
        raise ValueError(f"step {step} has errors for sequences {sorted(unknown)}, which do not sample in it")
