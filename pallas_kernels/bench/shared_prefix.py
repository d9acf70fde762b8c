"""Whether a prefix that a whole batch shares is worth attending to once for all of it.

    python -m pallas_kernels.bench.shared_prefix [--rounds N] [--json FILE]

Decoding, every sequence has the same first blocks. "whole" is one `paged_decode` over everything, which reads the
prefix for each sequence. "merged" attends to the prefix for all queries in one product, to the rest with
`paged_decode`, and joins the two with `merge_partials`. `saves` is whole / merged: above 1, merging pays.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import merge_partials, paged_decode
from pallas_kernels.bench.arguments import writable_argument
from pallas_kernels.bench.cases import MODELS
from pallas_kernels.bench.records import format_table, provenance, write_json
from pallas_kernels.bench.timing import alternate, paired_ratio

BLOCK_SIZE = 16
REST = 128  # tokens of each sequence behind the prefix
BATCHES = (8, 32)
PREFIXES = (80, 336, 1024)  # those of the paper's Fig. 16, in whole blocks, and a long one
COLUMNS = ("model", "batch", "prefix", "rest", "whole_us", "merged_us", "saves")


def attend_to_prefix(
    q: Float[Array, "seqs heads head_dim"],
    k: Float[Array, "kv_heads tokens head_dim"],
    v: Float[Array, "kv_heads tokens head_dim"],
) -> tuple[Float[Array, "seqs heads head_dim"], Float[Array, "seqs heads"]]:
    """All queries over the same K and V: what they attend to, and the log-sum-exp of the scores."""
    seqs, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    grouped = q.reshape(seqs, kv_heads, heads // kv_heads, head_dim).transpose(1, 0, 2, 3)
    rows = grouped.reshape(kv_heads, -1, head_dim)
    highest = lax.Precision.HIGHEST
    scores = jnp.matmul(rows, k.transpose(0, 2, 1), precision=highest) * head_dim**-0.5
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.matmul(weights, v, precision=highest) / total
    lse = (peak + jnp.log(total))[..., 0]

    def by_sequence(x: Array) -> Array:
        x = x.reshape(kv_heads, seqs, heads // kv_heads, *x.shape[2:])
        return jnp.moveaxis(x, 0, 1).reshape(seqs, heads, *x.shape[3:])

    return by_sequence(out), by_sequence(lse)


def merged(
    q: Array, k_pool: Array, v_pool: Array, tables: Array, seq_lens: Array, num_shared: int
) -> Float[Array, "seqs heads head_dim"]:
    """Decoding where the first `num_shared` blocks of every table are the same."""

    def gather(pool: Array) -> Array:
        blocks = pool[tables[0, :num_shared]].transpose(1, 0, 2, 3)
        return blocks.reshape(pool.shape[1], -1, pool.shape[3])

    first = attend_to_prefix(q, gather(k_pool), gather(v_pool))
    rest = paged_decode(
        q, k_pool, v_pool, tables[:, num_shared:], seq_lens - num_shared * k_pool.shape[2], return_lse=True
    )
    outs, lses = (jnp.stack(pair) for pair in zip(first, rest, strict=True))
    return merge_partials(outs, lses)[0]


def arguments(model: str, batch: int, prefix: int) -> tuple[Array, ...]:
    """Queries, pools, tables and lengths of one case, float32."""
    heads, kv_heads, head_dim = MODELS[model]
    shared, own = prefix // BLOCK_SIZE, REST // BLOCK_SIZE
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    pool = (1 + shared + batch * own, kv_heads, BLOCK_SIZE, head_dim)
    q = jax.random.normal(keys[0], (batch, heads, head_dim))
    k_pool, v_pool = (jax.random.normal(key, pool) for key in keys[1:])
    first = jnp.broadcast_to(jnp.arange(1, 1 + shared), (batch, shared))
    rest = 1 + shared + jnp.arange(batch * own).reshape(batch, own)
    tables = jnp.concatenate([first, rest], axis=1).astype(jnp.int32)
    return q, k_pool, v_pool, tables, jnp.full(batch, prefix + REST, jnp.int32)


def measure(model: str, batch: int, prefix: int, rounds: int) -> dict[str, object]:
    """The row of one case; both ways are compared first."""
    given = arguments(model, batch, prefix)
    ways = {
        "whole": jax.jit(paged_decode),
        "merged": jax.jit(partial(merged, num_shared=prefix // BLOCK_SIZE)),
    }
    results = {name: way(*given) for name, way in ways.items()}
    error = jnp.linalg.norm(results["whole"] - results["merged"]) / jnp.linalg.norm(results["whole"])
    assert error < 1e-5, f"the two ways differ by {error}"
    samples = alternate({name: partial(way, *given) for name, way in ways.items()}, rounds)
    return {
        "model": model,
        "batch": batch,
        "prefix": prefix,
        "rest": REST,
        **{f"{name}_us": statistics.median(times) * 1e6 for name, times in samples.items()},
        "saves": paired_ratio(samples["whole"], samples["merged"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench.shared_prefix")
    parser.add_argument("--rounds", type=int, choices=range(1, 1000), default=15, metavar="INT", help="samples (15)")
    parser.add_argument("--json", type=writable_argument, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(argv)
    cases = itertools.product(MODELS, BATCHES, PREFIXES)
    rows = [measure(model, batch, prefix, options.rounds) for model, batch, prefix in cases]
    print(format_table(rows, COLUMNS))
    if options.json:
        kind = jax.devices()[0].device_kind
        write_json(options.json, {"provenance": provenance(), "device": kind, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
