"""Models and servers as data, and how many blocks of KV memory a server has for a model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from pagedjax.config import require
from pagedjax.errors import ConfigError
from pallas_kernels.chips import CHIPS, Chip

NUMBER_BYTES = 2
"""Everything is in half precision, as in the paper."""

USABLE = 0.95
WORKSPACE_BYTES = 1 << 30
"""The artifact's rule for a server that the paper does not list: this part of the memory less weights and workspace."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a simulated model costs."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    num_parameters: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return NUMBER_BYTES * self.num_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return 2 * NUMBER_BYTES * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def flops_per_token(self) -> int:
        """Operations of the matrix products with the weights: a multiplication and an addition for each."""
        return 2 * self.num_parameters


@dataclass(frozen=True, slots=True)
class Server:
    """Chips that hold one model together, tensor-parallel.

    Attributes:
        kv_bytes: memory for the KV cache, over all chips.
        host_link: bytes a second between each chip and the host, in one direction.
        all_reduce: seconds of an all-reduce, and bytes a second beyond them; None for a single chip.
    """

    chip: Chip
    num_chips: int
    kv_bytes: int
    host_link: float
    all_reduce: tuple[float, float] | None = None

    def num_blocks(self, model: ModelSpec, block_size: int) -> int:
        """Blocks of so many tokens that its KV memory holds."""
        return self.kv_bytes // (model.kv_bytes_per_token * block_size)


@cache
def _data(name: str) -> Mapping[str, Any]:
    return tomllib.loads(files("pagedjax.sim").joinpath("data", name).read_text())


def model_names() -> tuple[str, ...]:
    """The models that can be simulated."""
    return tuple(_data("models.toml"))


def find_model(name: str) -> ModelSpec:
    """The model of that name. Raises ConfigError naming those there are."""
    require(name in model_names(), "model", name, f"one of {', '.join(model_names())}")
    return ModelSpec(name, **_data("models.toml")[name])


def make_server(model: ModelSpec, chip: str | None = None, num_chips: int | None = None) -> Server:
    """A server for a model: the paper's own if nothing else is said, or if that is what is said.

    Args:
        chip: a name of `pallas_kernels.chips` whose link to the host is known.
        num_chips: 1, 4 or 8.

    Raises:
        ConfigError: there is no such chip or number, or the model does not fit; it says by how much.
    """
    data = _data("servers.toml")
    paper = data["paper"].get(model.name)
    known = ", ".join(data["host_link"])
    if chip is None:
        require(paper is not None, "chip", chip, f"one of {known} for {model.name}, which the paper does not run")
        chip = str(paper["chip"])
    require(chip in data["host_link"], "chip", chip, f"one of {known}")
    if num_chips is None:
        num_chips = int(paper["num_chips"]) if paper and paper["chip"] == chip else 1
    numbers = (1, *(int(number) for number in data["all_reduce"]))
    require(num_chips in numbers, "num_chips", num_chips, f"one of {', '.join(map(str, numbers))}")
    spec = CHIPS[chip]
    if paper and (paper["chip"], paper["num_chips"]) == (chip, num_chips):
        kv_bytes = int(paper["kv_gib"] * 2**30)
    else:
        kv_bytes = _kv_bytes(model, spec, num_chips)
    pair = data["all_reduce"].get(str(num_chips))
    return Server(spec, num_chips, kv_bytes, data["host_link"][chip], tuple(pair) if pair else None)


def _kv_bytes(model: ModelSpec, chip: Chip, num_chips: int) -> int:
    usable = int(USABLE * chip.memory_bytes) - WORKSPACE_BYTES
    left = num_chips * usable - model.weight_bytes
    if left < model.kv_bytes_per_token:
        there, weights = num_chips * usable / 2**30, model.weight_bytes / 2**30
        raise ConfigError(
            f"{model.name} does not fit {num_chips} x {chip.name}: its weights take {weights:.1f} GiB, "
            f"{weights - there:.1f} GiB more than the {there:.1f} GiB that can be used"
        )
    return left
