"""The table of chips."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels.chips import CHIPS, chip_here, chip_named

NAMES = ["a100-40gb", "a100-80gb", "h100", "h200", "b200", "v4", "v5e", "v5p", "v6e", "v7"]


def test_all_chips_are_there_and_complete():
    assert list(CHIPS) == NAMES
    for chip in CHIPS.values():
        assert chip.cores > 0 and chip.bandwidth > 5e11 and chip.memory_bytes >= 16 << 30
        assert chip.peak_flops["bfloat16"] > chip.peak_flops["float32"] > 0
        if chip.platform == "gpu":
            assert chip.compute_capability and chip.topology is None and chip.fp32_lanes and chip.cache_bytes
            assert chip.shared_memory_bytes == chip.fast_memory_bytes + 1024
        else:
            assert chip.compute_capability is None and chip.topology


def test_no_device_is_two_chips():
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(("name", "architecture"), [("a100-40gb", "sm_80"), ("h200", "sm_90a"), ("b200", "sm_100a")])
def test_architecture_is_what_ptxas_calls_it(name, architecture):
    assert chip_named(name).architecture == architecture


def test_only_chips_with_fp8_units_have_a_rate_for_it():
    with_fp8 = {name for name, chip in CHIPS.items() if "float8_e4m3fn" in chip.peak_flops}
    assert with_fp8 == {"h100", "h200", "b200", "v6e", "v7"}


def test_an_unknown_chip_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="chip is 'h300'; it must be one of a100-40gb, .*v7"):
        chip_named("h300")


def test_the_chip_here_is_known_by_its_device_kind(monkeypatch):
    class Device:
        device_kind = "NVIDIA H200"

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert chip_here() is CHIPS["h200"]
    monkeypatch.setattr(Device, "device_kind", "cpu")
    assert chip_here() is None
