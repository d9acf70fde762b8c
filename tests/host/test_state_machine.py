"""Any order of events keeps every invariant, loses no block and gives every request its own tokens."""

import copy
import json
from typing import Any

from host_harness import (
    STOP,
    Pipeline,
    expected_beams,
    expected_end,
    make_request,
    make_scheduler,
    paged,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedjax.errors import BlocksInUse, InvalidRequest, OutOfSlots, RequestTooLong
from pagedjax.request import BeamSearchParams

prompt_lens = st.integers(1, 12)
output_lens = st.integers(1, 12)
families = st.sampled_from([None, 0, 1])  # requests of a family begin alike
stops = st.sampled_from([(), (STOP,), (STOP, 3, 5)])
salts = st.sampled_from([None, None, "a"])


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler over a tiny pool and the bookkeeping device, with none or one step in flight."""

    def __init__(self):
        super().__init__()
        self.num_slots = 1
        self.shape: dict[str, Any] = {"num_blocks": 1, "block_size": 1}
        self.pipeline = Pipeline(make_scheduler(**self.shape), depth=0)
        self.number = 0
        self.ended_from_outside = set()
        self.prefixes = []

    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 2, 5, 9, 24, None]),
        watermark=st.sampled_from([0.0, 0.2]),
        caching=st.booleans(),
        num_host_blocks=st.sampled_from([0, 2, 5, 20]),
        preemption=st.sampled_from(["auto", "swap", "swap", "recompute"]),
        batching=st.sampled_from(["continuous", "continuous", "static"]),
        depth=st.integers(0, 1),
    )
    def start(
        self,
        num_blocks,
        block_size,
        max_num_seqs,
        budget,
        watermark,
        caching,
        num_host_blocks,
        preemption,
        batching,
        depth,
    ):
        self.shape = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget or 24,
            "max_model_len": 24,
            "enable_chunked_prefill": budget is not None,
            "watermark": watermark,
            "enable_prefix_caching": caching,
            "num_host_blocks": num_host_blocks,
            "preemption": preemption,
            "batching": batching,
        }
        self.num_slots = num_blocks * block_size
        self.pipeline = Pipeline(make_scheduler(**self.shape), depth)

    @property
    def scheduler(self):
        return self.pipeline.scheduler

    def add_to_pipeline(self, request):
        """Adds it, if it is one that can be served; whether it is."""
        self.number += 1
        before = self.scheduler.snapshot()
        try:
            self.pipeline.add(request)
        except RequestTooLong:
            needed = min(len(request.prompt_token_ids) + 1, request.max_len - 1)
            assert needed > self.num_slots
        except InvalidRequest:
            assert request.width > min(self.shape["max_num_seqs"], self.shape["max_num_batched_tokens"])
        else:
            return True
        assert self.scheduler.snapshot() == before
        return False

    @rule(
        prompt_len=prompt_lens,
        max_tokens=output_lens,
        stop_ids=stops,
        min_tokens=st.integers(0, 3),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        family=families,
        salt=salts,
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(self, prompt_len, max_tokens, stop_ids, min_tokens, n, family, salt, prompt_logprobs):
        self.add_to_pipeline(
            make_request(
                self.number,
                prompt_len,
                max_tokens,
                stop_ids=stop_ids,
                min_tokens=min(min_tokens, max_tokens),
                n=n,
                family=family,
                salt=salt,
                prompt_logprobs=prompt_logprobs,
            )
        )

    @rule(
        prompt_len=prompt_lens,
        max_tokens=output_lens,
        stop_ids=stops,
        width=st.integers(1, 4),
        penalty=st.sampled_from([0.0, 1.0, 2.0]),
        stopping=st.sampled_from([True, False, "never"]),
        family=families,
        salt=salts,
    )
    def search(self, prompt_len, max_tokens, stop_ids, width, penalty, stopping, family, salt):
        beam = BeamSearchParams(width, max_tokens, penalty, stopping)
        self.add_to_pipeline(
            make_request(self.number, prompt_len, max_tokens, stop_ids=stop_ids, beam=beam, family=family, salt=salt)
        )

    @rule(prompt_len=prompt_lens, family=families, salt=salts)
    def register(self, prompt_len, family, salt):
        request = make_request(self.number, prompt_len, 1, family=family, salt=salt, registers_prefix=True)
        if self.add_to_pipeline(request):
            self.prefixes.append(request.request_id)

    @rule(data=st.data())
    def unregister(self, data):
        pinned = sorted(paged(self.scheduler).pins())
        if pinned:
            paged(self.scheduler).unpin(data.draw(st.sampled_from(pinned)))

    @rule(data=st.data())
    def fork(self, data):
        self.pipeline.read_all()
        groups = list(self.scheduler.roster.groups.values())
        if not groups:
            return
        parent = data.draw(st.sampled_from(groups))
        old = parent.request
        new = copy.copy(old)
        new.request_id = f"fork{self.number}"
        new.registers_prefix = False
        self.number += 1
        before = self.scheduler.snapshot()
        try:
            self.pipeline.fork(old.request_id, new)
        except InvalidRequest:
            assert parent.only is None or parent.only.done is not None
        except OutOfSlots:
            assert self.scheduler.num_running
        else:
            (child,) = self.scheduler.get(new.request_id).sequences
            assert child.index not in {
                seq.index
                for group in groups
                for seq in group.sequences
                if group.only is not None and group.arrival == parent.arrival
            }
            return
        assert self.scheduler.snapshot() == before

    @rule()
    def step(self):
        happened = self.pipeline.step()
        assert happened or not self.scheduler.has_unfinished()

    @rule(n=st.integers(2, 6))
    def steps(self, n):
        for _ in range(n):
            self.pipeline.step()
            self.scheduler.check_invariants()

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

    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop", "one"]))
    def end_from_outside(self, data, reason):
        if not self.scheduler.has_unfinished():
            return
        group = data.draw(st.sampled_from(list(self.scheduler.roster.groups.values())))
        if reason == "one" and group.beam is None:
            seq = data.draw(st.sampled_from(group.unfinished))
            self.scheduler.finish_sequence(seq.seq_id, reason, "END")
            ended = [seq]
        else:
            ended = group.unfinished
            if reason == "abort":
                self.scheduler.abort(group.request.request_id)
            else:
                self.scheduler.finish(group.request.request_id, reason, "END")
        for seq in ended:
            assert seq.finish_reason == reason or seq.done == (reason, "END")
            if group.beam is None:
                self.pipeline.ends[seq.seq_id] = reason
                self.ended_from_outside.add(seq.seq_id)

    @precondition(lambda self: self.shape.get("enable_prefix_caching"))
    @rule()
    def reset_the_cache(self):
        allocator = paged(self.scheduler)
        if allocator.pool.num_used:
            try:
                allocator.reset_prefix_cache()
            except BlocksInUse:
                return
            raise AssertionError("blocks in use were forgotten")
        allocator.reset_prefix_cache()
        assert allocator.pool.num_cached == 0

    @rule(count=st.integers(1, 3))
    def take_memory(self, count):
        for _ in range(count):
            self.scheduler.preempt_latest()

    @rule()
    def fail_a_step(self):
        self.pipeline.fail()
        assert paged(self.scheduler).pins() == {}

    @rule()
    def go_on_from_a_snapshot(self):
        data = self.scheduler.snapshot()
        scheduler = make_scheduler(**self.shape)
        scheduler.restore(json.loads(json.dumps(data)))
        assert scheduler.snapshot() == data
        assert scheduler.schedule() == copy.deepcopy(self.scheduler).schedule()
        self.pipeline.scheduler = make_scheduler(**self.shape)
        self.scheduler.restore(data)

    @invariant()
    def holds(self):
        scheduler, allocator = self.scheduler, paged(self.scheduler)
        scheduler.check_invariants()
        usage = scheduler.usage()
        assert sum(usage) == self.num_slots
        assert min(usage) >= 0
        assert usage.free == allocator.pool.num_free * self.shape["block_size"]
        held = {block for seq_id in allocator.seq_ids() for block in allocator.block_table(seq_id)}
        assert allocator.num_physical_blocks == len(held) <= allocator.num_logical_blocks
        assert all(
            self.pipeline.outputs[seq.seq_id] == seq.token_ids[seq.prompt_len :]
            for group in scheduler.roster.groups.values()
            if group.beam is None
            for seq in group.sequences
        )

    def teardown(self):
        self.pipeline.run_to_end()
        scheduler, allocator = self.scheduler, paged(self.scheduler)
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_swapped, scheduler.num_in_flight) == (
            0,
        ) * 4
        assert allocator.seq_ids() == allocator.swapped_ids() == []
        assert allocator.swap_space.num_used == 0
        for name in allocator.pins():
            allocator.unpin(name)
        assert scheduler.usage().free == self.num_slots
        assert scheduler.usage().token_states == 0
        self.check_samples()
        for request_id, found in self.pipeline.found.items():
            assert found == expected_beams(self.pipeline.searches[request_id])

    def check_samples(self):
        for seq_id, request in self.pipeline.requests.items():
            _, index = self.pipeline.sequences[seq_id]
            output, reason = expected_end(request, self.num_slots, index, self.pipeline.starts.get(seq_id))
            found, ended = self.pipeline.outputs[seq_id], self.pipeline.ends[seq_id]
            alone = request.width == 1 and not self.prefixes
            if seq_id in self.ended_from_outside or (ended == "error" and not alone):
                assert found == output[: len(found)]
            else:
                assert (found, ended) == (output, reason)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=300, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
