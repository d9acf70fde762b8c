"""The seed's example and the paper's Figs. 3, 6 and 8, step by step, on the real kernels and allocators.

- `attention`: 10 tokens in blocks of 4. Raw scores block by block, one softmax over all, V weighted block by block, is
  standard attention (float64); and so is `paged_decode` (float32) through a table whose blocks lie anywhere, while all
  that the table does not name is NaN. Beside it, what goes wrong: a softmax for each block, and the seed's equation.
- `token`: the score and the weight of each token, and its weight by the seed's equation.
- `state`: a sequence's blocks through the four steps of the seed's table: prefill, decode, a full block, the end.
- `waste`: the unfilled end of the last block for sequences of 1 to 64 tokens in blocks of 16.
- `fig3`, `fig6`, `fig8`: what Orca (Max) reserves, a prompt of 7 tokens in blocks of 4, and two samples of it.

The paper's equation 4 divides by the sum over blocks t of exp(q K_t 1 / sqrt(d)), where the 1 is a vector of ones that
sums within a block, up to block ceil(i / B) of the query token i. The seed's copy lacks the ones and sums up to block
ceil(T / B). A block's exp is a row of B numbers then, and the quotient is taken number by number: each of the B places
has a softmax of its own, so that all weights together are B and not 1. And a query before the last one sees later
blocks; of a decode, whose query is the last token, this is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from experiments.frame import Claim
from pagedjax.baselines import make_allocator
from pagedjax.config import CacheConfig, require
from pagedjax.host.allocator import PagedAllocator
from pagedjax.request import Request, SamplingParams, Sequence
from pagedjax.scalars import is_int
from pallas_kernels import paged_decode

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = np.ndarray
BACKENDS = ("reference", "xla")
EXACT = 1e-12  # of float64, over a dozen tokens
CLOSE = 1e-6  # of float32
WASTE_BLOCK, WASTE_TOKENS = 16, 64


@dataclass(frozen=True, slots=True)
class Config:
    """The example's numbers; the paper's figures are as they are.

    Attributes:
        num_tokens: T, tokens of the sequence.
        block_size: B, tokens of a block.
        head_dim: d, of the one head.
        query: i, the token whose query is looked at where it is not the last one; counted from 1.
        seed: of the random query, K and V.
    """

    num_tokens: int = 10
    block_size: int = 4
    head_dim: int = 8
    query: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_tokens", "block_size", "head_dim", "query"):
            require(is_int(getattr(self, name), 1), name, getattr(self, name), "an integer of at least 1")
        size = self.block_size
        require(size & (size - 1) == 0, "block_size", size, "a power of two")
        require(self.query <= self.num_tokens, "query", self.query, f"at most num_tokens={self.num_tokens}")
        require(is_int(self.seed, 0), "seed", self.seed, "an integer of at least 0")


CPU_SET = [Config()]


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Records of all parts; those of one part have the same columns."""
    yield from attention(config)
    yield from states(config)
    for tokens in range(1, WASTE_TOKENS + 1):
        allocator, sequence = _admitted(tokens, WASTE_BLOCK)
        yield {"part": "waste", "tokens": tokens, "waste": _usage(allocator, sequence).internal_fragmentation}
    yield from fig3()
    yield from fig6()
    yield from fig8()


# ------------------------------------------------------------------ attention


def attention(config: Config) -> Iterator[dict[str, Any]]:
    """How far each way is from standard attention, and the sum of its weights."""
    rng = np.random.default_rng(config.seed)
    q = rng.standard_normal(config.head_dim)
    k, v = rng.standard_normal((2, config.num_tokens, config.head_dim))
    blocks = [slice(i, i + config.block_size) for i in range(0, config.num_tokens, config.block_size)]

    scores = k @ q / np.sqrt(config.head_dim)
    weights = _softmax(scores)
    right = weights @ v

    # The seed's three steps.
    by_block = [k[block] @ q / np.sqrt(config.head_dim) for block in blocks]
    whole = _softmax(np.concatenate(by_block))
    paged = sum(whole[block] @ v[block] for block in blocks)
    yield _way("three steps", paged, right, whole)

    local = np.concatenate([_softmax(part) for part in by_block])
    yield _way("a softmax for each block", local @ v, right, local)
    printed = seed_weights(by_block)
    yield _way("the seed's equation", printed @ v, right, printed)
    corrected = [np.exp(part) / sum(np.exp(other) @ np.ones(len(other)) for other in by_block) for part in by_block]
    yield _way("the paper's equation", np.concatenate(corrected) @ v, right, np.concatenate(corrected))

    seen = slice(0, config.query)
    causal = _softmax(scores[seen])
    yield _way("up to block ceil(T/B), an earlier query", right, causal @ v[seen], weights)

    for backend in BACKENDS:
        yield _way(f"paged_decode, {backend}", _through_a_table(q, k, v, config, backend), right, None)
    for token, (score, weight, other) in enumerate(zip(scores, weights, printed, strict=True)):
        yield {
            "part": "token",
            "token": token,
            "block": token // config.block_size,
            "score": float(score),
            "weight": float(weight),
            "seed_weight": float(other),
        }


def seed_weights(scores: list[Rows]) -> Rows:
    """The seed's equation as it is printed, of the scores of each block: exps are divided place by place."""
    size = len(scores[0])
    total = sum(np.pad(np.exp(part), (0, size - len(part))) for part in scores)
    return np.concatenate([np.exp(part) / total[: len(part)] for part in scores])


def _softmax(scores: Rows) -> Rows:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def _way(way: str, ours: Rows, right: Rows, weights: Rows | None) -> dict[str, Any]:
    return {
        "part": "attention",
        "way": way,
        "error": float(np.linalg.norm(ours - right) / np.linalg.norm(right)),
        "total_weight": None if weights is None else float(weights.sum()),
    }


def _through_a_table(q: Rows, k: Rows, v: Rows, config: Config, backend: str) -> Rows:
    """Our kernel, one head; K and V in blocks in an order that is no order, and NaN wherever the sequence is not."""
    size, count = config.block_size, -(-config.num_tokens // config.block_size)
    num_blocks = 2 * count + 3
    table = 1 + np.random.default_rng(config.seed + 1).permutation(num_blocks - 1)[:count]
    pools = np.full((2, num_blocks, 1, size, config.head_dim), np.nan, np.float32)
    for token in range(config.num_tokens):
        pools[:, table[token // size], 0, token % size] = k[token], v[token]
    out = paged_decode(
        jnp.asarray(q, jnp.float32)[None, None],
        *map(jnp.asarray, pools),
        jnp.asarray(table, jnp.int32)[None],
        jnp.array([config.num_tokens], jnp.int32),
        backend=backend,
    )
    return np.asarray(out[0, 0], np.float64)


# ------------------------------------------------------------------ blocks


def states(config: Config) -> Iterator[dict[str, Any]]:
    """The four steps of the seed's table; decoding goes on until the last block is full."""
    allocator, sequence = _admitted(config.num_tokens, config.block_size)
    table = allocator.block_table(sequence.seq_id)
    yield _state("state", "prefill", allocator, sequence, len(table), 0)
    while sequence.num_computed < len(table) * config.block_size:
        yield _grown("state", "decode", allocator, sequence)
    yield _grown("state", "full block", allocator, sequence)
    held = allocator.num_blocks_of(sequence.seq_id)
    allocator.free(sequence)
    allocator.check_invariants()
    yield {
        "part": "state",
        "event": "end",
        "tokens": 0,
        "blocks": 0,
        "filled": "",
        "new_blocks": -held,
        "copies": 0,
        "free": allocator.pool.num_free,
        "free_at_first": allocator.num_blocks,
    }


def fig3() -> Iterator[dict[str, Any]]:
    """Request A: 7 tokens and one generated, 2 to come, up to 2048. B: 3 and one, one to come, up to 512."""
    for name, prompt_len, end, limit in (("A", 7, 10, 2048), ("B", 3, 5, 512)):
        allocator = make_allocator(CacheConfig(4, limit // 4, watermark=0.0, allocator="orca-max"), limit)
        (sequence,) = _sequences(prompt_len, end - prompt_len)
        allocator.admit([sequence], alone=True)
        sequence.num_computed = prompt_len + 1
        usage = allocator.usage({sequence.seq_id: sequence.num_computed})
        yield {
            "part": "fig3",
            "request": name,
            "limit": limit,
            "tokens": usage.token_states,
            "future": usage.reserved,
            "never_used": usage.internal_fragmentation,
        }


def fig6() -> Iterator[dict[str, Any]]:
    """A prompt of 7 tokens in blocks of 4, and the two tokens behind it."""
    allocator, sequence = _admitted(7, 4)
    yield _state("fig6", "prompt", allocator, sequence, allocator.num_blocks_of(sequence.seq_id), 0)
    yield _grown("fig6", "token 8", allocator, sequence)
    yield _grown("fig6", "token 9", allocator, sequence)


def fig8() -> Iterator[dict[str, Any]]:
    """Two samples of a prompt of 7 tokens: both write their 8th token into its last block."""
    allocator = PagedAllocator(CacheConfig(4, 16, watermark=0.0))
    samples = _sequences(7, 8, n=2)
    allocator.admit(samples, alone=True)
    for sample in samples:
        sample.num_computed = 7
    shared = allocator.block_table(samples[0].seq_id)[-1]
    yield _writing("shared", allocator, shared, None)
    for sample, event in zip(samples, ("first writer", "second writer"), strict=True):
        copies = len(allocator.grow(sample, 8).copies)
        sample.num_computed = 8
        yield _writing(event, allocator, shared, allocator.block_table(sample.seq_id)[-1]) | {"copies": copies}
    allocator.check_invariants()


def _writing(event: str, allocator: PagedAllocator, shared: int, own: int | None) -> dict[str, Any]:
    return {
        "part": "fig8",
        "event": event,
        "copies": 0,
        "references": allocator.pool.ref_count(shared),
        "in_place": None if own is None else own == shared,
    }


def _sequences(prompt_len: int, max_tokens: int, n: int = 1) -> list[Sequence]:
    """Those of one request, not computed yet."""
    prompt = tuple(range(1, prompt_len + 1))
    params = SamplingParams(n=n, max_tokens=max_tokens)
    request = Request("r", 0, prompt, params, 0, frozenset(), prompt_len + max_tokens)
    return [Sequence(index, request, index, list(prompt)) for index in range(n)]


def _admitted(prompt_len: int, block_size: int) -> tuple[PagedAllocator, Sequence]:
    """A sequence whose prompt is computed."""
    allocator = PagedAllocator(CacheConfig(block_size, prompt_len // block_size + 8, watermark=0.0))
    (sequence,) = _sequences(prompt_len, 2 * block_size)
    allocator.admit([sequence], alone=True)
    sequence.num_computed = prompt_len
    return allocator, sequence


def _usage(allocator: PagedAllocator, sequence: Sequence) -> Any:
    return allocator.usage({sequence.seq_id: sequence.num_computed})


def _grown(part: str, event: str, allocator: PagedAllocator, sequence: Sequence) -> dict[str, Any]:
    """The state behind one more token."""
    growth = allocator.grow(sequence, sequence.num_computed + 1)
    sequence.num_computed += 1
    return _state(part, event, allocator, sequence, len(growth.new_blocks), len(growth.copies))


def _state(
    part: str, event: str, allocator: PagedAllocator, sequence: Sequence, new_blocks: int, copies: int
) -> dict[str, Any]:
    """How far each block of the table is filled; what is said of the tokens and what is free must fit together."""
    size, count = allocator.block_size, allocator.num_blocks_of(sequence.seq_id)
    filled = [min(size, sequence.num_computed - index * size) for index in range(count)]
    usage = _usage(allocator, sequence)
    assert usage.token_states == sum(filled) and usage.internal_fragmentation == count * size - sum(filled)
    return {
        "part": part,
        "event": event,
        "tokens": sequence.num_computed,
        "blocks": count,
        "filled": " ".join(map(str, filled)),
        "new_blocks": new_blocks,
        "copies": copies,
        "free": allocator.pool.num_free,
        "free_at_first": allocator.num_blocks,
    }


# ------------------------------------------------------------------ what comes of it


def plot(records: pd.DataFrame) -> Figure:
    """The weights of the tokens by block, and the blocks through the four steps."""
    from experiments.frame.plots import CYCLE, new_figure

    figure, (left, right) = new_figure(columns=2)
    tokens = records[records.part == "token"]
    for token, block, weight, other in zip(tokens.token, tokens.block, tokens.weight, tokens.seed_weight, strict=True):
        left.bar(token, weight, color=CYCLE[int(block) % len(CYCLE)])
        left.plot(token, other, "x", color="black")
    left.set(xlabel="token (colour: block)", ylabel="weight", title="bars: softmax; crosses: the seed's equation")
    _draw_states(right, records[records.part == "state"])
    return figure


def _draw_states(axes: Axes, steps: pd.DataFrame) -> None:
    """Filled slots, block upon block."""
    from experiments.frame.plots import CYCLE

    names = []
    for place, (event, tokens, filled) in enumerate(zip(steps.event, steps.tokens, steps.filled, strict=True)):
        bottom = 0
        for block, slots in enumerate(map(int, filled.split())):
            axes.bar(place, slots, bottom=bottom, color=CYCLE[block % len(CYCLE)], edgecolor="white", lw=0.5)
            bottom += slots
        names.append(f"{event}\n{int(tokens)}")
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set(xlabel="step, tokens", ylabel="filled slots", title="colour: block of the table")


def claims(records: pd.DataFrame) -> list[Claim]:
    """Of the seed's example and of the paper's; all exact."""
    default = Config()
    for name in Config.__dataclass_fields__:
        records = records[records[name] == getattr(default, name)]
    return [*_attention_claims(records), *_block_claims(records), *_figure_claims(records)]


def _attention_claims(records: pd.DataFrame) -> list[Claim]:
    def error(way: str) -> float | None:
        return _value(records, "error", part="attention", way=way)

    kernels = [error(f"paged_decode, {backend}") for backend in BACKENDS]
    relative = "norm of the difference over that of standard attention"
    return [
        Claim(
            "scores by block, one softmax over all, V by block: standard attention",
            "seed",
            error("three steps"),
            0,
            EXACT,
            seed="mathematically the same",
            how=f"float64; {relative}",
        ),
        Claim(
            "PagedAttention through blocks that lie anywhere is standard attention",
            "section 4.1",
            None if None in kernels else max(kernels),  # type: ignore[type-var]
            0,
            CLOSE,
            seed="mathematically the same",
            how=f"paged_decode ({', '.join(BACKENDS)}) in float32, NaN in all other slots; {relative}",
        ),
        Claim(
            "equation 4, with the vector of ones, is standard attention",
            "section 4.1",
            error("the paper's equation"),
            0,
            EXACT,
            paper="equation 4",
            how=f"float64; {relative}",
        ),
        Claim(
            "by the seed's equation, which sums over blocks and not within them, all weights are 1 together",
            "seed",
            _value(records, "total_weight", part="attention", way="the seed's equation"),
            1 - EXACT,
            1 + EXACT,
            paper="1 (a vector of ones sums within a block)",
            seed="sum over l = 1 to ceil(T/B) of exp(q K_l)",
            how="float64, exps divided place by place",
        ),
        Claim(
            "for query token 5 of 10, a sum up to block ceil(T/B) is one up to block ceil(i/B)",
            "seed",
            error("up to block ceil(T/B), an earlier query"),
            0,
            EXACT,
            paper="up to ceil(i/B)",
            seed="up to ceil(T/B)",
            how=f"float64; {relative}, which sees no later token",
        ),
    ]


def _block_claims(records: pd.DataFrame) -> list[Claim]:
    part = records.get("part", records.index)  # without records there is no such column
    steps, waste = records[part == "state"], records[part == "waste"]
    how = "PagedAllocator"
    return [
        Claim(
            "10 tokens in blocks of 4 are 3 blocks",
            "seed",
            _value(records, "blocks", part="state", event="prefill"),
            3,
            3,
            seed="3 blocks, of 4, 4 and 2 tokens",
            unit="blocks",
            how=how,
        ),
        Claim(
            "the last of the 3 blocks holds 2 tokens",
            "seed",
            _last_filled(records, part="state", event="prefill"),
            2,
            2,
            seed="tokens 8 and 9 (not full)",
            unit="tokens",
            how=how,
        ),
        Claim(
            "block states in the seed's four steps (rows of its table that hold)",
            "seed",
            None if steps.empty else sum(_rows_that_hold(steps)),
            4,
            4,
            seed="N blocks; last one + 1; a new block; all released",
            unit="rows",
            how=how,
        ),
        Claim(
            "a sequence wastes at most block_size - 1 slots, in blocks of 16 (the most of any length)",
            "seed",
            None if waste.empty else float(waste.waste.max()),
            15,
            15,
            paper="less than one block",
            seed="15 tokens",
            unit="slots",
            how=f"{how}, sequences of 1 to {WASTE_TOKENS} tokens",
        ),
    ]


def _rows_that_hold(steps: pd.DataFrame) -> Iterator[bool]:
    """For each row of the seed's table, whether the steps did that."""
    by_event = {event: list(some.itertuples()) for event, some in steps.groupby("event", sort=False)}
    (prefill,), decodes, (full,), (end,) = (
        by_event.get(name, [None]) for name in ("prefill", "decode", "full block", "end")
    )
    if None in (prefill, full, end, *decodes):
        return
    yield prefill.new_blocks == prefill.blocks == -(-prefill.tokens // prefill.block_size)
    lasts = [int(step.filled.split()[-1]) for step in (prefill, *decodes)]
    yield all(step.new_blocks == 0 for step in decodes) and np.diff(lasts).tolist() == [1] * len(decodes)
    yield full.new_blocks == 1 and full.blocks == prefill.blocks + 1 and full.filled.split()[-1] == "1"
    yield end.blocks == 0 and end.free == end.free_at_first


def _figure_claims(records: pd.DataFrame) -> list[Claim]:
    def exactly(text: str, source: str, wanted: int, unit: str, column: str, **where: str) -> Claim:
        part = source.replace("Fig. ", "fig")
        how = "Orca (Max)'s allocator" if part == "fig3" else "PagedAllocator"
        ours = _value(records, column, part=part, **where)
        return Claim(text, source, ours, wanted, wanted, paper=f"{wanted} {unit}".strip(), unit=unit, how=how)

    filled = _last_filled(records, part="fig6", event="prompt")
    return [
        exactly("request A (max 2048): slots reserved for its future", "Fig. 3", 2, "slots", "future", request="A"),
        exactly("request A (max 2048): slots never used", "Fig. 3", 2038, "slots", "never_used", request="A"),
        exactly("request B (max 512): slots reserved for its future", "Fig. 3", 1, "slots", "future", request="B"),
        exactly("request B (max 512): slots never used", "Fig. 3", 507, "slots", "never_used", request="B"),
        exactly("a prompt of 7 tokens in blocks of 4", "Fig. 6", 2, "blocks", "blocks", event="prompt"),
        Claim("its last block holds", "Fig. 6", filled, 3, 3, paper="3 tokens", unit="tokens", how="PagedAllocator"),
        exactly("token 8 fills the slot: new blocks", "Fig. 6", 0, "blocks", "new_blocks", event="token 8"),
        exactly("token 9: new blocks", "Fig. 6", 1, "blocks", "new_blocks", event="token 9"),
        exactly("references to the last prompt block of two samples", "Fig. 8", 2, "", "references", event="shared"),
        exactly("the first writer copies the block", "Fig. 8", 1, "copies", "copies", event="first writer"),
        exactly("references behind that", "Fig. 8", 1, "", "references", event="first writer"),
        exactly("the second writer writes in place: copies", "Fig. 8", 0, "copies", "copies", event="second writer"),
    ]


def _find(records: pd.DataFrame, **where: str) -> pd.DataFrame:
    for column, value in where.items():
        records = records[records[column] == value] if column in records else records[:0]
    return records


def _value(records: pd.DataFrame, column: str, **where: str) -> float | None:
    """Of the one record there is; None if there is none."""
    found = _find(records, **where)
    return None if found.empty else float(found[column].iloc[0])


def _last_filled(records: pd.DataFrame, **where: str) -> float | None:
    found = _find(records, **where)
    return None if found.empty else float(found.filled.iloc[0].split()[-1])
