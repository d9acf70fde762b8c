"""An engine that cannot fit is refused before anything is allocated, in numbers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import TINY, Runs

from pagedjax.config import EngineConfig
from pagedjax.device import memory
from pagedjax.device.kv_pool import KVPool, PoolLayout, plan_pool
from pagedjax.device.memory import FreeMemory, free_memory
from pagedjax.errors import ConfigError

GIB = 1 << 30
HOST = FreeMemory(GIB, GIB, True, "host memory")
CHIP = FreeMemory(4 * GIB, GIB, False, "memory of a chip")


def plan(free: FreeMemory, **config: Any) -> Any:
    return plan_pool(EngineConfig(**{"block_size": 4, "max_num_seqs": 8, **config}), TINY, 256, free)


@pytest.mark.parametrize("free", [HOST, CHIP], ids=["host", "chip"])
@pytest.mark.parametrize("num_blocks", [10**7, 10**12, 10**30])
def test_too_many_blocks_are_refused_with_what_is_asked_free_and_possible(free: FreeMemory, num_blocks: int) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(free, num_blocks=num_blocks)
    message = str(caught.value)
    assert message.startswith(f"num_blocks={num_blocks} with block_size=4 is not allowed here")
    assert f"would take {(num_blocks + 1) * 2048} bytes" in message
    assert f"but {free.device} bytes ({free.device // GIB}.0 GiB) of {free.device_name} are free" in message
    largest = int(re.findall(r"largest num_blocks that fits is (\d+)", message)[0])
    assert plan(free, num_blocks=largest).num_blocks == largest
    assert 0.9 * free.device < largest * 2048 < free.device
    with pytest.raises(ConfigError, match="largest num_blocks"):
        plan(free, num_blocks=largest + 1)
    assert plan(free, pool_bytes=int(re.findall(r"\(pool_bytes=(\d+)\)", message)[0])).num_blocks == largest


def test_bytes_and_block_sizes_are_refused_alike() -> None:
    with pytest.raises(ConfigError, match=r"pool_bytes=\d+ with block_size=4 is not allowed here.*fits is \d+"):
        plan(HOST, pool_bytes=100 * GIB)
    with pytest.raises(
        ConfigError, match=r"num_blocks=1 with block_size=1073741824 .* not even one block of 1073741824"
    ):
        plan(HOST, num_blocks=1, block_size=1 << 30)
    with pytest.raises(ConfigError, match="leaves no block: one block of 1073741824 tokens takes"):
        plan(HOST, block_size=1 << 30)


def test_a_pool_whose_rows_pass_32_bits_is_refused_however_large_the_memory() -> None:
    endless = FreeMemory(1 << 60, 1 << 60, True, "host memory")
    with pytest.raises(ConfigError, match="fits is 268435454 .*, since a pool's rows are counted in 32 bits"):
        plan(endless, num_blocks=2**28)  # of 4 slots and 2 heads
    assert plan(endless, num_blocks=2**28 - 2).num_blocks == 2**28 - 2


@pytest.mark.parametrize("free", [HOST, CHIP], ids=["host", "chip"])
@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_other_settings_are_refused_when_their_arrays_do_not_fit(free: FreeMemory, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(free, **{name: 10**9})
    message = str(caught.value)
    assert message.startswith(f"{name}=1000000000 is not allowed here") and f"but {free.device} bytes" in message
    largest = int(re.findall(rf"largest {name} that fits is (\d+)", message)[0])
    with pytest.raises(ConfigError, match=f"largest {name} that fits is {largest}$"):
        plan(free, **{name: largest + 1})
    fits = dataclasses.replace(EngineConfig(block_size=4, max_num_seqs=8), **{name: largest})
    memory.check_needs(memory.plan_needs(fits, TINY, 256), free)


def test_an_endless_max_model_len_is_named_too() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs=8 .* with max_model_len=1000000000000 take .* give smaller"):
        plan_pool(EngineConfig(max_num_seqs=8), TINY, 10**12, HOST)


def test_the_default_pool_leaves_room_for_the_rest() -> None:
    model_len = 1 << 20
    pool = plan_pool(EngineConfig(max_num_seqs=64), TINY, model_len, HOST)
    beside = memory.check_needs(memory.plan_needs(EngineConfig(), TINY, model_len), HOST)
    assert pool.chosen_by == f"half of the {GIB - beside} bytes that are free"
    assert pool.pool_bytes <= (GIB - beside) // 2 < pool.pool_bytes + pool.bytes_per_block


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_blocks": 10**12}, "num_blocks=1000000000000 with block_size=4 is not allowed here: the pool would take"),
        ({"max_num_seqs": 10**9}, "max_num_seqs=1000000000 is not allowed here"),
        ({"max_num_batched_tokens": 10**9}, "max_num_batched_tokens=1000000000 is not allowed here"),
    ],
)
def test_an_engine_asks_the_machine_it_is_on(runs: Runs, config: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.engine(**config)


def test_memory_that_went_meanwhile_is_named() -> None:
    with pytest.raises(ConfigError, match=r"num_blocks=1000000000000: the pool's \d+ bytes .* cannot be allocated"):
        KVPool.create(PoolLayout.of(TINY, EngineConfig(block_size=4)), 10**12)


def test_a_chip_counts_for_itself_and_a_cpu_as_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chip = SimpleNamespace(
        platform="gpu", device_kind="chip", memory_stats=lambda: {"bytes_limit": 900, "bytes_in_use": 200}
    )
    free = free_memory(chip)
    assert (free.device, free.shared, free.device_name) == (700, False, "memory of chip") and free.host > 700
    cpu = free_memory(SimpleNamespace(platform="cpu"))
    assert cpu.device == cpu.host and cpu.shared
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert memory._cgroup_free_bytes(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_free_bytes(tmp_path) is None
    monkeypatch.setattr(memory, "_cgroup_free_bytes", lambda: 700)
    assert free_memory(SimpleNamespace(platform="cpu")).host == 700


def test_bytes_of_a_block_are_counted_as_stored() -> None:
    rows = 2 * 2 * 2 * 4  # K and V, layers, heads, tokens; each of 16 numbers

    def bytes_per_block(backend: str = "xla", **config: Any) -> int:
        return PoolLayout.of(TINY, EngineConfig(block_size=4, **config), backend).bytes_per_block

    assert bytes_per_block() == rows * 16 * 4
    assert bytes_per_block(kv_cache_dtype="bfloat16") == rows * 16 * 2
    assert bytes_per_block(kv_cache_dtype="int8") == rows * (16 + 4), "a scale for each token and head"
    assert bytes_per_block("tpu") == rows * 128 * 4, "rows of 128 numbers"
