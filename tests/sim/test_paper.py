"""The paper's Fig. 2, from the project's own scheduler and allocators: how each system uses the KV memory.

With the real lengths where they are, and with the statistics that pagedjax ships instead.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from pagedjax.sim.config import SimulationConfig
from pagedjax.sim.metrics import Summary
from pagedjax.sim.simulation import Simulation

DATA = Path(os.environ.get("PAGEDJAX_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
REAL = DATA / "sharegpt_paper_lengths.csv.gz"

# Per cent of all slots: token states, reserved, internal fragmentation, the rest.
FIG_2 = {
    "orca-max": (20.4, 13.3, 57.3, 8.9),
    "orca-pow2": (26.8, 17.9, 13.6, 41.6),
    "orca-oracle": (38.2, 25.2, 0.0, 36.6),
}


@cache
def split(system: str, data: str) -> tuple[float, float, float, float]:
    """Of the paper's recipe: seed 0, 4 requests a second, steps that end from 300 to 900 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDJAX_DATA", data)
        simulation = Simulation(SimulationConfig(allocator=system, num_blocks=982))
    assert simulation.trace.is_statistics == (not data)
    summary = Summary(982 * 16, 300.0, 900.0)
    simulator = simulation.simulator(simulation.requests(4.0), summary.on_step, summary.on_request)
    simulator.run(until=900.0)
    row = summary.row()
    rest = row["external_fragmentation"] + row["free"]
    return tuple(100 * x for x in (row["token_states"], row["reserved"], row["internal_fragmentation"], rest))


@pytest.fixture(params=[("", 4.0), (str(DATA), 2.0)], ids=["statistics", "real lengths"])
def lengths(request) -> tuple[str, float]:
    """A folder for PAGEDJAX_DATA, and how many points a cell may be off."""
    if request.param[0] and not REAL.exists():
        pytest.skip(f"the real lengths are not at hand: no {REAL.name} in PAGEDJAX_DATA")
    return request.param


@pytest.mark.parametrize("system", FIG_2)
def test_fig_2_of_orca(system, lengths):
    data, points = lengths
    assert split(system, data) == pytest.approx(FIG_2[system], abs=points)


def test_fig_2_of_paging(lengths):
    token_states, reserved, *_ = split("paged", lengths[0])
    assert 95.5 <= token_states <= 97.0 and reserved < 0.1
