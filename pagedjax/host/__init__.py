"""The host side of the engine as pure state machines: no jax, no numpy, no clock, no randomness, no I/O.

The same events give the same plans, byte for byte (paper sections 4.2, 4.3 and 4.5).
"""

from pagedjax.host.allocator import Admission, KVAllocator, KVUsage, PagedAllocator, PrefixStats
from pagedjax.host.beam import BeamCandidate, BeamSearch, Hypothesis
from pagedjax.host.block_pool import NULL_BLOCK, BlockPool
from pagedjax.host.block_table import BlockTable, Growth
from pagedjax.host.plan import ScheduledBeams, ScheduledChunk, SequenceUpdate, StepPlan, StepResult
from pagedjax.host.scheduler import Scheduler

__all__ = [
    "NULL_BLOCK",
    "Admission",
    "BeamCandidate",
    "BeamSearch",
    "BlockPool",
    "BlockTable",
    "Growth",
    "Hypothesis",
    "KVAllocator",
    "KVUsage",
    "PagedAllocator",
    "PrefixStats",
    "ScheduledBeams",
    "ScheduledChunk",
    "Scheduler",
    "SequenceUpdate",
    "StepPlan",
    "StepResult",
]
