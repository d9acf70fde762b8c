"""How long a step takes: a roofline over weights, KV memory and operations, and what the host adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagedjax.sim.hardware import NUMBER_BYTES, ModelSpec, Server
from pagedjax.sim.records import StepShape


class CostModel(Protocol):
    """Any function of a step's shape."""

    def seconds(self, step: StepShape) -> float:
        """How long it takes."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """Weights and operations overlap, the KV cache is read beside them, and the host adds its own.

    Attributes:
        weights_efficiency: of the memory's bandwidth, when weights are read (0.7 to 0.85 in Vidur's measured matrix
            products on A100).
        kv_efficiency: of the bandwidth, when blocks are read: three quarters of that.
        flops_efficiency: of the peak (0.74 to 0.79 there, for large products).
        seconds_per_step, seconds_per_seq: of the host. Calibrated with two bars of the paper's Fig. 13, and nothing
            else: by Little's law, 30.42 requests at 2 a second with outputs of 338 tokens mean 45 ms a step, 132.44 at
            30 a second with 58.45 tokens 75.5 ms.
        seconds_per_swap_copy: that a copy to or from the host takes at least, however little it moves. Like the
            artifact, swapping makes an asynchronous one for each block, layer, and K or V.
        reuses_shared: whether a block that several sequences list is read from memory once a step, and for the others
            comes from the chip's cache, where a layer's shared blocks fit.
        hides_host: whether the host plans while the device works, so that only the longer of both counts.
    """

    model: ModelSpec
    server: Server
    block_size: int
    weights_efficiency: float = 0.8
    kv_efficiency: float = 0.6
    flops_efficiency: float = 0.74
    seconds_per_step: float = 3e-3
    seconds_per_seq: float = 0.33e-3
    seconds_per_swap_copy: float = 0.0
    reuses_shared: bool = False
    hides_host: bool = False

    def seconds(self, step: StepShape) -> float:
        """How long the step takes."""
        model, chip, number = self.model, self.server.chip, self.server.num_chips
        weight_bytes = model.weight_bytes if step.num_tokens else 0  # a step may do nothing but swap
        read = weight_bytes / (number * self.weights_efficiency * chip.bandwidth)
        peak = chip.peak_flops["bfloat16"]
        compute = step.num_tokens * model.flops_per_token / (number * self.flops_efficiency * peak)
        context = step.num_context - step.num_shared if self.reuses_shared else step.num_context
        kv_bytes = context * model.kv_bytes_per_token
        attention = kv_bytes / (number * self.kv_efficiency * chip.bandwidth)
        block_bytes = self.block_size * model.kv_bytes_per_token
        num_copies = step.num_swapped * 2 * model.num_layers
        copy_bytes = block_bytes / (2 * model.num_layers * number)
        swap = num_copies * max(self.seconds_per_swap_copy, copy_bytes / self.server.host_link)
        copy = 2 * step.num_copied * block_bytes / (number * self.kv_efficiency * chip.bandwidth)
        device = max(read, compute) + attention + swap + copy + self._reduce(step)
        host = self.seconds_per_step + self.seconds_per_seq * step.num_seqs
        return max(device, host) if self.hides_host else device + host

    def _reduce(self, step: StepShape) -> float:
        """Of the all-reduces: two a layer."""
        if self.server.all_reduce is None:
            return 0.0
        latency, bandwidth = self.server.all_reduce
        each = latency + step.num_tokens * self.model.hidden_size * NUMBER_BYTES / bandwidth
        return 2 * self.model.num_layers * each
