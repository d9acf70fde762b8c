"""Any order of events keeps every invariant, loses no block and gives every request its own tokens."""

import copy
import json
from typing import Any

from host_harness import STOP, Pipeline, expected_end, make_request, make_scheduler
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedjax.errors import RequestTooLong


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler over a tiny pool and the bookkeeping device, with none or one step in flight."""

    def __init__(self):
        super().__init__()
        self.num_slots = 1
        self.shape: dict[str, Any] = {"num_blocks": 1, "block_size": 1}
        self.pipeline = Pipeline(make_scheduler(**self.shape), depth=0)
        self.number = 0
        self.ended_from_outside = set()

    @initialize(
        num_blocks=st.integers(1, 10),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 2, 5, 9, 24, None]),
        watermark=st.sampled_from([0.0, 0.2]),
        depth=st.integers(0, 1),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, watermark, depth):
        self.shape = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget or 24,
            "max_model_len": 24,
            "enable_chunked_prefill": budget is not None,
            "watermark": watermark,
        }
        self.num_slots = num_blocks * block_size
        self.pipeline = Pipeline(make_scheduler(**self.shape), depth)

    @rule(
        prompt_len=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        stop_ids=st.sampled_from([(), (STOP,), (STOP, 3, 5)]),
        min_tokens=st.integers(0, 3),
    )
    def add(self, prompt_len, max_tokens, stop_ids, min_tokens):
        request = make_request(
            self.number, prompt_len, max_tokens, stop_ids=stop_ids, min_tokens=min(min_tokens, max_tokens)
        )
        self.number += 1
        before = self.pipeline.scheduler.num_waiting
        try:
            self.pipeline.add(request)
        except RequestTooLong:
            assert min(prompt_len + 1, request.max_len - 1) > self.num_slots
            assert self.pipeline.scheduler.num_waiting == before

    @rule()
    def step(self):
        happened = self.pipeline.step()
        assert happened or not self.pipeline.scheduler.has_unfinished()

    @rule(n=st.integers(2, 6))
    def steps(self, n):
        for _ in range(n):
            self.pipeline.step()
            self.pipeline.scheduler.check_invariants()

    @rule(data=st.data(), fails=st.booleans())
    def read_back(self, data, fails):
        if not self.pipeline.results:
            return
        sampling = self.sampling()
        if fails and sampling:
            seq_id = data.draw(st.sampled_from(sampling))
            self.ended_from_outside.add(seq_id)
            self.pipeline.results[0] = self.pipeline.results[0]._replace(errors={seq_id: "not finite"})
        self.pipeline.read_back()

    def sampling(self):
        """Sequences that sample in the oldest step in flight."""
        step = self.pipeline.results[0].step
        return [chunk.seq_id for chunk in self.pipeline.plans[step].chunks if chunk.samples]

    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop"]))
    def end_from_outside(self, data, reason):
        scheduler = self.pipeline.scheduler
        if not scheduler.has_unfinished():
            return
        request_id = data.draw(st.sampled_from(sorted(scheduler._groups)))
        (seq,) = scheduler.get(request_id).sequences
        if reason == "abort":
            scheduler.abort(request_id)
        else:
            scheduler.finish(request_id, reason, "END")
        assert seq.finish_reason == reason
        self.pipeline.ends[seq.seq_id] = reason
        self.ended_from_outside.add(seq.seq_id)

    @rule()
    def go_on_from_a_snapshot(self):
        data = self.pipeline.scheduler.snapshot()
        scheduler = make_scheduler(**self.shape)
        scheduler.restore(json.loads(json.dumps(data)))
        assert scheduler.snapshot() == data
        assert scheduler.schedule() == copy.deepcopy(self.pipeline.scheduler).schedule()
        self.pipeline.scheduler = make_scheduler(**self.shape)
        self.pipeline.scheduler.restore(data)

    @invariant()
    def holds(self):
        scheduler = self.pipeline.scheduler
        scheduler.check_invariants()
        assert sum(scheduler.usage()) == self.num_slots
        assert min(scheduler.usage()) >= 0
        assert all(
            self.pipeline.outputs[seq.seq_id] == seq.token_ids[seq.prompt_len :]
            for group in scheduler._groups.values()
            for seq in group.sequences
        )

    def teardown(self):
        self.pipeline.run_to_end()
        scheduler = self.pipeline.scheduler
        assert scheduler.usage().free == self.num_slots
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight) == (0, 0, 0)
        assert scheduler.allocator.seq_ids() == []
        for seq_id, request in self.pipeline.requests.items():
            output, reason = expected_end(request, self.num_slots)
            found = self.pipeline.outputs[seq_id]
            if seq_id in self.ended_from_outside:
                assert found == output[: len(found)]
            else:
                assert (found, self.pipeline.ends[seq_id]) == (output, reason)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
