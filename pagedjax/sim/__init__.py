"""A discrete-event simulator: the project's own scheduler and allocators, with a cost model for a device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedjax.sim.config import SimulationConfig
    from pagedjax.sim.simulation import Simulation

_MODULE_OF = {"Simulation": "simulation", "SimulationConfig": "config"}

__all__ = ["Simulation", "SimulationConfig"]


def __getattr__(name: str) -> object:
    # Late, as hardware brings JAX along, which whoever only reads traces can do without.
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pagedjax.sim' has no attribute {name!r}")
    return getattr(import_module(f"pagedjax.sim.{_MODULE_OF[name]}"), name)
