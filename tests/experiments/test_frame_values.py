"""Experiments found or complained of, and configurations out of texts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.frame.experiment import find_all, find_experiment
from experiments.frame.tasks import Task
from experiments.frame.values import (
    make_configs,
    parse_seeds,
    parse_settings,
    parse_sweeps,
    parse_value,
    plain_values,
    record_line,
)
from pagedjax.errors import ConfigError


@dataclass(frozen=True)
class Config:
    block_size: int = 16
    rate: float = 2.0
    causal: bool = False
    trace: str = "sharegpt"
    limit: int | None = None
    share: float | str = 0.5


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("block_size", "32", 32),
        ("rate", "3", 3.0),
        ("rate", "1e-3", 0.001),
        ("causal", "True", True),
        ("causal", "false", False),
        ("trace", "alpaca", "alpaca"),
        ("trace", "a=b", "a=b"),
        ("limit", "none", None),
        ("limit", "7", 7),
        ("share", "0.25", 0.25),
        ("share", "all", "all"),
    ],
)
def test_value(key: str, text: str, value: object) -> None:
    (found,) = parse_settings(Config, [f"{key}={text}"]).values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("block_size", "16.0", "block_size must be of type int"),
        ("block_size", "", "block_size must be of type int"),
        ("block_size", "none", "block_size must be of type int"),
        ("rate", "fast", "rate must be of type float"),
        ("rate", "nan", "rate must be of type float"),
        ("rate", "inf", "rate must be of type float"),
        ("causal", "1", "causal must be of type bool"),
        ("limit", "few", "limit must be of type int or none"),
        ("trace", "\udcff", "trace must be of type str"),
        ("blocksize", "16", "no key 'blocksize' (did you mean 'block_size'?): the keys are block_size, rate"),
    ],
)
def test_value_that_is_not_allowed(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_value(Config, key, text)
    assert message in str(caught.value)


@pytest.mark.parametrize("pair", ["rate", "=3", " =3", ""])
def test_no_pair(pair: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form key=value"):
        parse_settings(Config, [pair])


def test_sweep_has_each_value_once_in_the_order_given() -> None:
    assert parse_sweeps(Config, ["block_size=32, 8,16,8", "causal=true,false"]) == {
        "block_size": [32, 8, 16],
        "causal": [True, False],
    }


def test_sweep_leaves_no_value_out() -> None:
    with pytest.raises(ConfigError, match="block_size='' is not allowed"):
        parse_sweeps(Config, ["block_size=8,,16"])
    assert parse_sweeps(Config, ["trace=,alpaca"]) == {"trace": ["", "alpaca"]}


@pytest.mark.parametrize("sweep", ["rate=", "rate=,", "rate= , "])
def test_empty_sweep(sweep: str) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        parse_sweeps(Config, [sweep])


def test_key_swept_twice() -> None:
    with pytest.raises(ConfigError, match="rate=... is given twice"):
        parse_sweeps(Config, ["rate=1", "rate=2"])


@pytest.mark.parametrize(
    ("text", "seeds"), [("0..4", [0, 1, 2, 3, 4]), ("3", [3]), ("2..2", [2]), ("5,0,5", [5, 0]), (" 1..2 ", [1, 2])]
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    "text", ["", "4..0", "0..", "..4", "0-4", "a..b", "0...4", "-1..3", "1.5", "0,,1", "0..10000", "0.." + "9" * 5000]
)
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="it must be like 0..4, or 0,2,5"):
        parse_seeds(text)


def test_configurations_are_all_combinations() -> None:
    made = make_configs(Config, {"trace": "alpaca"}, {"block_size": [8, 16], "causal": [False, True]})
    assert [(c.trace, c.block_size, c.causal) for c in made] == [
        ("alpaca", 8, False),
        ("alpaca", 8, True),
        ("alpaca", 16, False),
        ("alpaca", 16, True),
    ]


def test_key_that_is_set_and_swept() -> None:
    with pytest.raises(ConfigError, match="rate is both set and swept"):
        make_configs(Config, {"rate": 1.0}, {"rate": [1.0, 2.0]})


def test_too_many_configurations_are_not_made() -> None:
    with pytest.raises(ConfigError, match="1,000,000,000,000 configurations; at most 100,000"):
        make_configs(Config, {}, {"block_size": list(range(10**6)), "limit": list(range(10**6))})


def test_a_configurations_own_complaint() -> None:
    @dataclass(frozen=True)
    class Picky:
        size: int

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError("size below 0")

    with pytest.raises(ConfigError, match="size below 0"):
        make_configs(Picky, {"size": -1}, {})
    with pytest.raises(ConfigError, match="missing 1 required positional argument: 'size'"):
        make_configs(Picky, {}, {})


def test_equal_configurations_are_stored_alike() -> None:
    values = [plain_values(c) for c in (Config(rate=4), Config(rate=4.0), Config(rate=np.float32(4)))]  # type: ignore[arg-type]
    assert {json.dumps(each) for each in values} == {json.dumps(plain_values(Config(rate=4.0)))}
    assert json.dumps(plain_values(Config(share=4))) == json.dumps(plain_values(Config(share=4.0)))


def test_configuration_that_cannot_be_stored() -> None:
    for config in (Config(rate=float("nan")), Config(trace=Path("x"))):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="a configuration has finite numbers, texts, booleans and None"):
            plain_values(config)


# ---------------------------------------------------------------------- records


def test_record_line() -> None:
    record = {"n": np.int64(3), "x": np.float32(0.5), "yes": np.bool_(True), "text": "ä\u2028\n", "none": None}
    line = record_line(record)
    assert "\n" not in line
    assert json.loads(line) == {"n": 3, "x": 0.5, "yes": True, "text": "ä\u2028\n", "none": None}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"a": 1, "rate": float("nan")}, "'rate': nan"),
        ({"rate": float("-inf")}, "'rate': -inf"),
        ({"rate": np.float64("nan")}, "'rate': nan"),
        ({"where": Path("x")}, "'where': PosixPath('x')"),
        ({"many": [1, 2]}, "'many': [1, 2]"),
        ({1: 2}, "1: 2"),
        ([1], "a record must be a dict, not [1]"),
        ("power", "a record must be a dict, not 'power'"),
    ],
    ids=["nan", "inf", "numpy", "path", "list", "key", "no-dict", "text"],
)
def test_record_that_cannot_be_written(record: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        record_line(record)
    assert message in str(caught.value)


# ---------------------------------------------------------------------- files


def test_new_experiment_needs_one_file(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.main("list") == 0
    assert "Squares of numbers: what they are." in capsys.readouterr().out
    assert lab.main("list", "squares", "--json", str(lab.folder / "keys.json")) == 0
    keys = {row["key"]: row for row in json.loads((lab.folder / "keys.json").read_text())}
    assert keys["number"] == {"key": "number", "type": "int", "default": "1", "what": "to be squared."}
    assert keys["bound"] == {
        "key": "bound",
        "type": "int or none",
        "default": "None",
        "what": "that is not used, or only in words.",
    }


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("CPU_SET = [", "CPU_SET = [[", "bad.py cannot be loaded: SyntaxError: "),
        ("import time\n", "import time, no_such_module\n", "bad.py, line 8, cannot be loaded: ModuleNotFoundError"),
        ("import time\n", "import time; sys.exit(0)\n", "bad.py, line 8, cannot be loaded: SystemExit"),
        ("def claims", "def claim", "bad.py is no experiment: it has no claims"),
        ("frozen=True", "", "bad.py is no experiment: its Config is no frozen dataclass"),
        ("Config(3)]", "3]", "bad.py is no experiment: its CPU_SET has 3, which is no Config"),
        ("CPU_SET = [Config(1), Config(2), Config(3)]", "CPU_SET = 3", "its CPU_SET is no list"),
        ("Config(3)]", "Config(factor=float('inf'))]", "its CPU_SET has factor=inf is not allowed"),
        ("def claims", "TIMED = 'result'\ndef claims", "its TIMED is no list of columns"),
        ("def claims", "plot = 3\ndef claims", "its plot is no function"),
        ("        number: to be squared.\n", "", "bad.py says nothing of the keys number"),
        ('"""Squares of numbers: what they are."""', "", "bad.py says nothing of what it is"),
    ],
    ids=[
        "syntax",
        "import",
        "exit",
        "part",
        "frozen",
        "member",
        "set",
        "infinite",
        "timed",
        "function",
        "key",
        "title",
    ],
)
def test_bad_file_leaves_the_others_usable(
    lab: Any, capsys: pytest.CaptureFixture[str], before: str, after: str, message: str
) -> None:
    lab.edit(before, after, "bad")
    experiments, wrong = find_all()
    assert [each.name for each in experiments] == ["squares"]
    assert len(wrong) == 1 and message in wrong[0]
    assert lab.main("list") == 1
    output = capsys.readouterr()
    assert "squares" in output.out and message in output.err
    assert find_experiment("squares").name == "squares"
    with pytest.raises(ConfigError) as caught:
        find_experiment("bad")
    assert message in str(caught.value)


def test_file_that_is_not_text_leaves_the_others_usable(lab: Any) -> None:
    (lab.folder / "bad.py").write_bytes(b"\xff\xfe\nclass Config: ...\n")
    (lab.folder / ".#squares.py").symlink_to("nobody@nowhere")  # an editor's lock
    (lab.folder / "gone.py").symlink_to("nowhere.py")
    experiments, wrong = find_all()
    assert [each.name for each in experiments] == ["squares"]
    assert len(wrong) == 1 and "bad.py cannot be loaded" in wrong[0]


def test_two_of_one_name(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("squares", "cubes"):
        (other / f"{name}.py").write_text((lab.folder / "squares.py").read_text())
    monkeypatch.setenv("PAGEDJAX_EXPERIMENTS", f"{lab.folder}:{other}:{lab.folder}")
    with pytest.raises(ConfigError, match=f"several experiments are named squares: {lab.folder}/.*, {other}/"):
        find_experiment("squares")
    assert find_experiment("cubes").path == other / "cubes.py"
    experiments, wrong = find_all()
    assert [each.name for each in experiments] == ["cubes"] and len(wrong) == 1


@pytest.mark.parametrize("command", ["list", "run", "reproduce", "report", "compare"])
def test_help(lab: Any, capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        lab.main(command, "--help")
    assert caught.value.code == 0
    assert f"usage: python -m experiments {command}" in capsys.readouterr().out


def test_unknown_experiment(lab: Any) -> None:
    with pytest.raises(ConfigError, match=r"no experiment 'square' \(did you mean 'squares'\?\): they are squares"):
        find_experiment("square")
    lab.write("helper", "def run(config): ...\n")
    with pytest.raises(ConfigError, match=r"no experiment 'helper' \(.*helper.py has no class Config\)"):
        find_experiment("helper")


def test_folder_that_is_none(lab: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PAGEDJAX_EXPERIMENTS", "/no/such/folder")
    assert lab.main("list") == 2
    assert "PAGEDJAX_EXPERIMENTS names '/no/such/folder', which is no folder" in capsys.readouterr().err


def test_relative_folder_means_the_same_elsewhere(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lab.folder.parent)
    monkeypatch.setenv("PAGEDJAX_EXPERIMENTS", lab.folder.name)
    assert Path(Task.of(lab.squares, lab.squares.config_class()).path) == lab.folder / "squares.py"


def test_cpu_set_has_each_configuration_once(lab: Any) -> None:
    lab.edit("Config(3)]", "Config(3), Config(2, factor=1)]", "twice")
    assert [config.number for config in find_experiment("twice").cpu_set] == [1, 2, 3]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["squares", "--set", "numbr=3"], "there is no key 'numbr' (did you mean 'number'?)"),
        (["squares", "--set", "number=x"], "number='x' is not allowed: number must be of type int"),
        (["squares", "--sweep", "number="], "is empty"),
        (["squares", "--set", "number=3", "--sweep", "number=1,2"], "number is both set and swept"),
        (["squares", "--sweep", "seed=1,2", "--seeds", "0..4"], "seed is both swept and given by --seeds"),
        (["squares", "--set", "seed=1", "--seeds", "0..4"], "seed is both set and swept"),
        (["squares", "--seeds", "4..0"], "--seeds '4..0' is not allowed"),
        (["seedless", "--seeds", "0..4"], "--seeds: seedless has no key seed"),
        (["squares", "--address", "127.0.0.1:1"], "it needs --executor ray"),
        (["square"], "there is no experiment 'square'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_argument_runs_nothing(
    lab: Any, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    source = (lab.folder / "squares.py").read_text()
    lab.write("seedless", source.replace("    seed: int = 0\n", "").replace("        seed: of nothing.\n", ""))
    assert lab.main("run", *args) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1
    assert not lab.store_path.exists()
