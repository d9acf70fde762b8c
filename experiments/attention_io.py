"""Main-memory traffic of standard attention and of FlashAttention, by formula and counted in our kernels.

One head, T queries over T keys, of width d. All figures are elements of one array's dtype, read and written together.

Formulas, of the seed note and of the FlashAttention papers:

- `list`: the seed's own list for standard attention, reads 3Td + 2T^2 and writes 2T^2 + Td: 4T^2 + 4Td in all.
- `half_list`: 2T^2 + Td, what the seed's list writes; its "34M" at T = 4096 and d = 128 is this.
- `minimum`: 4Td. Q, K and V read once, O written once: what no algorithm can do without, and what the seed gives as
  FlashAttention's traffic.
- `flash1`: Algorithm 1 of FlashAttention with M elements of on-chip memory, 2Td + ceil(T / Bc) 3Td where
  Bc = ceil(M / 4d): K and V once; Q and O read, and O written, for each tile of K and V.
- `bound`: T^2 d^2 / M, what the papers' Theta is about, without its factor.

Counted are our kernels, from their traced programs (`pallas_kernels.aot.counted`): they are FlashAttention-2, which
reads K and V once for each tile of Br queries, 2Td + 2Td ceil(T / Br). `formula` is that for the kernel's own tiling:
where it pads, rounds up, stops at the diagonal (`causal`) or keeps a tile that it has, the formula does.

For standard attention there is what XLA's compiled programs access by XLA's own account: the three steps as a program
each, and `standard_attention` as one. The account depends on what XLA fuses, hence on its version and on the size: a
softmax of its own reads its scores once or several times, and the one program masks scores and weights on the way.

Left out: caches, which absorb re-reads (all of K and V of a head fits into the L2 of an A100), so that the counts are
of what kernels ask for and bound what reaches memory from above; what XLA does around a kernel, such as padding; and
time, see `python -m pallas_kernels.bench`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.frame import Claim, require_choice
from pagedjax.config import require
from pagedjax.scalars import is_int
from pallas_kernels import standard_attention
from pallas_kernels.aot.counted import count
from pallas_kernels.constants import FLOATS, TILE
from pallas_kernels.dispatch import PALLAS, kernel, load

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

TOLERANCE = 0.02

MOST_TOKENS = 65_536
"""More take minutes to count."""


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """One problem.

    Attributes:
        seq_len: T, queries and keys, in tokens.
        head_dim: d, the width of a head, in elements.
        causal: a query sees no later key; the kernels pass over the rest, standard attention computes it.
        dtype: of Q, K, V and O in the kernels; standard attention is float32, as its scores are.
        sram_elements: M, on-chip memory in elements for FlashAttention's Algorithm 1; 96K are an A100's 192 KB.
    """

    seq_len: int = 4096
    head_dim: int = 128
    causal: bool = False
    dtype: str = "bfloat16"
    sram_elements: int = 96 * 1024

    def __post_init__(self) -> None:
        for name, least in (("seq_len", 1), ("head_dim", 8), ("sram_elements", 1)):
            require(is_int(getattr(self, name), least), name, getattr(self, name), f"an integer of at least {least}")
        require(
            self.seq_len <= MOST_TOKENS,
            "seq_len",
            self.seq_len,
            f"at most {MOST_TOKENS:,}",
        )
        require(type(self.causal) is bool, "causal", self.causal, "True or False")
        require_choice("dtype", self.dtype, FLOATS)


CPU_SET = [
    *(Config(seq_len, head_dim) for head_dim in (64, 128) for seq_len in (256, 512, 1024, 2048, 4096, 8192)),
    *(Config(seq_len, causal=True) for seq_len in (256, 1024, 4096)),
    *(Config(1000, head_dim, causal) for head_dim in (64, 128) for causal in (False, True)),  # no whole tiles
    Config(1024, dtype="float32"),
]


class Tiling(NamedTuple):
    """How a kernel goes over its head.

    Attributes:
        query_tokens: Br, of a tile.
        kv_tokens: K and V are read in tiles of so many tokens, the last cut off at T unless `padded`.
        width: elements of a row as read.
        pads_queries: whole tiles of queries are read and written.
        pads_keys: whole tiles of K and V are read.
        keeps: a tile of K and V that is there already is not read again.
    """

    query_tokens: int
    kv_tokens: int
    width: int
    pads_queries: bool = False
    pads_keys: bool = False
    keeps: bool = False

    def elements(self, seq_len: int, causal: bool) -> int:
        """FlashAttention-2's count: Q and O once, K and V for each tile of queries."""
        num_tiles = -(-seq_len // self.query_tokens)
        rows = num_tiles * self.query_tokens if self.pads_queries else seq_len
        kv_tiles = -(-seq_len // self.kv_tokens)
        most = kv_tiles * self.kv_tokens if self.pads_keys else seq_len
        seen = [kv_tiles] * num_tiles
        if causal:
            seen = [-(-min(seq_len, (i + 1) * self.query_tokens) // self.kv_tokens) for i in range(num_tiles)]
        read = [min(tiles * self.kv_tokens, most) for tiles in seen]
        # Queries that see one tile leave it behind for the next ones, which begin with it.
        kept = min(sum(tiles == 1 for tiles in seen), num_tiles - 1) if self.keeps else 0
        return 2 * self.width * (rows + sum(read) - kept * self.kv_tokens)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Of each quantity: its elements, and the formula's for it."""
    for name, elements in formulas(config).items():
        yield _record("formula", name, elements, elements)
    for name, elements, formula in xla_programs(config):
        yield _record("xla", name, elements, formula)
    q = jax.ShapeDtypeStruct((1, config.seq_len, 1, config.head_dim), config.dtype)
    for backend in PALLAS:
        if _takes(backend, q):
            yield counted(config, backend, q)


def formulas(config: Config) -> dict[str, float]:
    """By name; see above. Those of Algorithm 1 are of attention to all keys."""
    seq_len, head_dim, sram = config.seq_len, config.head_dim, config.sram_elements
    once = seq_len * head_dim
    kv_tokens = math.ceil(sram / (4 * head_dim))
    return {
        "list": 4 * seq_len**2 + 4 * once,
        "half_list": 2 * seq_len**2 + once,
        "minimum": 4 * once,
        "flash1": 2 * once + math.ceil(seq_len / kv_tokens) * 3 * once,
        "bound": once**2 / sram,
    }


def xla_programs(config: Config) -> Iterator[tuple[str, float, int]]:
    """Name, elements by XLA's account and the list's for each program of standard attention, in float32."""
    rows = jax.ShapeDtypeStruct((config.seq_len, config.head_dim), jnp.float32)
    square = jax.ShapeDtypeStruct((config.seq_len, config.seq_len), jnp.float32)
    q = jax.ShapeDtypeStruct((1, config.seq_len, 1, config.head_dim), jnp.float32)
    scores = functools.partial(lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
    whole = functools.partial(standard_attention, causal=config.causal)
    programs = {
        "standard_scores": (scores, (rows, rows)),
        "standard_softmax": (jax.nn.softmax, (square,)),
        "standard_values": (jnp.dot, (square, rows)),
        "standard": (whole, (q, q, q)),
    }
    once, squared = config.seq_len * config.head_dim, config.seq_len**2
    formula = (2 * once + squared, 2 * squared, squared + 2 * once, 4 * squared + 4 * once)
    for (name, (function, args)), elements in zip(programs.items(), formula, strict=True):
        accessed = jax.jit(function).lower(*args).compile().cost_analysis()["bytes accessed"]
        yield name, accessed / 4, elements


def counted(config: Config, backend: str, q: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """The record of a kernel with its default tiling."""
    settings, tiling = _tiling(backend, q)
    function = functools.partial(
        kernel(backend, "flash_attention"),
        kv_lens=None,
        causal=config.causal,
        scale=config.head_dim**-0.5,
        config=settings,
    )
    (launch,) = count(lambda q, k, v: function(q, k, v), q, q, q)
    record = _record(
        "counted", backend, launch.bytes / q.dtype.itemsize, tiling.elements(config.seq_len, config.causal)
    )
    return record | {"bytes": launch.bytes, **tiling._asdict()}


def _tiling(backend: str, q: jax.ShapeDtypeStruct) -> tuple[Any, Tiling]:
    """A kernel's default configuration for these arrays, and what it comes to."""
    width = q.shape[-1]
    if backend == "triton":
        from pallas_kernels.triton.paged_attention import default_config

        settings = default_config(q, q)
        return settings, Tiling(settings.rows, 1, width)
    if backend == "mosaic_gpu":
        from pallas_kernels.mosaic_gpu.prefill import ROWS, default_config

        settings = default_config(q.shape[1], width, q.dtype.itemsize)
        return settings, Tiling(settings.consumers * ROWS, TILE, width, pads_queries=True)
    from pallas_kernels.tpu.config import LANES, default_config
    from pallas_kernels.tpu.flash_attention import KV_TOKENS

    width = -(-width // LANES) * LANES
    settings = default_config(1, 1, width, q.dtype, q.dtype, decode=False)
    settings = dataclasses.replace(settings, kv_tokens=KV_TOKENS)
    return settings, Tiling(settings.query_tokens, KV_TOKENS, width, True, True, True)


def _takes(backend: str, q: jax.ShapeDtypeStruct) -> bool:
    """Whether this JAX has the backend, and its kernel takes such arrays."""
    try:
        return load(backend).unsupported("flash_attention", q, q) is None
    except ImportError:
        return False


def _record(source: str, quantity: str, elements: float, formula: float) -> dict[str, Any]:
    return {
        "source": source,
        "quantity": quantity,
        "elements": float(elements),
        "formula": float(formula),
        "ratio": elements / formula,
    }


_LINES = {
    "list": ("standard, by the list", (3, 0)),
    "flash1": ("Algorithm 1, M = 96K", (3, 4)),
    "minimum": ("4Td: every array once", (3, 0)),
    "standard": ("standard, XLA's account", (4, 0)),
    "triton": ("our kernels, counted", (4, -5)),
}


def plot(records: pd.DataFrame) -> Figure:
    """Elements over T, at d = 128 and without a mask: formulas as lines, what programs move as dots."""
    from experiments.frame.plots import CYCLE, label_line, new_figure

    figure, (axes,) = new_figure(height=2.4)
    some = records[(records.head_dim == 128) & ~records.causal & (records.dtype == "bfloat16")]
    some = some[some.seq_len.map(int.bit_count) == 1].sort_values("seq_len")
    for (quantity, (name, offset)), colour in zip(_LINES.items(), CYCLE, strict=False):
        line = some[some.quantity == quantity]
        if line.empty:
            continue
        style = {"ls": "-"} if (line.source == "formula").all() else {"ls": "", "marker": "o"}
        axes.plot(line.seq_len, line.elements, color=colour, **style)
        label_line(axes, line.seq_len.iloc[-1], line.elements.iloc[-1], name, colour, offset=offset)
    axes.set(xscale="log", yscale="log", xlabel="T (tokens), d = 128", ylabel="elements read and written")
    axes.set_xlim(right=axes.get_xlim()[1] * 30)  # room for the names
    axes.set_xticks([256, 1024, 4096], ["256", "1,024", "4,096"])
    axes.minorticks_off()
    return figure


def claims(records: pd.DataFrame) -> list[Claim]:
    """What the seed says of T = 4096 and d = 128, and whether the kernels move what the formulas say."""
    at = functools.partial(_elements, records)
    standard, flash = at("list"), at("triton")
    steps = [at(f"standard_{step}") for step in ("scores", "softmax", "values")]
    longer = at("triton", 8192)
    growth = math.log2(longer / flash) if longer and flash else None
    traced = "counted from the triton kernel's traced program; caches count for nothing"
    where = "at T = 4096, d = 128"
    return [
        Claim(
            f"standard attention moves 34M elements {where}",
            "seed",
            _millions(standard),
            33,
            35,
            seed="~34M elements",
            unit="M elements",
            how="the seed's own list, 3Td + 2T^2 read and 2T^2 + Td written: 4T^2 + 4Td",
        ),
        Claim(
            f"34M {where} is only what the list writes, 2T^2 + Td",
            "seed",
            _millions(at("half_list")),
            33.5,
            34.5,
            seed="~34M elements",
            unit="M elements",
            how="formula",
        ),
        Claim(
            f"standard attention's three steps, each a program, move 4T^2 + 4Td = 69.2M or more {where}",
            "seed",
            None if None in steps else _millions(sum(steps)),  # type: ignore[arg-type]
            69.1,
            None,
            seed="reads 3Td + 2T^2, writes 2T^2 + Td",
            unit="M elements",
            how="XLA's account of its programs here; more where its softmax reads the scores again",
        ),
        Claim(
            f"FlashAttention moves about 2M elements {where}",
            "seed",
            _millions(flash),
            1.9,
            2.2,
            seed="~2M elements",
            unit="M elements",
            how=traced,
        ),
        Claim(
            f"2M {where} is the compulsory minimum 4Td: Q, K, V and O once",
            "seed",
            _millions(at("minimum")),
            2.05,
            2.15,
            seed="~2M elements",
            unit="M elements",
            how="formula",
        ),
        Claim(
            "FlashAttention's traffic is O(Td): twice the tokens, twice the elements (exponent 1)",
            "seed",
            growth,
            0.9,
            1.1,
            seed="O(Td)",
            how=f"{traced}; from T = 4096 to 8192",
        ),
        Claim(
            "FlashAttention's traffic is Theta(T^2 d^2 / M): the exponent of T is 2",
            "FlashAttention",
            growth,
            1.9,
            2.1,
            paper="Theta(T^2 d^2 / M)",
            how=f"{traced}; from T = 4096 to 8192",
        ),
        Claim(
            f"FlashAttention's Algorithm 1 counts 35.7M elements {where}, M = 96K",
            "FlashAttention",
            _millions(at("flash1")),
            35.6,
            35.7,
            paper="2Td + ceil(T / Bc) 3Td, Bc = ceil(M / 4d)",
            unit="M elements",
            how="formula",
        ),
        Claim(
            f"standard attention moves 17 times as many elements as FlashAttention {where}",
            "seed",
            standard / flash if standard and flash else None,
            15,
            19,
            seed="~34M against ~2M elements",
            unit="x",
            how=f"the seed's list over what is {traced}",
        ),
        *(_agreement(records, backend) for backend in PALLAS),
    ]


def _agreement(records: pd.DataFrame, backend: str) -> Claim:
    """Whether a kernel moves what the formula says for its tiling, in all of the records."""
    mine = records[records.get("quantity", records.index) == backend]  # without records there is no such column
    return Claim(
        f"the {backend} kernel moves what FlashAttention-2's formula says for its tiling (largest deviation)",
        "FlashAttention-2",
        None if mine.empty else float((mine.ratio - 1).abs().max()),
        0,
        TOLERANCE,
        paper="2Td + 2Td ceil(T / Br)",
        unit="%",
        how=f"counted from the kernel's traced program, in {len(mine)} problems",
    )


def _elements(records: pd.DataFrame, quantity: str, seq_len: int = 4096, head_dim: int = 128) -> float | None:
    """Of attention to all keys with the default M and dtype; None if there is no such record."""
    if records.empty:  # its columns are not there then
        return None
    default = Config()
    found = records[
        (records.quantity == quantity)
        & (records.seq_len == seq_len)
        & (records.head_dim == head_dim)
        & ~records.causal
        & (records.dtype == default.dtype)
        & (records.sram_elements == default.sram_elements)
    ]
    return None if found.empty else float(found.elements.iloc[0])


def _millions(elements: float | None) -> float | None:
    return None if elements is None else elements / 1e6
