"""Runs plans on the device: keeps the pool and the sampler's state, and never waits unless asked for results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.device.batch import (
    beam_buckets,
    bucket_for,
    copy_buckets,
    independent,
    pad,
    row_buckets,
    row_slices,
    swap_buckets,
    token_buckets,
)
from pagedjax.device.beams import BeamOutput
from pagedjax.device.host_pool import HostPool, padded
from pagedjax.device.kv_pool import KVPool, PoolInfo
from pagedjax.device.programs import Programs
from pagedjax.device.sampler import SampleOutput, SamplerState, TokenLogprobs
from pagedjax.device.slots import SlotTable, bias_row, count_row
from pagedjax.host.beam import BeamCandidate
from pagedjax.host.plan import ScheduledBeams, StepPlan, StepResult
from pagedjax.models.llama import AttentionBackend, Params, head_kernel
from pagedjax.models.progress import bar
from pagedjax.request import Sequence as TokenSequence

_NOT_FINITE = "the logits hold NaN or infinity"


class PromptRows(NamedTuple):
    """Prompt tokens of one chunk whose logprobs are wanted.

    Attributes:
        first: flat index, in the step, of the token that predicts the first of `targets`.
        targets: the prompt tokens, one after another.
        begin: position in the sequence of the token at `first`.
    """

    seq_id: int
    first: int
    targets: list[int]
    begin: int


class RowLogprobs(NamedTuple):
    """Logprobs of one row on the host: of the chosen token, and of the most likely ones."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A step's results on the host.

    Attributes:
        logprobs: {seq_id: of its sampled token}, where asked for.
        prompt_logprobs: one list for each of the step's `prompt_rows`, with one entry per target.
    """

    result: StepResult
    logprobs: dict[int, RowLogprobs]
    prompt_logprobs: list[list[RowLogprobs]]


@dataclass(frozen=True, slots=True)
class SampledSlice:
    """Rows sampled by one call of the head; those after `seq_ids` are padding. The arrays are still on the device."""

    seq_ids: list[int]
    output: SampleOutput
    wants_logprobs: bool


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was dispatched; its results are still on the device."""

    plan: StepPlan
    slices: list[SampledSlice]
    searches: list[BeamOutput]  # for each of the plan's beams
    prompt_rows: Sequence[PromptRows]
    prompt_logprobs: list[list[tuple[int, TokenLogprobs]]]  # for each of prompt_rows: (rows used, logprobs) by slice


class Runner:
    """The device side of an engine. One plan at a time goes in; results come out in the same order."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        params: Params,
        pool: PoolInfo,
        max_model_len: int,
        backend: AttentionBackend,
    ) -> None:
        self.params = params
        self.kernel = head_kernel(params)
        self._backbone_params = {name: tree for name, tree in params.items() if name != "lm_head"}
        self._vocab_size = model.vocab_size
        self._token_buckets = token_buckets(config.max_num_batched_tokens)
        self._row_buckets = row_buckets(config.max_num_seqs, model.vocab_size)
        self._beam_buckets = beam_buckets(config.max_num_seqs)
        self._copy_buckets = copy_buckets(config.max_num_seqs)
        self._moves_blocks = pool.num_host_blocks > 0 or config.snapshot_path is not None
        self._swap_buckets = swap_buckets(pool.num_blocks, pool.bytes_per_block)
        max_blocks = -(-max_model_len // config.block_size)
        self._slots = SlotTable(config.max_num_seqs, max_blocks, config.block_size)
        self.state = SamplerState.create(config.max_num_seqs, model.vocab_size)
        self._layout, self._num_blocks = pool.layout, pool.num_blocks
        self.pool = KVPool.create(self._layout, self._num_blocks)
        self.host_pool = HostPool(pool.layout, pool.num_host_blocks, self.pool.k[0].sharding)
        self._min_tokens: dict[int, tuple[int, TokenSequence]] = {}  # slot -> total length at which stops are allowed
        self.programs = Programs(
            model,
            backend,
            self._backbone_params,
            self.pool,
            self.state,
            self.kernel,
            max_blocks,
        )

    def recover(self) -> None:
        """Begins with an empty pool, after a call that may have taken the old one, or its content, with it."""
        self.host_pool.forget()
        self._min_tokens.clear()
        for array in jax.tree.leaves((self.pool, self.state)):
            array.delete()  # there may not be room for two
        self.pool = KVPool.create(self._layout, self._num_blocks)
        self.state = SamplerState.create(self._slots.max_num_seqs, self._vocab_size)

    def program_calls(self) -> list[Callable[[], object]]:
        """Calls that compile every program any step could need, largest first: those take longest."""
        programs, num_rows = self.programs, self._row_buckets[-1]
        calls: list[Callable[[], object]] = [partial(programs.backbone, size) for size in self._token_buckets[::-1]]
        calls += [partial(programs.sample, size) for size in self._row_buckets[::-1]]
        calls += [partial(programs.select_rows, size, num_rows) for size in self._token_buckets[::-1]]
        calls += [partial(programs.beams, width) for width in self._beam_buckets[::-1]]
        calls += [partial(programs.copy_blocks, size) for size in self._copy_buckets[::-1]]
        if self._moves_blocks:
            calls += [partial(programs.gather_blocks, size) for size in self._swap_buckets[::-1]]
            calls += [partial(programs.scatter_blocks, size) for size in self._swap_buckets[::-1]]
        calls += [partial(programs.prompt_logprobs, num_rows), programs.set_token_counts, programs.set_logit_bias]
        return calls

    def warmup(self, progress: bool) -> dict[str, float]:
        """See `Engine.warmup`."""
        programs, calls = self.programs, self.program_calls()
        before, announced = set(programs.seconds), programs.progress
        programs.progress = progress and not sys.stderr.isatty()  # there, the bar says it
        try:
            for compile_one in bar(calls, "compiling", progress, unit="program"):
                compile_one()
        finally:
            programs.progress = announced
        compiled = {name: seconds for name, seconds in programs.seconds.items() if name not in before}
        if progress and compiled:
            listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in compiled.items())
            print(f"compiled {len(compiled)} programs in {sum(compiled.values()):.0f} s: {listed}", file=sys.stderr)
        return compiled

    def swap(self, plan: StepPlan) -> None:
        """Dispatches a plan's moves to the host and back: before `execute`, also if there is nothing to execute."""
        for first, count in row_slices(len(plan.swap_outs), self._swap_buckets):
            sources, targets = zip(*plan.swap_outs[first : first + count], strict=True)
            size = bucket_for(count, self._swap_buckets)
            blocks = self.programs.gather_blocks(size)(self.pool, pad(np.array(sources, np.int32), size))
            self.host_pool.store(targets, blocks)
        for first, count in row_slices(len(plan.swap_ins), self._swap_buckets):
            sources, targets = zip(*plan.swap_ins[first : first + count], strict=True)
            size = bucket_for(count, self._swap_buckets)
            blocks = self.host_pool.load(sources, size)
            self.pool = self.programs.scatter_blocks(size)(self.pool, pad(np.array(targets, np.int32), size), blocks)

    def read_blocks(self, ids: Sequence[int]) -> list[np.ndarray]:
        """The content of blocks, packed as in `host_pool`, in the host's memory."""
        parts = []
        for first, count in row_slices(len(ids), self._swap_buckets):
            size = bucket_for(count, self._swap_buckets)
            rows = pad(np.array(ids[first : first + count], np.int32), size)
            packed = self.programs.gather_blocks(size)(self.pool, rows)
            parts.append([np.asarray(array)[:count] for array in packed])
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def write_blocks(self, ids: Sequence[int], packed: Sequence[np.ndarray]) -> None:
        """Inverse of `read_blocks`."""
        for first, count in row_slices(len(ids), self._swap_buckets):
            size = bucket_for(count, self._swap_buckets)
            blocks = tuple(padded(array[first : first + count], size) for array in packed)
            rows = pad(np.array(ids[first : first + count], np.int32), size)
            self.pool = self.programs.scatter_blocks(size)(self.pool, rows, blocks)

    def execute(
        self, plan: StepPlan, sequences: Mapping[int, TokenSequence], prompt_rows: Sequence[PromptRows] = ()
    ) -> InFlight:
        """Dispatches one step.

        Args:
            plan: with at least one chunk.
            sequences: by seq_id, those of the plan's fresh chunks at least.
            prompt_rows: prompt tokens whose logprobs are wanted.
        """
        self._apply_changes(plan, sequences)
        for copies in independent(plan.copies):
            for first, count in row_slices(len(copies), self._copy_buckets):
                self._copy_blocks(copies[first : first + count])
        batch = self._slots.build_batch(plan, self._token_buckets)
        size = len(batch.token_ids)
        rows, hidden, self.pool = self.programs.backbone(size)(
            self._backbone_params, self.state.last_tokens, batch, self.pool
        )
        prompts = [self._prompt_logprobs(hidden, size, wanted) for wanted in prompt_rows]
        samples = self._sample(plan, rows)
        first = sum(c.samples for c in plan.chunks)
        searches = []
        for search in plan.beams:
            searches.append(self._search(search, first, rows))
            first += search.num_chunks
        return InFlight(plan, samples, searches, prompt_rows, prompts)

    def collect(self, step: InFlight) -> StepOutput:
        """Waits for a step and brings its results to the host."""
        tokens: list[int] = []
        errors: dict[int, str] = {}
        logprobs: dict[int, RowLogprobs] = {}
        for part in step.slices:
            count = len(part.seq_ids)
            tokens += np.asarray(part.output.tokens)[:count].tolist()
            finite = np.asarray(part.output.finite)[:count]
            if not finite.all():
                wrong = [seq_id for seq_id, ok in zip(part.seq_ids, finite, strict=True) if not ok]
                errors |= dict.fromkeys(wrong, _NOT_FINITE)
            if part.wants_logprobs:
                logprobs |= zip(part.seq_ids, _logprob_rows(count, part.output.logprobs), strict=True)
        beams = []
        for search, output in zip(step.plan.beams, step.searches, strict=True):
            chunks = step.plan.chunks[search.first_chunk : search.first_chunk + search.num_chunks]
            finite = np.asarray(output.finite)
            wrong = [chunk.seq_id for chunk, ok in zip(chunks, finite, strict=False) if not ok]
            errors |= dict.fromkeys(wrong, _NOT_FINITE)
            beams.append(_candidates(output, search.num_candidates))
        self.host_pool.flush()
        prompts = [
            [row for count, part in parts for row in _logprob_rows(count, part)] for parts in step.prompt_logprobs
        ]
        return StepOutput(StepResult(step.plan.step, tokens, errors or None, beams or None), logprobs, prompts)

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        size = bucket_for(len(copies), self._copy_buckets)
        src, dst = pad(np.array(copies, np.int32), size).T
        self.pool = self.programs.copy_blocks(size)(self.pool, src, dst)

    def _search(self, search: ScheduledBeams, first: int, rows: Float[Array, "max_num_seqs features"]) -> BeamOutput:
        """Looks for continuations of the beams whose rows begin at `first`."""
        width, count = bucket_for(search.width, self._beam_buckets), search.num_chunks
        row_ids = pad(np.arange(first, first + count), width)
        logprobs = np.full(width, -np.inf, np.float32)
        logprobs[:count] = search.logprobs
        return self.programs.beams(width)(self.kernel, rows, row_ids, logprobs)

    def _apply_changes(self, plan: StepPlan, sequences: Mapping[int, TokenSequence]) -> None:
        for chunk in plan.chunks:
            if chunk.fresh:
                self._admit(chunk.slot, sequences[chunk.seq_id])
            if chunk.new_blocks:
                self._slots.extend(chunk)
            if self._min_tokens and chunk.samples and chunk.slot in self._min_tokens:
                self._lift_stop_ban(chunk.slot, chunk.start + chunk.num_tokens)

    def _admit(self, slot: int, seq: TokenSequence) -> None:
        self._slots.admit(slot, seq)
        self._min_tokens.pop(slot, None)
        params = seq.request.params
        if not params.shapes_logits:
            return
        counts = count_row(seq, self._vocab_size)
        self.state = self.programs.set_token_counts()(self.state, np.int32(slot), counts)
        if params.min_tokens:
            self._min_tokens[slot] = (seq.prompt_len + params.min_tokens, seq)
        bias = bias_row(seq, self._vocab_size, ban_stops=seq.output_len < params.min_tokens)
        self.state = self.programs.set_logit_bias()(self.state, np.int32(slot), bias)

    def _lift_stop_ban(self, slot: int, length: int) -> None:
        """Allows stop tokens at `slot` from the step on that samples at `length` tokens, when that is enough."""
        enough, seq = self._min_tokens[slot]
        if length >= enough:
            del self._min_tokens[slot]
            bias = bias_row(seq, self._vocab_size, ban_stops=False)
            self.state = self.programs.set_logit_bias()(self.state, np.int32(slot), bias)

    def _sample(self, plan: StepPlan, rows: Float[Array, "max_num_seqs features"]) -> list[SampledSlice]:
        chunks = [c for c in plan.chunks if c.samples]
        slots = np.array([c.slot for c in chunks], np.int32)
        positions = np.array([c.start + c.num_tokens for c in chunks], np.int32)
        wants = self._slots.columns["wants_logprobs"][slots]
        slices = []
        for first, count in row_slices(len(chunks), self._row_buckets):
            cut = slice(first, first + count)
            size = bucket_for(count, self._row_buckets)
            sample_rows = self._slots.build_rows(np.arange(first, first + count), slots[cut], positions[cut], size)
            output, self.state = self.programs.sample(size)(self.kernel, rows, sample_rows, self.state)
            slices.append(SampledSlice([c.seq_id for c in chunks[cut]], output, bool(wants[cut].any())))
        return slices

    def _prompt_logprobs(
        self, hidden: Float[Array, "features tokens"], size: int, wanted: PromptRows
    ) -> list[tuple[int, TokenLogprobs]]:
        num_rows = self._row_buckets[-1]
        parts = []
        for first, count in row_slices(len(wanted.targets), self._row_buckets):
            index = np.zeros(num_rows, np.int32)
            targets = np.zeros(num_rows, np.int32)
            index[:count] = np.arange(wanted.first + first, wanted.first + first + count)
            targets[:count] = wanted.targets[first : first + count]
            rows = self.programs.select_rows(size, num_rows)(hidden, index)
            parts.append((count, self.programs.prompt_logprobs(num_rows)(self.kernel, rows, targets)))
        return parts


def _candidates(output: BeamOutput, count: int) -> list[BeamCandidate]:
    columns = (np.asarray(column)[:count].tolist() for column in (output.beams, output.tokens, output.logprobs))
    return [BeamCandidate(*row) for row in zip(*columns, strict=True) if row[2] > -np.inf]


def _logprob_rows(count: int, part: TokenLogprobs) -> list[RowLogprobs]:
    columns = (part.logprob, part.rank, part.top_ids, part.top_logprobs)
    return [RowLogprobs(*row) for row in zip(*(np.asarray(c)[:count].tolist() for c in columns), strict=True)]
