"""Latency of the paged decode kernel against contiguous ones, and what that comes to in a whole step (Fig. 18a).

Part `kernel`: one decode of a batch, all sequences of one length, in three ways that take turns in one process:

- `paged`: `paged_decode` through a table of blocks strewn over the pool;
- `contiguous`: `flash_attention`, this package's own kernel for contiguous K and V, with one query and `kv_lens`. The
  baseline of the claims: the same algorithm by the same authors, without a table. (The paper's is FasterTransformer's
  kernel, which is not in JAX.)
- `identity`: `paged_decode` again, with each sequence's blocks one behind the other. What `paged` takes more is the
  scattering alone, not the reading of the table.

Heads are OPT-13B's (40 of 128), K and V in blocks of 16 tokens. Each figure is the median over the rounds; a ratio is
that of medians.

Part `step`: the share that attention has in a decode step of the engine, with SmolLM2-135M's shapes and random weights.
An engine's step is timed from outside, without overlap of host and device, in turn with a program that does nothing but
its attention: `paged_attention` for all layers, each with a pool of its own, over the step's own lengths and tables.
What paging costs end to end follows from the share and from the kernel's ratio in the same batch.

Kernels are chosen as everywhere (backend "auto"): Pallas ones on GPUs and TPUs. On a CPU there are none, and XLA's code
says nothing of a kernel (the paged one first copies the blocks of a whole tile of 128 tokens together): the figure is
shown, and the verdict needs an accelerator.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.frame import Claim, require_choice
from pagedjax.config import EngineConfig, ModelConfig, require
from pagedjax.engine import Engine
from pagedjax.models.llama import init_params
from pagedjax.models.loader import LoadedModel
from pagedjax.request import SamplingParams, Sequence
from pagedjax.scalars import is_int
from pallas_kernels import flash_attention, paged_attention, paged_decode
from pallas_kernels.bench.timing import alternate, seconds_per_call
from pallas_kernels.constants import FLOATS
from pallas_kernels.dispatch import choose

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIMED = (
    "paged_us",
    "contiguous_us",
    "identity_us",
    "ratio",
    "ratio_low",
    "ratio_high",
    "identity_ratio",
    "step_us",
    "attention_us",
    "share",
)
BASELINE = "over flash_attention on contiguous K and V with one query, OPT-13B's heads"
SHAPES = "SmolLM2-135M's shapes"
CALLS = 3  # of the attention alone in a sample, waited for once
PARTS = ("kernel", "step")
CONTEXTS = (64, 128, 256)
BATCHES = (8, 32)
SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rope_theta=100_000.0,
    tie_word_embeddings=True,
)


@dataclass(frozen=True, slots=True)
class Config:
    """One batch.

    Attributes:
        part: "kernel" (the decode kernel alone) or "step" (its share in a step of the engine).
        context: tokens of each sequence, the new one included.
        batch: sequences.
        heads: query heads, and as many KV heads; of "kernel".
        head_dim: their width; of "kernel".
        block_size: tokens of a block.
        dtype: of queries, K and V; None is float32 on a CPU and bfloat16 elsewhere.
        rounds: samples of each way.
    """

    part: str = "kernel"
    context: int = 256
    batch: int = 8
    heads: int = 40
    head_dim: int = 128
    block_size: int = 16
    dtype: str | None = None
    rounds: int = 15

    def __post_init__(self) -> None:
        require_choice("part", self.part, PARTS)
        for name in ("context", "batch", "heads", "head_dim", "block_size", "rounds"):
            require(is_int(getattr(self, name), 1), name, getattr(self, name), "an integer of at least 1")
        size = self.block_size
        require(size & (size - 1) == 0, "block_size", size, "a power of two")
        if self.dtype is not None:
            require_choice("dtype", self.dtype, FLOATS)

    @property
    def resolved_dtype(self) -> str:
        """Of the device that is here, unless one is given."""
        return self.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


CPU_SET = [
    *(Config("kernel", context, batch) for batch in BATCHES for context in CONTEXTS),
    *(Config("step", context, batch) for context, batch in ((64, 8), (256, 8), (256, 32))),
]


def run(config: Config) -> Iterator[dict[str, Any]]:
    """One record: medians in microseconds, their ratio, and where they were measured."""
    measure = measure_kernel if config.part == "kernel" else measure_step
    device = jax.devices()[0]
    yield {"platform": device.platform, "device": device.device_kind, "used_dtype": config.resolved_dtype} | measure(
        config
    )


# ------------------------------------------------------------------ the kernel


class Problem(NamedTuple):
    """K and V of a batch, in a pool and in one run.

    Attributes:
        q: [batch, heads, head_dim].
        pools: K and V, [blocks, kv_heads, block_size, head_dim].
        strewn: block table [batch, max_blocks], blocks in random order.
        in_order: another, blocks one behind the other.
        lens: [batch], all the same.
        runs: what `strewn` says, contiguous: K and V, [batch, context, kv_heads, head_dim].
    """

    q: Array
    pools: tuple[Array, Array]
    strewn: Array
    in_order: Array
    lens: Array
    runs: tuple[Array, Array]


def make_problem(config: Config) -> Problem:
    """Normal numbers."""
    blocks = -(-config.context // config.block_size)
    count = config.batch * blocks
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    shape = (1 + count, config.heads, config.block_size, config.head_dim)
    q = jax.random.normal(keys[0], (config.batch, config.heads, config.head_dim), config.resolved_dtype)
    k_pool, v_pool = (jax.random.normal(key, shape, config.resolved_dtype) for key in keys[1:])
    in_order = 1 + np.arange(count, dtype=np.int32).reshape(config.batch, blocks)
    strewn = jnp.asarray(np.random.default_rng(0).permutation(in_order.ravel()).reshape(in_order.shape))

    @jax.jit
    def run_of(pool: Array) -> Array:
        rows = pool[strewn].transpose(0, 1, 3, 2, 4)
        return rows.reshape(config.batch, -1, config.heads, config.head_dim)[:, : config.context]

    lens = jnp.full(config.batch, config.context, jnp.int32)
    return Problem(q, (k_pool, v_pool), strewn, jnp.asarray(in_order), lens, (run_of(k_pool), run_of(v_pool)))


def measure_kernel(config: Config) -> dict[str, Any]:
    """The decode kernel's time, in turn with its baselines'; they are compared first."""
    problem = make_problem(config)
    q, pools, lens = problem.q, problem.pools, problem.lens
    calls = {
        "paged": functools.partial(paged_decode, q, *pools, problem.strewn, lens),
        "contiguous": functools.partial(flash_attention, q[:, None], *problem.runs, kv_lens=lens),
        "identity": functools.partial(paged_decode, q, *pools, problem.in_order, lens),
    }
    _check_equal(calls["paged"](), calls["contiguous"]()[:, 0])
    samples = alternate(calls, config.rounds)
    medians = {f"{name}_us": statistics.median(seconds) * 1e6 for name, seconds in samples.items()}
    paired = [a / b for a, b in zip(samples["paged"], samples["contiguous"], strict=True)]
    return {
        "backend": choose("paged_decode", "auto", False, q, pools[0]),
        "baseline_backend": choose("flash_attention", "auto", False, q[:, None], problem.runs[0]),
        **medians,
        "ratio": medians["paged_us"] / medians["contiguous_us"],
        "ratio_low": float(np.quantile(paired, 0.25)),
        "ratio_high": float(np.quantile(paired, 0.75)),
        "identity_ratio": medians["identity_us"] / medians["contiguous_us"],
    }


def _check_equal(ours: Array, right: Array) -> None:
    """Two ways that are compared compute the same."""
    ours, right = (np.asarray(x, np.float64) for x in (ours, right))
    error = np.linalg.norm(ours - right) / np.linalg.norm(right)
    assert error < 2e-2, f"the paged and the contiguous kernel differ by {error}"


# ------------------------------------------------------------------ the step


def measure_step(config: Config, model: ModelConfig = SMOLLM2_135M) -> dict[str, Any]:
    """The time of an engine's decode steps, in turn with that of their attention."""
    engine = decoding_engine(config, model)
    attend = _attention_of(engine)
    step_seconds, attention_seconds, tokens = [], [], []
    for _ in range(config.rounds):
        step_seconds.append(seconds_per_call(engine.step, 1))
        lens, table = what_it_saw(engine)
        call = functools.partial(attend, lens, table)
        if not attention_seconds:
            call()  # compiles
        attention_seconds.append(seconds_per_call(call, CALLS))
        tokens.append(float(lens.mean()))
    step, attention = statistics.median(step_seconds), statistics.median(attention_seconds)
    return {
        "backend": engine.runner.programs.backend.name,
        "mean_context": statistics.mean(tokens),
        "step_us": step * 1e6,
        "attention_us": attention * 1e6,
        "share": attention / step,
    }


def decoding_engine(config: Config, model: ModelConfig) -> Engine:
    """An engine whose sequences all decode, and reach `context` tokens about halfway through the rounds."""
    dtype = "bfloat16" if config.resolved_dtype == "float16" else config.resolved_dtype
    prompt_len = max(1, config.context - config.rounds // 2)
    longest = prompt_len + 2 * config.batch + config.rounds + 8  # the first to come decode while the last ones prefill
    engine = Engine(
        LoadedModel(model, init_params(model, 0, dtype), None, {"name": "random"}),
        EngineConfig(
            dtype=dtype,
            block_size=config.block_size,
            num_blocks=config.batch * -(-longest // config.block_size),
            max_model_len=longest,
            max_num_seqs=config.batch,
            watermark=0.0,
            overlap=False,
        ),
        progress=False,
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=longest - prompt_len, ignore_eos=True)
    for _ in range(config.batch):
        engine.add_request({"prompt_token_ids": rng.integers(1, model.vocab_size, prompt_len).tolist()}, params)
    while len(_running(engine)) < config.batch or min(seq.output_len for seq in _running(engine)) < 2:
        engine.step()
    return engine


def _running(engine: Engine) -> list[Sequence]:
    return [sequence for group in engine.scheduler.roster.running for sequence in group.sequences]


def what_it_saw(engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and block table of the step that just ran, the table as wide as the longest sequence will want it."""
    running = _running(engine)
    lens = np.array([sequence.num_computed for sequence in running], np.int32)
    table = np.zeros((len(running), -(-engine.max_model_len // engine.cache_config.block_size)), np.int32)
    for row, sequence in enumerate(running):
        blocks = engine.allocator.block_table(sequence.seq_id)
        table[row, : len(blocks)] = blocks
    return lens, table


def _attention_of(engine: Engine) -> Callable[[np.ndarray, np.ndarray], Array]:
    """What the layers of a step attend to and nothing else, as one program over a copy of the engine's pool."""
    model, backend = engine.model_config, engine.runner.programs.backend
    layers = [tuple(jnp.array(x) for x in layer) for layer in engine.runner.pool.layers]
    count, width = engine.config.max_num_seqs, layers[0][0].shape[-1]
    q = jax.random.normal(jax.random.key(1), (count, model.num_heads, width), engine.config.dtype)
    starts = jnp.arange(count + 1, dtype=jnp.int32)

    @jax.jit
    def attend(layers: list[tuple[Array, ...]], lens: Array, table: Array) -> Array:
        out = q
        for pools in layers:  # one layer's queries come after the attention of the one before, as in the model
            out = paged_attention(out, *pools, table, lens, starts, scale=model.head_dim**-0.5, backend=backend.name)
        return out

    return lambda lens, table: attend(layers, lens, table)


# ------------------------------------------------------------------ what comes of it


def plot(records: pd.DataFrame) -> Figure:
    """Time over that of the contiguous kernel, and attention's share in a step."""
    from experiments.frame.plots import CYCLE, new_figure

    kernels, steps = (records[records.part == part] for part in PARTS)
    figure, (left, right) = new_figure(columns=2)
    _bars(left, kernels, {"ratio": "strewn blocks", "identity_ratio": "blocks in order"})
    left.axhline(1, color=CYCLE[-1], lw=0.8)
    left.axhspan(1.20, 1.26, color=CYCLE[-1], alpha=0.3, lw=0)
    left.set_ylabel("paged / contiguous, time")
    left.set_title("grey: the paper, 1.20 to 1.26")
    _bars(right, steps.assign(percent=100 * steps.share) if len(steps) else steps, {"percent": "attention"})
    right.set_ylabel("share of a decode step (%)")
    for axes in (left, right):
        axes.set_xlabel("batch x context (tokens)")
    platforms = ", ".join(sorted(records.platform.unique()))
    figure.suptitle(f"measured on: {platforms}", fontsize=8)
    return figure


def _bars(axes: Axes, records: pd.DataFrame, columns: dict[str, str]) -> None:
    """Of each problem, a bar for each column."""
    from experiments.frame.plots import CYCLE

    rows = records.sort_values(["batch", "context"]) if len(records) else records
    places, width = np.arange(len(rows)), 0.8 / len(columns)
    for number, ((column, name), colour) in enumerate(zip(columns.items(), CYCLE, strict=False)):
        heights = rows[column] if len(rows) else []
        axes.bar(places + (number + 0.5) * width - 0.4, heights, width, color=colour, label=name)
    axes.set_xticks(places, [f"{b} x {c}" for b, c in zip(rows.batch, rows.context, strict=True)] if len(rows) else [])
    if len(columns) > 1:
        axes.legend(loc="upper right")


def claims(records: pd.DataFrame) -> list[Claim]:
    """Of the paper and of the seed, as far as there are records; a CPU's only where there are no others."""
    default = Config()
    if len(records) and (records.platform != "cpu").any():
        records = records[records.platform != "cpu"]
    records = records[(records.block_size == default.block_size) & records.batch.isin(BATCHES)]
    kernels = records[(records.part == "kernel") & (records.heads == default.heads) & records.context.isin(CONTEXTS)]
    kernels = kernels[kernels.head_dim == default.head_dim]
    steps = records[records.part == "step"]
    return [
        *(_slower(kernels[kernels.batch == batch], batch) for batch in BATCHES),
        _claim(
            "the paged kernel's overhead is below 5 % (the kernel alone, worst case)",
            kernels,
            _largest(kernels, "ratio", less=1),
            0.05,
            paper="20 to 26 %",
            seed="< 5 %",
            what=BASELINE,
        ),
        _claim(
            "attention is a minority of a decode step, as the seed's 5 % wants (largest share)",
            steps,
            _largest(steps, "share"),
            0.5,
            what=f"paged_attention of all layers over an engine's step, {SHAPES}",
        ),
        _claim(
            "the paged kernel's overhead end to end is below 5 % (worst case)",
            steps,
            _end_to_end(kernels, steps),
            0.05,
            seed="< 5 %",
            what=f"attention's share in a step of {SHAPES}, and the kernel's ratio in the same batch",
        ),
        _claim(
            "with the paper's 26 % for the kernel, the overhead end to end is below 5 % (largest share)",
            steps,
            None if steps.empty else end_to_end(float(steps.share.max()), 1.26),
            0.05,
            seed="< 5 %",
            what=f"attention's share in a step of {SHAPES}",
        ),
    ]


def _slower(records: pd.DataFrame, batch: int) -> Claim:
    how = _how(records, BASELINE)
    return Claim(
        f"the paged decode kernel is 20 to 26 % slower than a contiguous one (batch {batch}, worst context)",
        "Fig. 18a",
        _largest(records, "ratio"),
        1.0,
        1.4,
        paper="1.20 to 1.26 x FasterTransformer's",
        unit="x",
        how=how,
        needs_accelerator=_on_cpu(records),
        timed=True,
    )


def _claim(
    text: str, records: pd.DataFrame, ours: float | None, high: float, *, what: str, seed: str = "", paper: str = ""
) -> Claim:
    """A share that is to be small."""
    return Claim(
        text,
        "seed",
        ours,
        None,
        high,
        paper=paper or None,
        seed=seed or None,
        unit="%",
        how=_how(records, what),
        needs_accelerator=_on_cpu(records),
        timed=True,
    )


def _largest(records: pd.DataFrame, column: str, less: float = 0) -> float | None:
    return None if records.empty else float(records[column].max()) - less


def _on_cpu(records: pd.DataFrame) -> bool:
    return bool(len(records)) and bool((records.platform == "cpu").all())


def _how(records: pd.DataFrame, what: str) -> str:
    if _on_cpu(records):
        return f"CPU, XLA's code and no kernel; {what}"
    devices = sorted(set(zip(records.device, records.backend, strict=True))) if len(records) else []
    return "; ".join([*(f"{device}, {backend}" for device, backend in devices), what])


def _end_to_end(kernels: pd.DataFrame, steps: pd.DataFrame) -> float | None:
    """The worst of the batches of which there are both."""
    if kernels.empty or steps.empty:
        return None
    both = steps[["context", "batch", "share"]].merge(kernels[["context", "batch", "ratio"]], on=["context", "batch"])
    found = [end_to_end(share, ratio) for share, ratio in zip(both.share, both.ratio, strict=True)]
    return max(found, default=None)


def end_to_end(share: float, ratio: float) -> float:
    """How much longer a step takes than with a contiguous kernel, 0.05 being 5 %.

    Args:
        share: of the step's time that is the paged attention's.
        ratio: of the paged kernel's time to the contiguous one's.
    """
    return 1 / (1 - share * (1 - 1 / ratio)) - 1
