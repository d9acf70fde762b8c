"""A device that only keeps books, and requests for it.

`BookkeepingDevice` stores in every slot of the pool whose key and value it holds: the token, and a digest of all tokens
before it, which is what a real key and value depend on. Before a chunk attends to what came before, each earlier slot
must hold just that; a wrong table, a block used after it was given away, a copy forgotten or a token not computed again
after preemption shows at once. The next token is a function of all tokens before it and of the sample's index, so a
sequence's output is known beforehand, whatever is batched, shared, chunked, preempted or planned ahead.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence as List

from pagedjax.baselines import make_allocator
from pagedjax.config import CacheConfig, SchedulerConfig
from pagedjax.host import (
    NULL_BLOCK,
    BeamCandidate,
    BeamSearch,
    Hypothesis,
    PagedAllocator,
    ScheduledChunk,
    Scheduler,
    SequenceUpdate,
    StepPlan,
    StepResult,
)
from pagedjax.host.beam import num_candidates
from pagedjax.request import BeamSearchParams, Request, SamplingParams, Sequence

VOCAB = 12
STOP = 0


def make_request(
    number: int,
    prompt_len: int,
    max_tokens: int = 8,
    *,
    stop_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    request_id: str | None = None,
    n: int = 1,
    beam: BeamSearchParams | None = None,
    salt: str | None = None,
    family: int | None = None,
    prompt_logprobs: int | None = None,
    registers_prefix: bool = False,
) -> Request:
    """A request with a prompt of its own, or one that begins as those of the same family do."""
    base = number if family is None else family
    prompt = tuple(1 + (base * 7 + position * 5) % (VOCAB - 1) for position in range(prompt_len))
    params = SamplingParams(n=n, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs)
    name = f"r{number}" if request_id is None else request_id
    return Request(
        name,
        number,
        prompt,
        params,
        0,
        frozenset(stop_ids),
        prompt_len + max_tokens,
        beam=beam,
        cache_salt=salt,
        registers_prefix=registers_prefix,
    )


def make_scheduler(
    num_blocks: int,
    block_size: int = 4,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    enable_chunked_prefill: bool = True,
    watermark: float = 0.0,
    enable_prefix_caching: bool = False,
    num_host_blocks: int = 0,
    preemption: str = "auto",
    allocator: str = "paged",
    batching: str = "continuous",
) -> Scheduler:
    """A scheduler over an allocator."""
    config = SchedulerConfig(
        max_num_seqs, max_num_batched_tokens, max_model_len, enable_chunked_prefill, preemption, batching
    )
    cache = CacheConfig(block_size, num_blocks, watermark, enable_prefix_caching, 0, num_host_blocks, allocator)
    return Scheduler(config, make_allocator(cache, max_model_len))


def paged(scheduler: Scheduler) -> PagedAllocator:
    """The scheduler's allocator, known to be paged."""
    assert isinstance(scheduler.allocator, PagedAllocator)
    return scheduler.allocator


def next_token(request: Request, token_ids: List[int], index: int = 0) -> int:
    """What the bookkeeping device samples after these tokens."""
    token = zlib.crc32(bytes(token_ids), index) % VOCAB
    banned = len(token_ids) - len(request.prompt_token_ids) < request.params.min_tokens
    return token + 1 if banned and token in request.stop_ids else token


def best_continuations(beams: List[List[int]], logprobs: List[float], count: int) -> list[BeamCandidate]:
    """What the bookkeeping device answers for beams of these tokens."""
    found = [
        BeamCandidate(beam, token, logprob - (zlib.crc32(bytes([*token_ids, token])) % 1000) / 250)
        for beam, (token_ids, logprob) in enumerate(zip(beams, logprobs, strict=True))
        for token in range(VOCAB)
    ]
    return sorted(found, key=lambda candidate: -candidate.logprob)[:count]


def expected_end(
    request: Request, num_slots: int, index: int = 0, start: List[int] | None = None
) -> tuple[list[int], str]:
    """Output and finish reason of a sample that nobody ends from outside, in a pool of that many slots.

    Args:
        start: tokens that it goes on from, if it was forked.
    """
    token_ids = list(start or request.prompt_token_ids)
    prompt_len = len(request.prompt_token_ids)
    while len(token_ids) <= num_slots:
        token_ids.append(next_token(request, token_ids, index))
        if token_ids[-1] in request.stop_ids and len(token_ids) - prompt_len >= request.params.min_tokens:
            return token_ids[prompt_len:], "stop"
        if len(token_ids) == request.max_len:
            return token_ids[prompt_len:], "length"
    return token_ids[prompt_len:], "error"


def expected_beams(request: Request) -> list[Hypothesis]:
    """What a beam search finds where nothing is paged: whole token lists, copied at every step."""
    assert request.beam is not None
    prompt, width = list(request.prompt_token_ids), request.beam.beam_width
    search = BeamSearch(request.beam, request.stop_ids, request.max_len - len(prompt))
    beams = [prompt]
    while beams:
        found = best_continuations(beams, search.logprobs, num_candidates(width, len(request.stop_ids)))
        survivors = search.advance(found, [tokens[len(prompt) :] for tokens in beams])
        beams = [[*beams[candidate.beam], candidate.token_id] for candidate in survivors]
    return search.hypotheses


def run(scheduler: Scheduler, tokens: int | None = None) -> tuple[StepPlan, list[SequenceUpdate]]:
    """Plans a step and answers it at once, every sample with token `tokens` (default 9)."""
    plan = scheduler.schedule()
    assert plan is not None
    return plan, answer(scheduler, plan, 9 if tokens is None else tokens)


def answer(scheduler: Scheduler, plan: StepPlan, token: int = 9) -> list[SequenceUpdate]:
    """Gives a plan's result, every sample with the same token."""
    return scheduler.update(StepResult(plan.step, [token for chunk in plan.chunks if chunk.samples]))


Slots = dict[int, tuple[int, int]]


class BookkeepingDevice:
    """Executes plans in order; knows of the host only what plans say, and `sequences` for what to sample."""

    def __init__(
        self, block_size: int, num_blocks: int, num_host_blocks: int, sequences: dict[int, tuple[Request, int]]
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.sequences = sequences  # by id: the request, and which of its samples
        self.pool: Slots = {}  # slot of the pool -> token, digest of it and all before it
        self.tables: dict[int, list[int]] = {}  # row of the block table -> blocks
        self.last_sampled: dict[int, int] = {}  # row -> token
        self.computed: dict[int, list[int]] = {}  # row -> tokens, what it shares from the beginning included
        self.host: Slots = {}  # slot of the swap space -> the same
        self.num_copies = self.num_swapped_out = self.num_swapped_in = 0

    def lose_everything(self) -> None:
        """As when a step fails and takes the pool with it."""
        self.pool.clear()
        self.host.clear()
        self.tables.clear()

    def swap(self, plan: StepPlan) -> None:
        """Moves blocks to the host and back."""
        assert not (plan.swap_outs and plan.swap_ins), "blocks go both ways in one step"
        for moves, source, target, limit in (
            (plan.swap_outs, self.pool, self.host, self.num_blocks),
            (plan.swap_ins, self.host, self.pool, self.num_host_blocks),
        ):
            assert len({to for _, to in moves}) == len(moves), f"{moves} overwrite each other"
            assert all(NULL_BLOCK < block <= limit for block, _ in moves)
            for block, to in moves:
                self._copy_block(source, block, target, to)
        self.num_swapped_out += len(plan.swap_outs)
        self.num_swapped_in += len(plan.swap_ins)

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a plan; raises AssertionError if a chunk would read anything but its own sequence."""
        assert sum(chunk.num_tokens for chunk in plan.chunks) == plan.num_tokens
        assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks), "two chunks share a row"
        self._copy(plan.copies)
        for chunk in plan.chunks:
            self._write(chunk)
        for before, chunk in zip((None, *plan.chunks), plan.chunks, strict=False):
            if not chunk.num_tokens:
                self._check_follower(before, chunk)
        contexts = {chunk.seq_id: self._context(chunk) for chunk in plan.chunks}
        token_ids = [self._sample(chunk, contexts[chunk.seq_id]) for chunk in plan.chunks if chunk.samples]
        beams = []
        for search in plan.beams:
            chunks = plan.chunks[search.first_chunk : search.first_chunk + search.num_chunks]
            assert not any(chunk.samples for chunk in chunks)
            rows = [contexts[chunk.seq_id] for chunk in chunks]
            beams.append(best_continuations(rows, search.logprobs, search.num_candidates))
        return StepResult(plan.step, token_ids, None, beams)

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        assert len({target for _, target in copies}) == len(copies), f"{copies} overwrite each other"
        for source, target in copies:
            assert min(source, target) > NULL_BLOCK and max(source, target) <= self.num_blocks
            self._copy_block(self.pool, source, self.pool, target)
        self.num_copies += len(copies)

    def _copy_block(self, source: Slots, block: int, target: Slots, to: int) -> None:
        for offset in range(self.block_size):
            target.pop(to * self.block_size + offset, None)
            if block * self.block_size + offset in source:
                target[to * self.block_size + offset] = source[block * self.block_size + offset]

    def _write(self, chunk: ScheduledChunk) -> None:
        if chunk.fresh:
            assert chunk.first_block == 0
            self.tables[chunk.slot] = []
            self.last_sampled.pop(chunk.slot, None)
            self.computed.pop(chunk.slot, None)
        table = self.tables[chunk.slot]
        if chunk.new_blocks:
            assert chunk.first_block <= len(table), "a gap in the table"
            table[chunk.first_block :] = chunk.new_blocks
        if chunk.fresh:
            slots = [self._slot(table, position) for position in range(chunk.start)]
            self.computed[chunk.slot] = [self.pool[slot][0] for slot in slots]
        if not chunk.num_tokens:
            return
        token_ids = chunk.token_ids or (self.last_sampled[chunk.slot],)
        assert len(token_ids) == chunk.num_tokens
        assert len(self.computed[chunk.slot]) == chunk.start, f"{chunk} leaves tokens out"
        self.computed[chunk.slot] += token_ids
        if not chunk.writes:
            return
        digest = self._digest_before(chunk)
        for position, token in enumerate(token_ids, chunk.start):
            digest = _digest(digest, token)
            self.pool[self._slot(table, position)] = token, digest

    def _digest_before(self, chunk: ScheduledChunk) -> int:
        if chunk.start:
            return self.pool[self._slot(self.tables[chunk.slot], chunk.start - 1)][1]
        return _root(self.sequences[chunk.seq_id][0])

    def _slot(self, table: list[int], position: int) -> int:
        block = table[position // self.block_size]
        assert NULL_BLOCK < block <= self.num_blocks
        return block * self.block_size + position % self.block_size

    def _context(self, chunk: ScheduledChunk) -> list[int]:
        """After all writes of the step: nobody has written over what the chunk reads."""
        table, tokens = self.tables[chunk.slot], []
        request = self.sequences[chunk.seq_id][0]
        digest, prompt = _root(request), request.prompt_token_ids
        for position in range(chunk.start + chunk.num_tokens):
            token, found = self.pool[self._slot(table, position)]
            digest = _digest(digest, token)
            assert found == digest, f"{chunk} reads another sequence's token at {position}"
            assert position >= len(prompt) or token == prompt[position], f"{chunk} reads another prompt at {position}"
            tokens.append(token)
        assert tokens == self.computed[chunk.slot], f"{chunk} finds other tokens than its own"
        return tokens

    def _check_follower(self, before: ScheduledChunk | None, chunk: ScheduledChunk) -> None:
        """A chunk without tokens samples from the last row of the chunk before it."""
        assert before is not None and chunk.samples and before.samples
        assert self._context(before) == self._context(chunk)

    def _sample(self, chunk: ScheduledChunk, context: list[int]) -> int:
        request, index = self.sequences[chunk.seq_id]
        token = next_token(request, context, index)
        self.last_sampled[chunk.slot] = token
        return token


def _root(request: Request) -> int:
    return zlib.crc32(repr(request.cache_salt).encode())


def _digest(before: int, token: int) -> int:
    return zlib.crc32(bytes([token]), before)


class Pipeline:
    """A scheduler and a bookkeeping device, with up to `depth` steps executed but not read back."""

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.requests: dict[int, Request] = {}  # by sequence; of beams none
        self.sequences: dict[int, tuple[Request, int]] = {}
        self.starts: dict[int, list[int]] = {}  # tokens that forks went on from
        self.searches: dict[str, Request] = {}
        self.found: dict[str, list[Hypothesis]] = {}
        allocator = scheduler.allocator
        sizes = allocator.block_size, allocator.num_blocks, allocator.occupancy().host
        self.device = BookkeepingDevice(*sizes, self.sequences)
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}

    def add(self, request: Request) -> int:
        """Adds a request; returns its first sequence's id."""
        group = self.scheduler.add(request)
        if request.beam is not None:
            self.searches[request.request_id] = request
        else:
            for seq in group.sequences:
                self._register(seq)
        return group.sequences[0].seq_id

    def _register(self, seq: Sequence) -> None:
        self.requests[seq.seq_id] = seq.request
        self.sequences[seq.seq_id] = seq.request, seq.index
        self.outputs[seq.seq_id] = seq.token_ids[seq.prompt_len :]

    def fork(self, request_id: str, request: Request) -> int:
        """Forks a request whose tokens are all known; returns the fork's sequence id."""
        (seq,) = self.scheduler.fork(request_id, request).sequences
        self._register(seq)
        self.starts[seq.seq_id] = list(seq.token_ids)
        return seq.seq_id

    def step(self) -> bool:
        """Plans and executes a step, reads results back as far as `depth` asks; whether anything happened."""
        searching, alive = self._searching(), dict(self.scheduler.roster.sequences)
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.ends.update({seq_id: "error" for seq_id in plan.failed if seq_id in self.requests})
            for seq_id in plan.ended:
                if seq_id in self.requests:
                    self.ends[seq_id] = str(alive[seq_id].finish_reason)
            self._note_found(searching)
            for search in plan.beams:
                for chunk in plan.chunks[search.first_chunk : search.first_chunk + search.num_chunks]:
                    self.sequences[chunk.seq_id] = self.searches[search.request_id], 0
            for chunk in plan.chunks:
                self.sequences.setdefault(chunk.seq_id, (self.scheduler.roster.sequences[chunk.seq_id].request, 0))
            self.device.swap(plan)
            if plan.chunks:
                self.results.append(self.device.execute(plan))
        happened = plan is not None or bool(self.results)
        while len(self.results) > (self.depth if plan is not None else 0):
            self.read_back()
        return happened

    def read_back(self) -> None:
        """Gives the oldest result to the scheduler."""
        searching = self._searching()
        for seq_id, token, reason in self.scheduler.update(self.results.popleft()):
            assert seq_id not in self.ends, "a token for a sequence that had ended"
            if token is not None:
                self.outputs[seq_id].append(token)
            if reason is not None:
                self.ends[seq_id] = reason
        self._note_found(searching)

    def _searching(self) -> list[SequenceGroup]:
        return [group for group in self.scheduler.roster.groups.values() if group.beam is not None]

    def _note_found(self, groups: list[SequenceGroup]) -> None:
        """Keeps what the searches among these found that have ended by now."""
        for group in groups:
            if group.beam is not None and not group.unfinished and group.sequences[0].finish_reason != "error":
                self.found[group.request.request_id] = group.beam.hypotheses

    def fail(self) -> None:
        """A step failed: nothing on the device can be relied on, and no result comes any more."""
        self.results.clear()
        self.device.lose_everything()
        searching, alive = self._searching(), dict(self.scheduler.roster.sequences)
        self.scheduler.recover()
        for seq_id in (alive.keys() - self.scheduler.roster.sequences.keys()) & self.requests.keys():
            self.ends[seq_id] = str(alive[seq_id].finish_reason)
        self._note_found(searching)

    def read_all(self) -> None:
        """Gives all results to the scheduler, so that all tokens are known."""
        while self.results:
            self.read_back()

    def run_to_end(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left, neither requests nor results."""
        for _ in range(max_steps):
            if not self.step():
                assert not self.scheduler.has_unfinished(), "work is left, but nothing is planned and nothing in flight"
                return
            self.scheduler.check_invariants()
        raise AssertionError(f"not done after {max_steps} steps")
