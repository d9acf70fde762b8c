"""The compiled programs of an engine: N backbones by tokens, M heads by rows, a few small ones; each compiled once."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring
from jaxtyping import Array, Float, Int

import pallas_kernels
from pagedjax.config import ModelConfig
from pagedjax.device import sampler
from pagedjax.device.batch import Batch
from pagedjax.device.beams import best_continuations
from pagedjax.device.host_pool import gather_packed, scatter_packed
from pagedjax.device.kv_pool import KVPool
from pagedjax.device.sampler import ROW_FIELDS, SampleRows, SamplerState
from pagedjax.host.beam import num_candidates
from pagedjax.models.llama import AttentionBackend, Params, forward
from pagedjax.models.progress import said_if_slow

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compilations = 0


def _count_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _compilations
    if event == _COMPILE_EVENT:
        _compilations += 1


monitoring.register_event_duration_secs_listener(_count_compilation)


def num_compilations() -> int:
    """Programs that JAX compiled (or took from its persistent cache) in this process so far."""
    return _compilations


@contextlib.contextmanager
def no_new_compiles() -> Iterator[None]:
    """Fails when anything at all is compiled inside, as a warm engine must not.

    Raises:
        AssertionError: saying how many programs were compiled.
    """
    before = _compilations
    yield
    if _compilations != before:
        raise AssertionError(f"{_compilations - before} programs were compiled where none was allowed")


def backbone(
    config: ModelConfig,
    backend: AttentionBackend,
    params: Params,
    last_tokens: Int[Array, " slots"],
    batch: Batch,
    pool: KVPool,
) -> tuple[Float[Array, "max_num_seqs features"], Float[Array, "features tokens"], KVPool]:
    """One step of the model: the rows that need logits, all hidden states (for prompt logprobs), and the pool."""
    token_ids = jnp.where(batch.token_ids < 0, last_tokens[-batch.token_ids], batch.token_ids)
    hidden, pool = forward(config, backend, params, pool, batch.replace(token_ids=token_ids))
    return hidden[:, batch.logit_rows].T, hidden, pool


def select_rows(
    hidden: Float[Array, "features tokens"], token_index: Int[Array, " rows"]
) -> Float[Array, "rows features"]:
    """Hidden states of single tokens, for prompt logprobs."""
    return hidden[:, token_index].T


class Programs:
    """Compiles on first use and remembers; names say kind and size, as "backbone-32" or "sample-8".

    Attributes:
        backend: the attention kernels that the backbones call.
        seconds: {program: that it took to compile}.
        compile_seconds: their sum.
        progress: say on stderr what is compiled, where that takes longer than a second.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        params: Params,
        pool: KVPool,
        state: SamplerState,
        kernel: Float[Array, "vocab features"],
        max_blocks_per_seq: int,
    ) -> None:
        self._config = config
        self.backend = backend
        self._shapes = jax.tree.map(_shape_of, (params, pool, state, kernel))
        self._max_num_seqs = state.last_tokens.shape[0] - 1
        self._max_blocks = max_blocks_per_seq
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self.seconds: dict[str, float] = {}
        self.compile_seconds = 0.0
        self.progress = True

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """All programs compiled so far, by name."""
        return dict(self._compiled)

    def backbone(self, num_tokens: int) -> jax.stages.Compiled:
        """(params, last_tokens, batch, pool) -> (rows, hidden, pool); the pool is donated."""
        return self._get(f"backbone-{num_tokens}", functools.partial(self._lower_backbone, num_tokens))

    def sample(self, num_rows: int) -> jax.stages.Compiled:
        """(kernel, rows, SampleRows, state) -> (SampleOutput, state); the state is donated."""
        return self._get(f"sample-{num_rows}", functools.partial(self._lower_sample, num_rows))

    def select_rows(self, num_tokens: int, num_rows: int) -> jax.stages.Compiled:
        """(hidden, token_index) -> rows."""
        return self._get(f"select-{num_tokens}", functools.partial(self._lower_select, num_tokens, num_rows))

    def prompt_logprobs(self, num_rows: int) -> jax.stages.Compiled:
        """(kernel, rows, targets) -> TokenLogprobs."""
        return self._get(f"prompt_logprobs-{num_rows}", functools.partial(self._lower_prompt_logprobs, num_rows))

    def beams(self, width: int) -> jax.stages.Compiled:
        """(kernel, rows, row_ids, logprobs) -> BeamOutput, of as many candidates as any stop ids ask for."""
        return self._get(f"beams-{width}", functools.partial(self._lower_beams, width))

    def copy_blocks(self, num_copies: int) -> jax.stages.Compiled:
        """(pool, src, dst) -> pool, donated."""
        return self._get(f"copy_blocks-{num_copies}", functools.partial(self._lower_copy, num_copies))

    def gather_blocks(self, count: int) -> jax.stages.Compiled:
        """(pool, ids) -> packed blocks; see `host_pool`."""
        return self._get(f"gather_blocks-{count}", functools.partial(self._lower_gather, count))

    def scatter_blocks(self, count: int) -> jax.stages.Compiled:
        """(pool, ids, packed blocks) -> pool, donated."""
        return self._get(f"scatter_blocks-{count}", functools.partial(self._lower_scatter, count))

    def set_token_counts(self) -> jax.stages.Compiled:
        """(state, slot, counts) -> state, donated."""
        return self._get("set_token_counts", functools.partial(self._lower_set, sampler.set_token_counts, jnp.int32))

    def set_logit_bias(self) -> jax.stages.Compiled:
        """(state, slot, bias) -> state, donated."""
        return self._get("set_logit_bias", functools.partial(self._lower_set, sampler.set_logit_bias, jnp.float32))

    def _get(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        if name not in self._compiled:
            began = time.perf_counter()
            with said_if_slow(f"compiling {name} ...", self.progress):
                self._compiled[name] = lower().compile()
            self.seconds[name] = time.perf_counter() - began
            self.compile_seconds += self.seconds[name]
        return self._compiled[name]

    def _lower_backbone(self, num_tokens: int) -> jax.stages.Lowered:
        params, pool, state, _ = self._shapes
        num_seqs = min(num_tokens, self._max_num_seqs)
        batch = Batch(
            token_ids=_ints(num_tokens),
            positions=_ints(num_tokens),
            slot_mapping=_ints(num_tokens),
            block_tables=_ints(num_seqs, self._max_blocks),
            seq_lens=_ints(num_seqs),
            query_start_loc=_ints(num_seqs + 1),
            logit_rows=_ints(self._max_num_seqs),
        )
        step = functools.partial(backbone, self._config, self.backend)
        return jax.jit(step, donate_argnums=3).lower(params, state.last_tokens, batch, pool)

    def _lower_sample(self, num_rows: int) -> jax.stages.Lowered:
        _, _, state, kernel = self._shapes
        fields: dict[str, Any] = {
            name: jax.ShapeDtypeStruct((num_rows, *shape), dtype) for name, (dtype, shape) in ROW_FIELDS.items()
        }
        rows = SampleRows(**fields)
        return jax.jit(sampler.sample, donate_argnums=3).lower(kernel, self._rows(self._max_num_seqs), rows, state)

    def _lower_select(self, num_tokens: int, num_rows: int) -> jax.stages.Lowered:
        kernel = self._shapes[3]
        hidden = jax.ShapeDtypeStruct((kernel.shape[1], num_tokens), kernel.dtype)
        return jax.jit(select_rows).lower(hidden, _ints(num_rows))

    def _lower_prompt_logprobs(self, num_rows: int) -> jax.stages.Lowered:
        return jax.jit(sampler.prompt_logprobs).lower(self._shapes[3], self._rows(num_rows), _ints(num_rows))

    def _lower_beams(self, width: int) -> jax.stages.Lowered:
        kernel = self._shapes[3]
        search = functools.partial(
            best_continuations, num_candidates=num_candidates(width, len(self._config.eos_token_ids))
        )
        logprobs = jax.ShapeDtypeStruct((width,), np.float32)
        return jax.jit(search).lower(kernel, self._rows(self._max_num_seqs), _ints(width), logprobs)

    def _lower_copy(self, num_copies: int) -> jax.stages.Lowered:
        name = self.backend.writer
        copy = functools.partial(pallas_kernels.copy_blocks, backend=name)
        return jax.jit(copy, donate_argnums=0).lower(self._shapes[1], _ints(num_copies), _ints(num_copies))

    def _lower_gather(self, count: int) -> jax.stages.Lowered:
        return jax.jit(gather_packed).lower(self._shapes[1], _ints(count))

    def _lower_scatter(self, count: int) -> jax.stages.Lowered:
        pool = self._shapes[1]
        blocks = tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.eval_shape(gather_packed, pool, _ints(count))
        )
        return jax.jit(scatter_packed, donate_argnums=0).lower(pool, _ints(count), blocks)

    def _lower_set(self, fn: Callable[..., SamplerState], dtype: Any) -> jax.stages.Lowered:
        state, kernel = self._shapes[2:]
        row = jax.ShapeDtypeStruct((kernel.shape[0],), dtype)
        return jax.jit(fn, donate_argnums=0).lower(state, _ints(), row)

    def _rows(self, num_rows: int) -> jax.ShapeDtypeStruct:
        kernel = self._shapes[3]
        return jax.ShapeDtypeStruct((num_rows, kernel.shape[1]), kernel.dtype)


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, np.int32)


def _shape_of(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
