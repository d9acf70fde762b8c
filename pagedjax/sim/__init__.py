"""A discrete-event simulator: the project's own scheduler and allocators, with a cost model for a device."""
