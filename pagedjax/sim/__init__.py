"""A discrete-event simulator: the project's own scheduler and allocators, with a cost model for a device."""

from pagedjax.sim.config import SimulationConfig
from pagedjax.sim.simulation import Simulation

__all__ = ["Simulation", "SimulationConfig"]
