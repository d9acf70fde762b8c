"""Traffic of attention: the formulas' values, the kernels' agreement with them, and what the claims make of records."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import pytest

from experiments import attention_io
from experiments.attention_io import CPU_SET, Config, Tiling, claims, formulas, plot, run
from pagedjax.errors import ConfigError


def _frame(*configs: Config) -> pd.DataFrame:
    return pd.DataFrame([dataclasses.asdict(config) | record for config in configs for record in run(config)])


@pytest.fixture(scope="module")
def records() -> pd.DataFrame:
    """Of what the claims are about."""
    return _frame(Config(4096), Config(8192), Config(256, 64, causal=True))


def _verdicts(records: pd.DataFrame) -> dict[str, tuple[float | None, str]]:
    return {claim.text: (claim.ours, claim.verdict) for claim in claims(records)}


def _claim(records: pd.DataFrame, *words: str) -> Any:
    (found,) = [claim for claim in claims(records) if all(word in claim.text for word in words)]
    return found


def test_the_formulas_at_the_seeds_size():
    found = formulas(Config())
    assert found["list"] == 69_206_016  # what the seed's list adds up to
    assert found["half_list"] == 34_078_720  # the seed's "34M"
    assert found["minimum"] == 2_097_152  # the seed's "2M"
    assert found["flash1"] == 2 * 524_288 + 22 * 3 * 524_288 == 35_651_584  # Bc = 192
    assert found["bound"] == pytest.approx(2.796e6, rel=1e-3)


def test_the_tilings_formula_by_hand():
    assert Tiling(128, 1, 64).elements(300, causal=False) == 2 * 64 * (300 + 3 * 300)
    assert Tiling(128, 1, 64).elements(300, causal=True) == 2 * 64 * (300 + 128 + 256 + 300)
    assert Tiling(128, 64, 64, pads_queries=True).elements(300, causal=True) == 2 * 64 * (384 + 128 + 256 + 300)
    # Three tiles of queries see one tile of keys, which stays for the fourth; that one sees two.
    padded = Tiling(100, 300, 64, True, True, True)
    assert padded.elements(400, causal=True) == 2 * 64 * (400 + 600)
    assert padded.elements(300, causal=False) == 2 * 64 * (300 + 300)


@pytest.mark.parametrize(
    "config", [Config(200, 64), Config(700, 96, causal=True), Config(300, dtype="float32")], ids=str
)
def test_kernels_agree_with_the_formula_for_their_tiling(config: Config) -> None:
    found = {record["quantity"]: record for record in run(config) if record["source"] == "counted"}
    assert set(found) == {"triton", "mosaic_gpu", "tpu"} - ({"mosaic_gpu"} if config.dtype == "float32" else set())
    for record in found.values():
        assert record["ratio"] == pytest.approx(1, abs=0.02)
        assert record["bytes"] == pytest.approx(record["elements"] * (4 if config.dtype == "float32" else 2))


def test_the_same_again_for_the_same_configuration():
    assert list(run(Config(130, 64))) == list(run(Config(130, 64)))


def test_what_holds_and_what_does_not(records: pd.DataFrame) -> None:
    verdicts = {text: verdict for text, (_, verdict) in _verdicts(records).items()}
    wrong = [text for text, verdict in verdicts.items() if verdict != "reproduced"]
    assert len(verdicts) == 12
    assert [text.split(" at ")[0] for text in wrong] == [
        "standard attention moves 34M elements",
        "FlashAttention moves about 2M elements",
        "FlashAttention's traffic is O(Td): twice the tokens, twice the elements (exponent 1)",
        "standard attention moves 17 times as many elements as FlashAttention",
    ]


def test_a_changed_record_changes_a_verdict(records: pd.DataFrame) -> None:
    assert _claim(records, "the tpu kernel").verdict == "reproduced"
    changed = records.copy()
    changed.loc[changed.quantity == "tpu", "ratio"] *= 1.03
    assert _claim(changed, "the tpu kernel").verdict == "not reproduced"
    changed = records.copy()
    changed.loc[changed.quantity == "triton", "elements"] = 2.1e6
    assert _claim(changed, "about 2M").verdict == "reproduced"
    assert _claim(changed, "Theta").verdict == "not reproduced"


def test_claims_without_their_records(records: pd.DataFrame) -> None:
    few = records[records.seq_len == 256]
    assert _claim(few, "the triton kernel").verdict == "reproduced"
    assert _claim(few, "34M elements").ours is None
    assert _claim(records[records.seq_len != 8192], "O(Td)").verdict == "no records"
    assert all(claim.verdict == "no records" for claim in claims(records[:0]))


def test_other_problems_do_not_pass_for_the_claims_own(records: pd.DataFrame) -> None:
    for column, value in (("causal", True), ("dtype", "float16"), ("sram_elements", 1), ("head_dim", 64)):
        assert _claim(records.assign(**{column: value}), "34M elements").ours is None


def test_the_figure_has_the_formulas_and_what_was_counted(records: pd.DataFrame) -> None:
    (axes,) = plot(records).axes
    assert len(axes.lines) == len(axes.texts) == 5
    assert plot(records[records.source == "counted"]).axes[0].texts[0].get_text() == "our kernels, counted"


@pytest.mark.parametrize(
    "wrong", [{"seq_len": 0}, {"head_dim": 4}, {"causal": 1}, {"dtype": "int8"}, {"sram_elements": -1}]
)
def test_wrong_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Config(**wrong)


def test_the_cpu_set_has_what_the_claims_need():
    assert {Config(4096), Config(8192)} <= set(CPU_SET)
    assert len(set(CPU_SET)) == len(CPU_SET)
    assert attention_io.__doc__
