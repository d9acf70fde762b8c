"""Ten thousand requests through a pool that is too small, with aborts, forks and failures: nothing leaks or grows."""

import contextlib
import gc
import random
from pathlib import Path

from host_harness import Pipeline, expected_end, make_request, paged
from log_harness import log_of, make_recorder

from pagedjax.errors import InvalidRequest, OutOfSlots
from pagedjax.replay import replay
from pagedjax.request import BeamSearchParams

NUM_REQUESTS = 10_000
NUM_BLOCKS, BLOCK_SIZE = 24, 4


class Soak:
    """Keeps some twenty requests in a scheduler, and checks every sample that ends."""

    def __init__(self, log: Path, seed: int) -> None:
        scheduler = make_recorder(
            log,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=64,
            max_num_seqs=12,
            max_num_batched_tokens=16,
            num_host_blocks=16,
            preemption="swap",
            enable_prefix_caching=True,
            watermark=0.05,
        )
        self.rng = random.Random(seed)
        self.pipeline = Pipeline(scheduler, depth=1)
        self.added = self.checked = self.forks = self.aborted = 0
        self.cut: set[int] = set()  # sequences that were aborted

    def run(self, num_requests: int) -> None:
        target = self.added + num_requests
        while self.added < target:
            while len(self.pipeline.scheduler.roster.groups) < 20 and self.added < target:
                self.add()
            self.step()

    def add(self) -> None:
        rng = self.rng
        beam = BeamSearchParams(3, 6) if rng.random() < 0.05 else None
        request = make_request(
            self.added,
            rng.randint(1, 20),
            6 if beam else rng.randint(1, 14),
            stop_ids=(0,),
            n=1 if beam or rng.random() < 0.8 else 3,
            beam=beam,
            family=rng.randrange(3) if rng.random() < 0.5 else None,
        )
        self.pipeline.add(request)
        self.added += 1

    def step(self) -> None:
        rng, scheduler = self.rng, self.pipeline.scheduler
        chance = rng.random()
        groups = list(scheduler.roster.groups.values())
        if chance < 0.05 and groups:
            group = rng.choice(groups)
            self.cut.update(seq.seq_id for seq in group.sequences)
            scheduler.abort(group.request.request_id)
            self.aborted += 1
        elif chance < 0.1 and groups:
            self.fork(rng.choice(groups))
        elif chance < 0.13:
            scheduler.preempt_latest()
        elif chance < 0.132:
            self.pipeline.fail()
        self.pipeline.step()
        scheduler.check_invariants()
        self.check_ended()

    def fork(self, parent) -> None:
        self.pipeline.read_all()
        old = parent.request
        if not parent.unfinished:
            return
        new = make_request(old.number, len(old.prompt_token_ids), 1, request_id=f"fork{self.forks}")
        new.prompt_token_ids, new.stop_ids, new.max_len = old.prompt_token_ids, old.stop_ids, old.max_len
        self.forks += 1
        with contextlib.suppress(InvalidRequest, OutOfSlots):
            self.pipeline.fork(old.request_id, new)

    def check_ended(self) -> None:
        """Compares every sample that has ended with what it is alone, and forgets it."""
        pipeline = self.pipeline
        alive = pipeline.scheduler.roster.sequences
        for seq_id in [seq_id for seq_id in pipeline.requests if seq_id not in alive]:
            request, index = pipeline.sequences[seq_id]
            output = expected_end(request, NUM_BLOCKS * BLOCK_SIZE, index, pipeline.starts.pop(seq_id, None))[0]
            found = pipeline.outputs.pop(seq_id)
            whole = pipeline.ends.pop(seq_id, "abort") in ("stop", "length")
            assert found == (output if whole else output[: len(found)])
            assert whole or seq_id in self.cut or request.width > 1
            self.cut.discard(seq_id)
            del pipeline.requests[seq_id]
            self.checked += 1
        pipeline.plans.clear()
        for name in [name for name in pipeline.searches if name not in pipeline.scheduler.roster.groups]:
            pipeline.found.pop(name, None)
            del pipeline.searches[name]
        in_flight = {seq.seq_id for flight in pipeline.scheduler._in_flight for seq in flight.sampling}
        for seq_id in pipeline.sequences.keys() - alive.keys() - in_flight:
            del pipeline.sequences[seq_id]


def num_objects() -> int:
    """Containers alive: what a leak is made of."""
    gc.collect()
    return len(gc.get_objects())


def test_ten_thousand_requests(tmp_path):
    soak = Soak(tmp_path / "log", seed=1)
    soak.run(NUM_REQUESTS // 5)
    early = num_objects()
    soak.run(NUM_REQUESTS - soak.added)
    assert num_objects() < early + 3000, "it grows"
    scheduler = soak.pipeline.scheduler
    soak.pipeline.run_to_end()
    soak.check_ended()
    assert not scheduler.has_unfinished() and scheduler.num_in_flight == 0
    assert scheduler.usage().free == NUM_BLOCKS * BLOCK_SIZE and paged(scheduler).swap_space.num_used == 0
    assert soak.checked > NUM_REQUESTS and soak.forks > 200 and soak.aborted > 200
    assert soak.pipeline.device.num_swapped_in > 1000 and scheduler.num_preemptions > 1000
    log_of(scheduler).close()
    report = replay(tmp_path / "log")
    assert report.same_plans == report.plans == scheduler.num_steps and report.requests > NUM_REQUESTS
