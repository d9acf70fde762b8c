"""The same tokens, whatever memory does (section 1: no effect on accuracy), and paged attention beside dense attention.

Part `tokens`: SmolLM2 answers the same requests while one thing is different: who shares the batch, the size of
chunks, planning ahead, blocks in another order, preemption by recomputation and by swapping every few steps, the
prefix cache, a save and restore in the middle. The tokens of greedy, sampled and searched requests must be the same.
Part `numerics`: the largest difference of paged and dense attention over block sizes, in float32 and bfloat16,
against float64.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.frame import Claim, require_choice
from experiments.frame.frames import rows_where

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from pagedjax.engine import Engine

VARIATIONS = (
    "plain",
    "alone",
    "chunks of 8",
    "no overlap",
    "scrambled blocks",
    "recompute",
    "swap",
    "prefix cache",
    "restored",
)
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Config:
    """One variation.

    Attributes:
        part: "tokens" or "numerics".
        variation: of the tokens: "plain", "alone", "chunks of 8", "no overlap", "scrambled blocks", "recompute",
            "swap", "prefix cache" or "restored".
        dtype: of the numerics: "float32" or "bfloat16".
        max_tokens: that each request puts out.
        seed: of samples and of numbers.
    """

    part: str = "tokens"
    variation: str = "plain"
    dtype: str = "float32"
    max_tokens: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("part", self.part, ("tokens", "numerics"))
        require_choice("variation", self.variation, VARIATIONS)
        require_choice("dtype", self.dtype, DTYPES)


CPU_SET = [
    *(Config(variation=variation) for variation in VARIATIONS),
    *(Config("numerics", dtype=dtype) for dtype in DTYPES),
]


def run(config: Config) -> Iterable[dict[str, Any]]:
    """A record for each kind of decoding; of the numerics, for each block size."""
    yield from _numerics(config) if config.part == "numerics" else _tokens(config)


def _tokens(config: Config) -> Iterable[dict[str, Any]]:
    from pagedjax import BeamSearchParams, SamplingParams

    common: dict[str, Any] = {"max_tokens": config.max_tokens, "ignore_eos": True}
    kinds = {
        "greedy": SamplingParams(temperature=0.0, **common),
        "sampled": SamplingParams(n=2, temperature=1.0, top_p=0.95, seed=config.seed + 7, **common),
        "beams": BeamSearchParams(beam_width=3, **common),
    }
    engine = _engine(config)
    for kind, params in kinds.items():
        if config.variation == "alone":
            found = [tokens for prompt in PROMPTS for tokens in _serve(engine, [prompt], params)]
        elif config.variation == "restored":
            found, engine = _serve_restored(engine, params)
        else:
            found = _serve(engine, list(PROMPTS), params)
        digest = hashlib.sha256(repr(found).encode()).hexdigest()
        yield {"kind": kind, "tokens_sha256": digest, "output_tokens": sum(map(len, found))}


def _engine(config: Config) -> Engine:
    """An engine in which one thing is different."""
    from experiments.frame.engine import MODEL, SHAPE
    from pagedjax import LLM, EngineConfig
    from pagedjax.faults import preempt_every

    fields: dict[str, Any] = {
        "chunks of 8": {"max_num_batched_tokens": 12},  # of which decodes take their part first
        "no overlap": {"overlap": False},
        "recompute": {"preemption": "recompute"},
        "swap": {"preemption": "swap", "swap_space": 64 << 20},
        "prefix cache": {"enable_prefix_caching": True},  # later requests find what earlier ones have left
    }.get(config.variation, {})
    engine = LLM(MODEL, EngineConfig(seed=config.seed, **{**SHAPE, **fields})).engine
    if config.variation in ("recompute", "swap"):
        preempt_every(engine, 5)
    if config.variation == "scrambled blocks":
        _scramble(engine)
    return engine


def _serve(engine: Engine, prompts: list[str], params: Any) -> list[list[int]]:
    """The tokens of all samples or beams of each prompt."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    return _tokens_of(ids, _outputs(engine))


def _serve_restored(engine: Engine, params: Any) -> tuple[list[list[int]], Engine]:
    """The same, with the engine saved after six steps, and another one going on; and that one."""
    from pagedjax.engine import Engine

    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    final = _outputs(engine, 6)
    with tempfile.TemporaryDirectory() as folder:
        engine.save(Path(folder) / "snapshot")
        other = Engine.restore(Path(folder) / "snapshot")
    return _tokens_of(ids, final | _outputs(other)), other


def _outputs(engine: Engine, steps: int | None = None) -> dict[str, Any]:
    """Those that have ended within so many steps, by request."""
    final: dict[str, Any] = {}
    while engine.has_unfinished() and steps != 0:
        final |= {output.request_id: output for output in engine.step() if output.finished}
        steps = None if steps is None else steps - 1
    return final


def _tokens_of(ids: list[str], final: dict[str, Any]) -> list[list[int]]:
    return [list(sample.token_ids) for name in ids for sample in final[name].outputs]


def _scramble(engine: Engine) -> None:
    """Leaves the free list in an order that no fresh pool has: requests of many lengths, aborted out of turn."""
    from pagedjax import SamplingParams

    names = [
        engine.add_request(
            {"prompt_token_ids": [1000 + n] * (17 * (n % 3) + 5)}, SamplingParams(max_tokens=40, ignore_eos=True)
        )
        for n in range(8)
    ]
    for _ in range(6):
        engine.step()
    for name in names[1::2] + names[::2]:
        engine.abort(name)
    while engine.has_unfinished():
        engine.step()


def _numerics(config: Config) -> Iterable[dict[str, Any]]:
    """Paged attention of 4 sequences of up to 300 tokens through scrambled tables, against float64."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import paged_decode

    rng = np.random.default_rng(config.seed)
    lens, heads, kv_heads, width = np.array([1, 37, 128, 300], np.int32), 9, 3, 64
    q = jnp.asarray(rng.standard_normal((4, heads, width)), config.dtype)
    k, v = (jnp.asarray(rng.standard_normal((4, 300, kv_heads, width)), config.dtype) for _ in range(2))
    truth = _dense(*(np.asarray(x, np.float64) for x in (q, k, v)), lens)
    for size in (1, 4, 16, 64, 256):
        per_seq = -(-300 // size)
        table = 1 + rng.permutation(4 * per_seq).reshape(4, per_seq).astype(np.int32)
        pools = []
        for x in (k, v):
            padded = np.zeros((4, per_seq * size, kv_heads, width), np.float32)
            padded[:, :300] = np.asarray(x, np.float32)
            pool = np.full((4 * per_seq + 1, kv_heads, size, width), np.nan, np.float32)
            blocks = padded.reshape(4, per_seq, size, kv_heads, width).swapaxes(2, 3)
            pool[table] = blocks
            pools.append(jnp.asarray(pool, config.dtype))
        out = np.asarray(paged_decode(q, *pools, jnp.asarray(table), jnp.asarray(lens)), np.float64)
        yield {"block_size": size, "max_abs_error": float(np.max(np.abs(out - truth)))}


def _dense(q: Any, k: Any, v: Any, lens: Any) -> Any:
    """Attention of the last token of each sequence over contiguous K and V, by its definition."""
    import numpy as np

    group = q.shape[1] // k.shape[2]
    out = np.zeros_like(q)
    for seq, length in enumerate(lens):
        for head in range(q.shape[1]):
            scores = k[seq, :length, head // group] @ q[seq, head] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[seq, head] = weights / weights.sum() @ v[seq, :length, head // group]
    return out


def plot(records: pd.DataFrame) -> Figure:
    """The errors over block sizes, and the bounds."""
    from experiments.frame.plots import CYCLE, label_line, new_figure

    figure, (axes,) = new_figure()
    for colour, dtype in zip(CYCLE, DTYPES, strict=False):
        rows = records[(records["part"] == "numerics") & (records["dtype"] == dtype)]
        if len(rows):
            axes.plot(rows["block_size"], rows["max_abs_error"], "o-", color=colour)
            label_line(axes, rows["block_size"].iloc[-1], rows["max_abs_error"].iloc[-1], dtype, colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="block size (tokens)", ylabel="largest error against float64", xlim=(0.8, 1500))
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """One output of each kind over all variations; errors within bounds."""
    found = []
    for kind in ("greedy", "sampled", "beams"):
        rows = rows_where(records, part="tokens", kind=kind)
        hashes = {row["tokens_sha256"] for row in rows}
        ours = float(len(hashes)) if {row["variation"] for row in rows} >= set(VARIATIONS) else None
        text = f"different outputs over {len(VARIATIONS)} ways of running the same requests, {kind}"
        found.append(Claim(text, "section 1", ours, 1, 1, paper="no effect on accuracy", how="engine, SmolLM2"))
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 2e-2)):
        errors = [row["max_abs_error"] for row in rows_where(records, part="numerics", dtype=dtype)]
        text = f"largest difference of paged and dense attention, blocks of 1 to 256, {dtype}"
        how = "paged_decode against float64"
        seed = "equivalent" if dtype == "float32" else None
        found.append(Claim(text, "section 4.1", max(errors) if errors else None, 0, bound, seed=seed, how=how))
    return found
