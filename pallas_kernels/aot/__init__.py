"""Compiles the kernels for chips that are not there, and says what their compilers say: `python -m pallas_kernels.aot`."""
