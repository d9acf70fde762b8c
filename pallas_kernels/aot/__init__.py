"""Compiles the kernels for chips that are not there, and reports the result: `python -m pallas_kernels.aot`."""
