"""A run of the tiny model that is killed: `killed_run.py FOLDER STEP MOMENT`, in a process of its own.

Every output that comes is appended to FOLDER/outputs.jsonl before the next step, as a user would keep them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from engine_harness import TINY, Runs

from pagedjax import faults
from pagedjax.device.compilation_cache import use_compilation_cache
from pagedjax.engine import Engine
from pagedjax.models.llama import init_params
from pagedjax.models.loader import LoadedModel
from pagedjax.request import BeamSearchParams, SamplingParams
from pagedjax.snapshots import files

PARAMS: list[Any] = [
    SamplingParams(n=3, max_tokens=18, temperature=1.0, seed=5, ignore_eos=True),
    BeamSearchParams(beam_width=3, max_tokens=12),
    SamplingParams(max_tokens=20, temperature=0.9, seed=9, repetition_penalty=1.3),
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=22, temperature=1.0, seed=2, ignore_eos=True),
]
SNAPSHOT = "snapshot"
MOMENTS = (*faults.MOMENTS, SNAPSHOT)
NUM_STEPS = 40  # that it takes, or more
CONFIG = {"num_blocks": 26, "preemption": "swap", "swap_space": 1 << 20, "enable_prefix_caching": True}


def load() -> Runs:
    """The model, and how engines of it are made."""
    return Runs(LoadedModel(TINY, init_params(TINY, seed=0), None, {"name": "random"}))


def begin(runs: Runs, **config: Any) -> Engine:
    """An engine with all requests."""
    engine = runs.engine(**CONFIG, **config)
    prompts = runs.prompts(13, 16, 7, 21, 9)
    for prompt, params in zip(prompts, PARAMS, strict=True):
        engine.add_request({"prompt_token_ids": prompt}, params)
    return engine


def kill_in_snapshot(step: int) -> None:
    """Kills this process while the snapshot of that step, or the first behind it, is being written."""
    sync, calls = files._sync, 0

    def counted(path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 * step:  # each snapshot has some 12 files, and one is made every 4 steps
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)

    files._sync = counted


def main(folder: Path, step: int, moment: str) -> None:
    """Runs until it is killed."""
    use_compilation_cache()
    engine = begin(load(), event_log=folder / "events.jsonl", snapshot_path=folder / "snapshots", snapshot_every=4)
    if moment == SNAPSHOT:
        kill_in_snapshot(step)
    else:
        faults.kill_in_step(engine, step, moment)
    with (folder / "outputs.jsonl").open("a") as file:
        while engine.has_unfinished():
            for output in engine.step():
                if output.finished:
                    row = [output.request_id, [completion.token_ids for completion in output.outputs]]
                    file.write(json.dumps(row) + "\n")
                    file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
