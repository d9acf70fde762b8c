"""What the chip does at best here and now: a large copy, and a large matrix product."""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp

from pallas_kernels.bench.timing import alternate

COPY_BYTES = {"cpu": 256 << 20, "gpu": 4 << 30, "tpu": 2 << 30}
MATMUL_SIZE = {"cpu": 2048, "gpu": 8192, "tpu": 8192}


def measure(dtype: str, rounds: int) -> dict[str, float]:
    """Bytes a second of a copy, what is read and what is written together; operations a second of a product in `dtype`.

    float32 is multiplied in full precision, as the kernels do.
    """
    platform = jax.default_backend()
    source = jnp.zeros(COPY_BYTES[platform] // 4, jnp.float32)
    size = MATMUL_SIZE[platform]
    matrix = jnp.ones((size, size), jnp.dtype(dtype))
    negate = jax.jit(jnp.negative)  # a copy that no compiler leaves out
    product = jax.jit(lambda x: jnp.matmul(x, x, precision="highest"))
    samples = alternate({"copy": lambda: negate(source), "matmul": lambda: product(matrix)}, rounds)
    return {
        "copy_bytes_per_second": 2 * source.nbytes / statistics.median(samples["copy"]),
        "matmul_flops_per_second": 2 * size**3 / statistics.median(samples["matmul"]),
    }
