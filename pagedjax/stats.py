"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedjax.host.protocol import KVAllocator, KVUsage, PrefixStats
from pagedjax.host.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was made, or since `reset_stats()`, and its state now. Seconds are of wall clock.

    Attributes:
        num_waiting: requests in the queue, now.
        num_swapped: requests whose blocks are in the swap space, now.
        num_running: sequences that hold blocks, now.
        num_steps: steps dispatched.
        prompt_tokens: prompt tokens computed, again after a preemption; not those found in the prefix cache.
        output_tokens: tokens given to requests, to each sample and each beam.
        num_preemptions: sequences that lost their blocks, swapped out or to be computed again.
        num_failed_steps: steps that an error ended, after which everything was computed again.
        host_seconds: in the scheduler, planning and updating.
        prepare_seconds: making arrays and dispatching programs.
        device_wait_seconds: waiting for results.
        output_seconds: detokenising and making outputs.
        compile_seconds: compiling programs in steps and `warmup()`; in none of the other times.
        num_compilations: programs compiled (or taken from the persistent cache).
        usage: of the pool's slots, now.
        num_blocks: usable blocks of the pool.
        peak_blocks: blocks held at most at the same time.
        kv_utilisation: mean over steps of slots holding a token's K and V / slots held; 0 before the first step.
        logical_blocks: blocks that the sequences' tables list, now; a shared one as often as it is listed.
        physical_blocks: the same, each counted once.
        saving: 1 - physical / logical, now; 0 where nothing runs.
        mean_saving: 1 - 1 / (mean over steps of logical / physical), as in the paper's Fig. 15.
        copied_blocks: blocks copied on write.
        num_host_blocks: blocks of the swap space.
        host_blocks: of these, those that hold a swapped sequence's tokens, now.
        swapped_out_blocks: blocks moved to the swap space.
        swapped_in_blocks: blocks moved back.
        cached_blocks: blocks that nobody refers to, but whose content can still be found, now.
        prefix_queries: sequences that looked for their beginning in the prefix cache when they were admitted.
        prefix_query_tokens: tokens of those.
        prefix_hits: sequences that found at least one block.
        prefix_hit_tokens: tokens that were found, and so not computed.
        prefix_evictions: cached blocks whose content was given up for others.
    """

    num_waiting: int
    num_swapped: int
    num_running: int
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    num_preemptions: int
    num_failed_steps: int
    host_seconds: float
    prepare_seconds: float
    device_wait_seconds: float
    output_seconds: float
    compile_seconds: float
    num_compilations: int
    usage: KVUsage
    num_blocks: int
    peak_blocks: int
    kv_utilisation: float
    logical_blocks: int
    physical_blocks: int
    saving: float
    mean_saving: float
    copied_blocks: int
    num_host_blocks: int
    host_blocks: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    cached_blocks: int
    prefix_queries: int
    prefix_query_tokens: int
    prefix_hits: int
    prefix_hit_tokens: int
    prefix_evictions: int


@dataclass(slots=True)
class Counters:
    """The engine's counters. The first ones are what was counted elsewhere before these began.

    Attributes:
        utilisation_sum: over steps.
        sharing_sum: over steps with something in the pool, of logical / physical blocks.
    """

    num_compilations: int
    compile_seconds: float
    num_preemptions: int
    prefix: PrefixStats
    evictions: int
    num_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    copied_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    num_failed_steps: int = 0
    host_seconds: float = 0.0
    prepare_seconds: float = 0.0
    device_wait_seconds: float = 0.0
    output_seconds: float = 0.0
    peak_slots: int = 0
    utilisation_sum: float = 0.0
    sharing_sum: float = 0.0
    num_sharing: int = 0

    @classmethod
    def begin(
        cls, num_compilations: int, compile_seconds: float, scheduler: Scheduler, allocator: KVAllocator
    ) -> Counters:
        """Counters that leave out what happened so far."""
        return cls(
            num_compilations,
            compile_seconds,
            scheduler.num_preemptions,
            replace(allocator.prefix_stats),
            allocator.occupancy().num_evictions,
        )

    def count_usage(self, usage: KVUsage, allocator: KVAllocator) -> None:
        """Takes in how the pool is used in a step."""
        held = usage.token_states + usage.reserved + usage.internal_fragmentation
        self.peak_slots = max(self.peak_slots, held)
        self.utilisation_sum += usage.token_states / held if held else 0.0
        occupancy = allocator.occupancy()
        if occupancy.physical:
            self.sharing_sum += occupancy.logical / occupancy.physical
            self.num_sharing += 1

    def stats(
        self, num_compilations: int, compile_seconds: float, scheduler: Scheduler, allocator: KVAllocator
    ) -> EngineStats:
        """What was counted since these began, and the state now."""
        occupancy = allocator.occupancy()
        logical, physical = occupancy.logical, occupancy.physical
        prefix = allocator.prefix_stats
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            num_running=scheduler.num_running,
            num_steps=self.num_steps,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            num_preemptions=scheduler.num_preemptions - self.num_preemptions,
            num_failed_steps=self.num_failed_steps,
            host_seconds=self.host_seconds,
            prepare_seconds=self.prepare_seconds,
            device_wait_seconds=self.device_wait_seconds,
            output_seconds=self.output_seconds,
            compile_seconds=compile_seconds - self.compile_seconds,
            num_compilations=num_compilations - self.num_compilations,
            usage=scheduler.usage(),
            num_blocks=allocator.num_blocks,
            peak_blocks=self.peak_slots // allocator.block_size,
            kv_utilisation=self.utilisation_sum / self.num_steps if self.num_steps else 0.0,
            logical_blocks=logical,
            physical_blocks=physical,
            saving=1 - physical / logical if logical else 0.0,
            mean_saving=1 - self.num_sharing / self.sharing_sum if self.num_sharing else 0.0,
            copied_blocks=self.copied_blocks,
            num_host_blocks=occupancy.host,
            host_blocks=occupancy.host_used,
            swapped_out_blocks=self.swapped_out_blocks,
            swapped_in_blocks=self.swapped_in_blocks,
            cached_blocks=occupancy.cached,
            prefix_queries=prefix.queries - self.prefix.queries,
            prefix_query_tokens=prefix.query_tokens - self.prefix.query_tokens,
            prefix_hits=prefix.hits - self.prefix.hits,
            prefix_hit_tokens=prefix.hit_tokens - self.prefix.hit_tokens,
            prefix_evictions=occupancy.num_evictions - self.evictions,
        )
