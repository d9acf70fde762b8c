"""A run that is killed at any moment goes on from its last snapshot to the tokens that it would have given."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import killed_run
import pytest
from engine_harness import Runs, drain

from pagedjax.engine import Engine
from pagedjax.replay import replay
from pagedjax.snapshots import list_snapshots

NUM_KILLS = 20
_rng = random.Random(5)
MOMENTS = [(_rng.randint(6, killed_run.NUM_STEPS), killed_run.MOMENTS[kill % 5]) for kill in range(NUM_KILLS)]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return killed_run.load()


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs) -> dict[str, list[list[int]]]:
    engine = killed_run.begin(runs)
    done = {out.request_id: [c.token_ids for c in out.outputs] for out in drain(engine) if out.finished}
    assert engine.stats().num_preemptions and engine.stats().num_steps >= killed_run.NUM_STEPS
    return done


@pytest.mark.parametrize(("step", "moment"), MOMENTS)
def test_kill_and_resume(
    runs: Runs, uninterrupted: dict[str, list[list[int]]], tmp_path: Path, step: int, moment: str
) -> None:
    program = [sys.executable, killed_run.__file__, str(tmp_path), str(step), moment]
    killed = subprocess.run(program, capture_output=True, text=True, cwd=Path(killed_run.__file__).parent)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list_snapshots(tmp_path / "snapshots")
    if moment == killed_run.SNAPSHOT:
        assert list((tmp_path / "snapshots").glob(".unfinished-*")) or len(list_snapshots(tmp_path / "snapshots")) > 1
    kept = [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()]
    engine = runs.share(Engine.restore(tmp_path / "snapshots", model=runs.model, progress=False))
    done = dict(kept) | {out.request_id: [c.token_ids for c in out.outputs] for out in drain(engine) if out.finished}
    assert done == uninterrupted
    stats = engine.stats()
    assert (stats.usage.free, stats.host_blocks, stats.num_running) == (engine.pool_info.num_slots, 0, 0)
    report = replay(tmp_path / "events.jsonl", check_invariants=True)  # of the run that was killed and of the one after
    assert report.runs == 2 and report.same_plans == report.plans > 30
