"""The worked example: its numbers against arithmetic of their own, and claims that a wrong record breaks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments.worked_example import CPU_SET, Config, claims, plot, run, seed_weights
from pagedjax.errors import ConfigError


def _frame(config: Config) -> pd.DataFrame:
    return pd.DataFrame([dataclasses.asdict(config) | record for record in run(config)])


@pytest.fixture(scope="module")
def records() -> pd.DataFrame:
    return _frame(Config())


def _verdicts(records: pd.DataFrame) -> dict[str, str]:
    return {f"{claim.source}: {claim.text}": claim.verdict for claim in claims(records)}


def test_all_hold_but_the_seeds_equation(records: pd.DataFrame) -> None:
    verdicts = _verdicts(records)
    assert len(verdicts) == 21
    wrong = [text for text, verdict in verdicts.items() if verdict != "reproduced"]
    assert [text.split(",")[0] for text in wrong] == [
        "seed: by the seed's equation",
        "seed: for query token 5 of 10",
    ]
    assert {verdicts[text] for text in wrong} == {"not reproduced"}


def test_the_weights_by_hand(records: pd.DataFrame) -> None:
    tokens = records[records.part == "token"]
    exps = [math.exp(score) for score in tokens.score]
    assert tokens.weight.tolist() == pytest.approx([x / sum(exps) for x in exps])
    assert tokens.block.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    # Places 0 and 1 have a token in each of the three blocks, places 2 and 3 in two.
    for place in range(4):
        own = exps[place::4]
        assert tokens.seed_weight.tolist()[place::4] == pytest.approx([x / sum(own) for x in own])


def test_the_seeds_equation_is_right_where_blocks_hold_one_token():
    scores = [np.array([x]) for x in (0.3, -1.0, 2.0)]
    assert seed_weights(scores).sum() == pytest.approx(1)


def test_the_states_of_the_blocks(records: pd.DataFrame) -> None:
    steps = records[records.part == "state"]
    assert list(zip(steps.event, steps.filled, steps.new_blocks, strict=True)) == [
        ("prefill", "4 4 2", 3),
        ("decode", "4 4 3", 0),
        ("decode", "4 4 4", 0),
        ("full block", "4 4 4 1", 1),
        ("end", "", -4),
    ]
    assert steps.free.tolist() == [7, 7, 7, 6, 10]


@pytest.mark.parametrize(
    ("part", "match", "column", "value", "claim"),
    [
        ("attention", {"way": "paged_decode, xla"}, "error", 1e-4, "section 4.1: PagedAttention through blocks"),
        ("attention", {"way": "three steps"}, "error", 1e-9, "seed: scores by block"),
        ("state", {"event": "decode"}, "new_blocks", 1, "seed: block states"),
        ("state", {"event": "full block"}, "filled", "4 4 4 2", "seed: block states"),
        ("state", {"event": "end"}, "free", 9, "seed: block states"),
        ("waste", {"tokens": 17}, "waste", 16, "seed: a sequence wastes"),
        ("fig3", {"request": "A"}, "never_used", 2037, "Fig. 3: request A (max 2048): slots never used"),
        ("fig6", {"event": "prompt"}, "filled", "4 4", "Fig. 6: its last block holds"),
        ("fig8", {"event": "second writer"}, "copies", 1, "Fig. 8: the second writer"),
    ],
)
def test_a_wrong_record_breaks_its_claim_and_no_other(
    records: pd.DataFrame, part: str, match: dict[str, Any], column: str, value: Any, claim: str
) -> None:
    changed = records.copy()
    rows = changed.part == part
    for name, wanted in match.items():
        rows &= changed[name] == wanted
    assert rows.any()
    changed.loc[rows, column] = value
    before, after = _verdicts(records), _verdicts(changed)
    broken = [text for text in before if before[text] != after[text]]
    assert len(broken) == 1 and broken[0].startswith(claim)
    assert after[broken[0]] == "not reproduced"


def test_claims_without_their_records(records: pd.DataFrame) -> None:
    assert set(_verdicts(records[:0]).values()) == {"no records"}
    some = _verdicts(records[records.part == "fig8"])
    assert [verdict for text, verdict in some.items() if text.startswith("Fig. 8")] == ["reproduced"] * 4
    assert set(_verdicts(records.assign(num_tokens=11)).values()) == {"no records"}


@pytest.mark.parametrize("config", [Config(8, 4, query=8), Config(1, 1, query=1), Config(33, 16, 64, seed=3)], ids=str)
def test_other_numbers(config: Config) -> None:
    records = _frame(config)
    errors = records[records.part == "attention"].set_index("way").error
    assert errors["three steps"] < 1e-12 and errors["the paper's equation"] < 1e-12
    assert errors["paged_decode, reference"] < 1e-6 and errors["paged_decode, xla"] < 1e-6
    assert (errors["the seed's equation"] > 0.1) == (config.block_size > 1)
    assert (errors["up to block ceil(T/B), an earlier query"] < 1e-12) == (config.query == config.num_tokens)
    assert records[records.part == "state"].free.iloc[-1] == records[records.part == "state"].free_at_first.iloc[-1]
    plot(records)


def test_the_same_again_for_the_same_configuration():
    assert list(run(Config())) == list(run(Config()))
    assert list(CPU_SET) == [Config()]


@pytest.mark.parametrize(
    "wrong", [{"num_tokens": 0}, {"block_size": 3}, {"head_dim": 1.5}, {"query": 11}, {"seed": -1}]
)
def test_wrong_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Config(**wrong)
