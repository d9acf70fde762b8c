"""The buddy allocator against a bitmap."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedjax.baselines.buddy import BuddyAllocator
from pagedjax.errors import ConfigError, DoubleFree, InvariantError, OutOfBlocks, SnapshotError


class BuddyMachine(RuleBasedStateMachine):
    """A bitmap says which blocks are taken; a chunk can be had if and only if an aligned run of it is free."""

    @initialize(num_blocks=st.integers(1, 70), max_order=st.integers(0, 6))
    def start(self, num_blocks, max_order):
        self.size, self.max_order = num_blocks, max_order
        self.buddies = BuddyAllocator(num_blocks, max_order)
        self.taken = [False] * num_blocks
        self.chunks: list[list[int]] = []
        self.empty = self.buddies.snapshot(), [list(offsets) for offsets in self.buddies._free]

    def runs(self, order):
        """Offsets of the aligned runs of 2**order free blocks."""
        step = 1 << order
        starts = range(0, self.size - step + 1, step)
        return [start for start in starts if not any(self.taken[start : start + step])]

    @rule(order=st.integers(0, 6))
    def allocate(self, order):
        possible = self.runs(order) if order <= self.max_order else []
        before = self.buddies.snapshot()
        try:
            blocks = self.buddies.allocate(order)
        except OutOfBlocks:
            assert not possible
            assert self.buddies.snapshot() == before
            return
        assert blocks == list(range(blocks[0], blocks[0] + (1 << order)))
        assert blocks[0] - 1 in possible
        for block in blocks:
            self.taken[block - 1] = True
        self.chunks.append(blocks)

    @precondition(lambda self: getattr(self, "chunks", None))
    @rule(data=st.data())
    def free(self, data):
        blocks = self.chunks.pop(data.draw(st.integers(0, len(self.chunks) - 1)))
        self.buddies.free(blocks[0])
        for block in blocks:
            self.taken[block - 1] = False
        with pytest.raises(DoubleFree):
            self.buddies.free(blocks[0])

    @rule()
    def go_on_from_a_snapshot(self):
        other = BuddyAllocator(self.size, self.max_order)
        other.restore(self.buddies.snapshot())
        assert other._free == self.buddies._free
        self.buddies = other

    @invariant()
    def holds(self):
        if not hasattr(self, "buddies"):
            return
        self.buddies.check_invariants()
        assert self.buddies.num_free == self.taken.count(False)
        assert self.buddies.num_chunks == len(self.chunks)
        largest = max((1 << order for order in range(self.max_order + 1) if self.runs(order)), default=0)
        assert self.buddies.largest_free() == largest

    def teardown(self):
        if hasattr(self, "buddies"):
            for blocks in self.chunks:
                self.buddies.free(blocks[0])
            assert (self.buddies.snapshot(), self.buddies._free) == self.empty, "not all neighbours were joined"


TestBuddies = BuddyMachine.TestCase
TestBuddies.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def test_a_pool_that_is_no_power_of_two_is_cut_into_aligned_chunks():
    buddies = BuddyAllocator(982, 7)  # the paper's OPT-13B: 7 x 128 + 64 + 16 + 4 + 2
    assert [len(buddies.allocate(7)) for _ in range(7)] == [128] * 7
    with pytest.raises(OutOfBlocks, match="a run of 128 blocks was asked for, but the largest free one of 982 has 64"):
        buddies.allocate(7)
    assert buddies.num_free == 86 and buddies.num_free_below(7) == 86 and buddies.num_free_below(4) == 6


def test_orders_are_rounded_up():
    buddies = BuddyAllocator(64, 6)
    assert [buddies.order_for(count) for count in (1, 2, 3, 4, 5, 33, 64)] == [0, 1, 2, 2, 3, 6, 6]


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="num_blocks=0 is not allowed"):
        BuddyAllocator(0, 1)
    with pytest.raises(DoubleFree, match="no chunk that was handed out begins with block 3"):
        BuddyAllocator(8, 3).free(3)
    for damage in ({"num_blocks": 9}, {"taken": [[1, 1]]}, {"taken": [[0, 1], [0, 0]]}, {"taken": None}):
        with pytest.raises(SnapshotError):
            BuddyAllocator(8, 3).restore({"num_blocks": 8, "max_order": 3, "taken": [], **damage})
    buddies = BuddyAllocator(8, 3)
    buddies._free[0].append(3)
    with pytest.raises(InvariantError, match="a block is in two chunks or in none"):
        buddies.check_invariants()
