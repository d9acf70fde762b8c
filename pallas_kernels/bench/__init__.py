"""Measures the kernels on the chip that is there: `python -m pallas_kernels.bench`."""
