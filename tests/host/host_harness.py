"""A device that only keeps books, and requests for it.

`BookkeepingDevice` stores in every slot of the pool whose key and value it holds: (sequence, position, token). Before
a chunk attends to what came before, each earlier slot must hold just that; a wrong table, a block used after it was
given away or a token not computed again after preemption shows at once. The next token is a function of all tokens
before it, so a sequence's output is known beforehand, whatever is batched, chunked, preempted or planned ahead.
"""

from __future__ import annotations

import zlib
from collections import deque

from pagedjax.config import CacheConfig, SchedulerConfig
from pagedjax.host import NULL_BLOCK, PagedAllocator, ScheduledChunk, Scheduler, SequenceUpdate, StepPlan, StepResult
from pagedjax.request import Request, SamplingParams

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
) -> Request:
    """A request with a prompt of its own."""
    prompt = tuple(1 + (number * 7 + position * 5) % (VOCAB - 1) for position in range(prompt_len))
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    name = f"r{number}" if request_id is None else request_id
    return Request(name, number, prompt, params, 0, frozenset(stop_ids), prompt_len + max_tokens)


def make_scheduler(
    num_blocks: int,
    block_size: int = 4,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    enable_chunked_prefill: bool = True,
    watermark: float = 0.0,
) -> Scheduler:
    """A scheduler over a paged allocator."""
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, enable_chunked_prefill)
    return Scheduler(config, PagedAllocator(CacheConfig(block_size, num_blocks, watermark)))


def next_token(request: Request, token_ids: list[int]) -> int:
    """What the bookkeeping device samples after these tokens."""
    token = zlib.crc32(bytes(token_ids)) % VOCAB
    banned = len(token_ids) - len(request.prompt_token_ids) < request.params.min_tokens
    return token + 1 if banned and token in request.stop_ids else token


def expected_end(request: Request, num_slots: int) -> tuple[list[int], str]:
    """Output and finish reason of a request that nobody ends from outside, in a pool of that many slots."""
    token_ids = list(request.prompt_token_ids)
    start = len(token_ids)
    while True:
        token_ids.append(next_token(request, token_ids))
        if token_ids[-1] in request.stop_ids and len(token_ids) - start >= request.params.min_tokens:
            return token_ids[start:], "stop"
        if len(token_ids) == request.max_len:
            return token_ids[start:], "length"
        if len(token_ids) > num_slots:
            return token_ids[start:], "error"


def run(scheduler: Scheduler, tokens: int | None = None) -> tuple[StepPlan, list[SequenceUpdate]]:
    """Plans a step and answers it at once, every sample with token `tokens` (default 9)."""
    plan = scheduler.schedule()
    assert plan is not None
    return plan, answer(scheduler, plan, 9 if tokens is None else tokens)


def answer(scheduler: Scheduler, plan: StepPlan, token: int = 9) -> list[SequenceUpdate]:
    """Gives a plan's result, every sample with the same token."""
    return scheduler.update(StepResult(plan.step, [token for chunk in plan.chunks if chunk.samples]))


class BookkeepingDevice:
    """Executes plans in order; knows of the host only what plans say, and `requests` for what to sample."""

    def __init__(self, block_size: int, num_blocks: int, requests: dict[int, Request]) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.requests = requests  # by sequence id
        self.pool: dict[int, tuple[int, int, int]] = {}  # slot of the pool -> sequence, position, token
        self.tables: dict[int, list[int]] = {}  # row of the block table -> blocks
        self.last_sampled: dict[int, int] = {}  # row -> token

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a plan; raises AssertionError if a chunk would read anything but its own sequence."""
        assert sum(chunk.num_tokens for chunk in plan.chunks) == plan.num_tokens
        assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks), "two chunks share a row"
        for chunk in plan.chunks:
            self._write(chunk)
        return StepResult(plan.step, [self._sample(chunk) for chunk in plan.chunks if self._attend(chunk).samples])

    def _write(self, chunk: ScheduledChunk) -> None:
        if chunk.fresh:
            assert chunk.start == 0 and chunk.first_block == 0
            self.tables[chunk.slot] = []
            self.last_sampled.pop(chunk.slot, None)
        table = self.tables[chunk.slot]
        if chunk.new_blocks:
            assert chunk.first_block == len(table), "a gap in the table, or blocks sent twice"
            table.extend(chunk.new_blocks)
        token_ids = chunk.token_ids or (self.last_sampled[chunk.slot],)
        assert len(token_ids) == chunk.num_tokens
        for position, token in enumerate(token_ids, chunk.start):
            block = table[position // self.block_size]
            assert NULL_BLOCK < block <= self.num_blocks
            self.pool[block * self.block_size + position % self.block_size] = (chunk.seq_id, position, token)

    def _attend(self, chunk: ScheduledChunk) -> ScheduledChunk:
        """After all writes of the step: nobody has written over what the chunk reads."""
        prompt = self.requests[chunk.seq_id].prompt_token_ids
        for position, token in enumerate(self._context(chunk)):
            assert position >= len(prompt) or token == prompt[position]
        return chunk

    def _context(self, chunk: ScheduledChunk) -> list[int]:
        table, tokens = self.tables[chunk.slot], []
        for position in range(chunk.start + chunk.num_tokens):
            block = table[position // self.block_size]
            seq_id, found, token = self.pool[block * self.block_size + position % self.block_size]
            assert (seq_id, found) == (chunk.seq_id, position), f"{chunk} reads {(seq_id, found)} at {position}"
            tokens.append(token)
        return tokens

    def _sample(self, chunk: ScheduledChunk) -> int:
        token = next_token(self.requests[chunk.seq_id], self._context(chunk))
        self.last_sampled[chunk.slot] = token
        return token


class Pipeline:
    """A scheduler and a bookkeeping device, with up to `depth` steps executed but not read back."""

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.requests: dict[int, Request] = {}
        allocator = scheduler.allocator
        self.device = BookkeepingDevice(allocator.block_size, allocator.num_blocks, self.requests)
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}

    def add(self, request: Request) -> int:
        """Adds a request; returns its sequence's id."""
        (seq,) = self.scheduler.add(request).sequences
        self.requests[seq.seq_id] = request
        self.outputs[seq.seq_id] = []
        return seq.seq_id

    def step(self) -> bool:
        """Plans and executes a step, reads results back as far as `depth` asks; whether anything happened."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.ends.update(dict.fromkeys(plan.failed, "error"))
            if plan.chunks:
                self.results.append(self.device.execute(plan))
        happened = plan is not None or bool(self.results)
        while len(self.results) > (self.depth if plan is not None else 0):
            self.read_back()
        return happened

    def read_back(self) -> None:
        """Gives the oldest result to the scheduler."""
        for seq_id, token, reason in self.scheduler.update(self.results.popleft()):
            assert seq_id not in self.ends, "a token for a sequence that had ended"
            if token is not None:
                self.outputs[seq_id].append(token)
            if reason is not None:
                self.ends[seq_id] = reason

    def run_to_end(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left, neither requests nor results."""
        for _ in range(max_steps):
            if not self.step():
                assert not self.scheduler.has_unfinished(), "work is left, but nothing is planned and nothing in flight"
                return
            self.scheduler.check_invariants()
        raise AssertionError(f"not done after {max_steps} steps")
