"""Configurations: frozen, and validated when they are made.

Users write one flat `EngineConfig`; `CacheConfig` and `SchedulerConfig` are made from it by the engine, once the model
and the memory are known. Standard library only: `pagedjax.host` imports this module.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from pagedjax.errors import ConfigError
from pagedjax.scalars import is_int, is_number, make_plain, plain, shown

DTYPES = ("float32", "bfloat16")
QUANTIZED_KV_CACHE_DTYPES = ("int8", "float8_e4m3fn")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", *QUANTIZED_KV_CACHE_DTYPES)
ATTENTION_BACKENDS = ("auto", "reference", "xla", "triton", "mosaic_gpu", "tpu")
ROPE_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""What each way of scaling rotary positions needs, by its `rope_type`."""


def require(ok: bool, name: str, given: object, allowed: str) -> None:
    """Raises ConfigError naming the field, what was given and what is allowed."""
    if not ok:
        raise ConfigError(f"{name}={shown(given)} is not allowed: {name} must be {allowed}")


def _require_int(name: str, value: object, least: int) -> None:
    require(is_int(value, least), name, value, f"an integer of at least {least}")


def _require_optional_int(name: str, value: object, least: int) -> None:
    require(value is None or is_int(value, least), name, value, f"None or an integer of at least {least}")


def _require_seed(name: str, value: object, bits: int) -> None:
    require(is_int(value, 0) and value < 2**bits, name, value, f"an integer in [0, 2**{bits})")  # type: ignore[operator]


def _require_policies(preemption: object, batching: object) -> None:
    # These import this module.
    from pagedjax.host.batching import batching_names
    from pagedjax.host.preemption import policy_names

    for name, given, known in (("preemption", preemption, policy_names()), ("batching", batching, batching_names())):
        require(given in known, name, given, f"one of {', '.join(known)}")


def _require_allocator(name: object, prefix_caching: object, swap_space: object) -> None:
    from pagedjax.baselines import PAGED, allocator_names  # which imports this module

    known = allocator_names()
    require(name in known, "allocator", name, f"one of {', '.join(known)}")
    for other, value in (("prefix caching", prefix_caching), ("a swap space", swap_space)):
        allowed = f'"paged" where there is {other}: contiguous memory is neither shared nor swapped'
        require(name == PAGED or not value, "allocator", name, allowed)


def _require_path(config: object, name: str) -> None:
    value = getattr(config, name)
    ok = value is None or (isinstance(value, str | Path) and str(value) != "" and "\0" not in str(value))
    require(ok, name, value, "None or a path")
    if value is not None:
        object.__setattr__(config, name, str(value))


def _require_positive(name: str, value: object) -> None:
    require(is_number(value) and value > 0, name, value, "a positive number")  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family model.

    Attributes:
        model_type: family, a key of the model registry.
        rope_scaling: None, or (key, value) pairs of Hugging Face's `rope_scaling` (types "linear" and "llama3").
        bos_token_id: token that starts a text, if there is one.
        eos_token_ids: tokens that end a generation; may be empty.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope_scaling: tuple[tuple[str, object], ...] | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"

    def __post_init__(self) -> None:
        make_plain(self)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            _require_int(name, getattr(self, name), 1)
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads={self.num_heads}",
        )
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even (rotary embedding turns pairs)")
        for name in ("rope_theta", "rms_norm_eps"):
            _require_positive(name, getattr(self, name))
        tied = self.tie_word_embeddings
        require(isinstance(tied, bool), "tie_word_embeddings", tied, "True or False")
        require(
            isinstance(self.eos_token_ids, tuple | list), "eos_token_ids", self.eos_token_ids, "a tuple of token ids"
        )
        object.__setattr__(self, "eos_token_ids", tuple(plain(token) for token in self.eos_token_ids))
        beginnings = () if self.bos_token_id is None else (self.bos_token_id,)
        for name, ids in (("eos_token_ids", self.eos_token_ids), ("bos_token_id", beginnings)):
            for token in ids:
                ok = is_int(token, 0) and token < self.vocab_size
                require(ok, name, token, f"a token id, an integer in [0, {self.vocab_size})")
        if self.rope_scaling is not None:
            self._check_rope_scaling(dict(self.rope_scaling))

    def _check_rope_scaling(self, scaling: dict[str, object]) -> None:
        kind = scaling.get("rope_type")
        keys = ROPE_SCALING_KEYS.get(kind) if isinstance(kind, str) else None
        require(keys is not None, "rope_type", kind, " or ".join(map(repr, ROPE_SCALING_KEYS)))
        for key in keys or ():
            _require_positive(key, scaling.get(key))
        if kind == "llama3":
            low, high = (scaling[f"{end}_freq_factor"] for end in ("low", "high"))
            require(high > low, "high_freq_factor", high, f"above low_freq_factor={low}")  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache as the host sees it.

    Attributes:
        block_size: tokens per block, a power of two.
        num_blocks: usable blocks; the arrays hold one more, the null block.
        watermark: part of the blocks that admission keeps free (paper section 4.5 and its artifact: 1 %).
        enable_prefix_caching: keep and find again the full blocks of everything computed.
        prefix_hash_seed: of the digests by which blocks are found.
        num_host_blocks: blocks of the swap space in the host's memory.
        allocator: "paged", or one of `pagedjax.baselines`.
    """

    block_size: int
    num_blocks: int
    watermark: float = 0.01
    enable_prefix_caching: bool = False
    prefix_hash_seed: int = 0
    num_host_blocks: int = 0
    allocator: str = "paged"

    def __post_init__(self) -> None:
        make_plain(self)
        require(
            is_int(self.block_size, 1) and self.block_size & (self.block_size - 1) == 0,
            "block_size",
            self.block_size,
            "a power of two (1, 2, 4, ... tokens)",
        )
        _require_int("num_blocks", self.num_blocks, 1)
        ok = is_number(self.watermark) and 0.0 <= self.watermark < 1.0
        require(ok, "watermark", self.watermark, "in [0, 1)")
        caching = self.enable_prefix_caching
        require(isinstance(caching, bool), "enable_prefix_caching", caching, "True or False")
        _require_seed("prefix_hash_seed", self.prefix_hash_seed, 64)
        _require_int("num_host_blocks", self.num_host_blocks, 0)
        _require_allocator(self.allocator, self.enable_prefix_caching, self.num_host_blocks)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission keeps free."""
        return int(self.watermark * self.num_blocks)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold.

    Attributes:
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: tokens computed in one step, prefill and decode together.
        max_model_len: tokens, prompt and output together, that a sequence may reach.
        enable_chunked_prefill: False computes every prompt whole, in one step.
        preemption: a policy of `pagedjax.host.preemption`.
        batching: a policy of `pagedjax.host.batching`.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    enable_chunked_prefill: bool = True
    preemption: str = "auto"
    batching: str = "continuous"

    def __post_init__(self) -> None:
        make_plain(self)
        _require_policies(self.preemption, self.batching)
        chunked = self.enable_chunked_prefill
        require(isinstance(chunked, bool), "enable_chunked_prefill", chunked, "True or False")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            _require_int(name, getattr(self, name), 1)
        require(
            self.enable_chunked_prefill or self.max_num_batched_tokens >= self.max_model_len,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_model_len={self.max_model_len} when enable_chunked_prefill is False, "
            "or a long prompt could never be computed whole",
        )

    @classmethod
    def paper(cls) -> SchedulerConfig:
        """The paper's artifact: whole prompts, 2,560 tokens a step (the 1 % watermark is CacheConfig's default)."""
        return cls(max_num_seqs=256, max_num_batched_tokens=2560, max_model_len=2048, enable_chunked_prefill=False)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything a user can set, flat.

    Attributes:
        dtype: of weights and activations, "float32" or "bfloat16".
        kv_cache_dtype: of the pool; "auto" is `dtype`. "int8" and "float8_e4m3fn" come with a float32 scale for each
            token and head.
        block_size: tokens per block, a power of two.
        num_blocks: usable blocks of the pool. Neither this nor `pool_bytes`: half of the memory that is free.
        pool_bytes: memory for the pool in bytes, instead of `num_blocks`.
        max_model_len: tokens a sequence may reach; None is the model's own limit.
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: tokens computed in one step, prefill chunks and decodes together.
        enable_chunked_prefill: False computes every prompt whole, in one step.
        enable_prefix_caching: keep the full blocks of everything computed, until their memory is needed, and share
            them with requests that begin alike. (`register_prefix` shares single prefixes without it.)
        prefix_hash_seed: of the digests by which blocks are found; None draws one, so that nobody can foretell them.
        preemption: what becomes of the latest arrival when memory runs out: "recompute" frees its blocks and computes
            them again later, "swap" moves them to the swap space, "auto" swaps requests with several samples or beams
            and computes single ones again (the paper's). Where the swap space is full, all recompute.
        swap_space: bytes of the host's memory for blocks that are swapped out; 0 is none.
        allocator: "paged", or what it is compared with: memory reserved in one piece for a prompt and the longest
            output that the model allows ("orca-max"), the next power of two of `max_tokens` ("orca-pow2"), or
            `max_tokens` ("orca-oracle").
        batching: "continuous" lets requests join and leave at every step; "static" runs the earliest `max_num_seqs`
            together until the longest is done.
        watermark: part of the blocks that admission keeps free.
        attention_backend: "auto", or one of `pallas_kernels`: "reference", "xla", "triton", "mosaic_gpu" or "tpu".
        attention_interpret: run a Pallas backend in interpret mode, anywhere (slow; for tests and study).
        overlap: plan the next step while the device computes this one.
        seed: of requests that bring none of their own.
        event_log: file to which every event and every plan is appended, for `pagedjax replay`.
        snapshot_path: folder for the snapshots that are made every `snapshot_every` steps; the last two are kept.
        snapshot_every: steps between two snapshots.
    """

    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    pool_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
    prefix_hash_seed: int | None = None
    preemption: str = "auto"
    swap_space: int = 0
    allocator: str = "paged"
    batching: str = "continuous"
    watermark: float = 0.01
    attention_backend: str = "auto"
    attention_interpret: bool = False
    overlap: bool = True
    seed: int = 0
    event_log: str | None = None
    snapshot_path: str | None = None
    snapshot_every: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        require(
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            "kv_cache_dtype",
            self.kv_cache_dtype,
            f"one of {', '.join(KV_CACHE_DTYPES)}",
        )
        require(
            self.attention_backend in ATTENTION_BACKENDS,
            "attention_backend",
            self.attention_backend,
            f"one of {', '.join(ATTENTION_BACKENDS)}",
        )
        for name in ("num_blocks", "pool_bytes", "max_model_len"):
            _require_optional_int(name, getattr(self, name), 1)
        require(
            self.num_blocks is None or self.pool_bytes is None,
            "pool_bytes",
            self.pool_bytes,
            f"None when num_blocks={self.num_blocks} is given: either says the size of the pool",
        )
        if self.prefix_hash_seed is not None:
            _require_seed("prefix_hash_seed", self.prefix_hash_seed, 64)
        _require_int("swap_space", self.swap_space, 0)
        _require_policies(self.preemption, self.batching)
        _require_allocator(self.allocator, self.enable_prefix_caching, self.swap_space)
        require(
            self.swap_space > 0 or self.preemption != "swap",
            "swap_space",
            self.swap_space,
            'more than 0 bytes when preemption="swap"',
        )
        for name in ("enable_chunked_prefill", "enable_prefix_caching", "attention_interpret", "overlap"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _require_seed("seed", self.seed, 63)
        for name in ("event_log", "snapshot_path"):
            _require_path(self, name)
        _require_optional_int("snapshot_every", self.snapshot_every, 1)
        require(
            (self.snapshot_every is None) == (self.snapshot_path is None),
            "snapshot_every",
            self.snapshot_every,
            f"an integer of at least 1 where snapshot_path={shown(self.snapshot_path)} is a folder, and None elsewhere",
        )
        CacheConfig(self.block_size, self.num_blocks or 1, self.watermark)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _require_int(name, getattr(self, name), 1)

    def cache_config(self, num_blocks: int, num_host_blocks: int = 0) -> CacheConfig:
        """The paged cache of pools of that many blocks; draws the hashes' seed if none is given."""
        seed = secrets.randbits(64) if self.prefix_hash_seed is None else self.prefix_hash_seed
        return CacheConfig(
            self.block_size,
            num_blocks,
            self.watermark,
            self.enable_prefix_caching,
            seed,
            num_host_blocks,
            self.allocator,
        )

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """What a step may hold, for sequences of that many tokens."""
        return SchedulerConfig(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            max_model_len,
            self.enable_chunked_prefill,
            self.preemption,
            self.batching,
        )

    @property
    def pool_dtype(self) -> str:
        """The pool's dtype, "auto" resolved."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
