"""The bytes that a compiled op moves to and from main memory, counted from its tiling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pallas_kernels.bench.cases import Case
from pallas_kernels.chips import Chip
from pallas_kernels.constants import SPLIT


def moved_bytes(case: Case, temporary_bytes: int, in_place: bool, query_tokens: int = 1) -> int:
    """Bytes read from and written to main memory.

    K and V count in whole blocks as stored, once for each tile of query tokens and KV head, as far as the tile's last
    token sees: all kernels take a KV head's whole query group at a time, and caches count for nothing. Queries,
    results and tables count once; what the compiler keeps in temporary memory, the partial results of the splits
    among it, is written once and read once; an update that is not in place copies the pool.

    Args:
        case: what was compiled.
        temporary_bytes: of main memory, as the compiler says.
        in_place: all that the op updates is aliased.
        query_tokens: of one sequence, that a tile takes.
    """
    moved = case.fewest_bytes() + 2 * temporary_bytes
    if case.updated is not None and not in_place:
        moved += 2 * pool_bytes(case)
    if case.queries > 1 and case.op in ("paged_attention", "flash_attention"):
        size = case.block_size if case.op == "paged_attention" else 1
        first = case.context - case.queries
        ends = [min(first + at + query_tokens, case.context) for at in range(0, case.queries, query_tokens)]
        again = sum(-(-end // size) * size for end in ends) - -(-case.context // size) * size
        moved += case.seqs * again * _contiguous(case).token_bytes
    return moved


def pool_bytes(case: Case) -> int:
    """All pools of a case."""
    return case.num_blocks * case.block_size * case.token_bytes


def at_context(case: Case, context: int, temporary_bytes: int, skips_empty_splits: bool) -> float:
    """Moved over fewest bytes of a decode step whose sequences hold `context` tokens, in the program of `case`.

    Its temporary memory is for as many splits as the table is wide. A kernel of ours that merges them passes over those
    that a sequence has not; XLA reads them all.
    """
    short = dataclasses.replace(case, context=context)
    if skips_empty_splits:
        temporary_bytes = temporary_bytes * -(-context // SPLIT) // -(-case.context // SPLIT)
    return moved_bytes(short, temporary_bytes, True) / short.fewest_bytes()


def query_tokens(case: Case, config: Mapping[str, int] | None) -> int:
    """Query tokens of a full tile of the attention kernel with this configuration."""
    config = config or {}
    group = case.heads // case.kv_heads
    if "query_tokens" in config:  # tpu
        return config["query_tokens"]
    if "consumers" in config:  # mosaic_gpu: each takes the 64 rows of one wgmma
        return max(1, config["consumers"] * 64 // group)
    return max(1, config.get("rows", 1) // group)  # triton


def roofline_seconds(chip: Chip, case: Case, moved: int) -> float:
    """The least time that these bytes, and the op's operations at the peak of its queries' dtype, take on a chip."""
    return max(moved / chip.bandwidth, case.flops() / chip.peak_flops[case.dtype])


def _contiguous(case: Case) -> Case:
    """K and V of `flash_attention` are as wide as its queries and never quantised."""
    return dataclasses.replace(case, pool_dtype=case.dtype) if case.op == "flash_attention" else case
