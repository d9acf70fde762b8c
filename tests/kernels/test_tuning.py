"""The table of measured configurations, and the search that fills it."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tune, tuning
from pallas_kernels.bench import timing
from pallas_kernels.chips import CHIPS

SHAPE = {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16, "dtype": "bfloat16", "pool_dtype": "int8"}
ENTRY = {
    "chip": "h100",
    "backend": "mosaic_gpu",
    "op": "paged_decode",
    "shape": SHAPE,
    "config": {"num_warps": 4, "num_stages": 2},
    "microseconds": 80.5,
    "default_microseconds": 100,
}


@dataclasses.dataclass(frozen=True)
class Config:
    num_warps: int = 4
    num_stages: int = 2
    colour: int = 7

    def __post_init__(self):
        if self.num_warps > 4:
            raise ValueError(f"num_warps is {self.num_warps}; it must be at most 4")


def write(path, *entries):
    path.write_text(json.dumps({"entries": entries}))
    return path


def operands():
    q = jax.ShapeDtypeStruct((3, 32, 128), jnp.bfloat16)
    return q, jax.ShapeDtypeStruct((9, 8, 16, 128), jnp.int8)


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Puts entries into the table that kernels look into, on a machine with an H100."""
    monkeypatch.setattr(tuning, "chip_here", lambda: CHIPS["h100"])

    def fill(*entries):
        monkeypatch.setattr(tuning, "_table", lambda: tuning.load(write(tmp_path / "table.json", *entries)))

    return fill


def test_the_table_in_the_package_is_valid():
    assert isinstance(tuning.load(tuning.TUNED), dict)


def test_a_winner_is_found_by_chip_op_and_shape(table):
    table(ENTRY)
    assert tuning.tuned(Config, "mosaic_gpu", "paged_decode", *operands()) == Config(4, 2)
    q, pool = operands()
    wider = jax.ShapeDtypeStruct((9, 8, 32, 128), jnp.int8)
    assert tuning.tuned(Config, "mosaic_gpu", "paged_decode", q, wider) is None
    assert tuning.tuned(Config, "triton", "paged_decode", q, pool) is None
    assert tuning.tuned(Config, "mosaic_gpu", "paged_attention", q, pool) is None


def test_where_no_chip_is_there_is_no_winner(table, monkeypatch):
    table(ENTRY)
    monkeypatch.setattr(tuning, "chip_here", lambda: None)
    assert tuning.tuned(Config, "mosaic_gpu", "paged_decode", *operands()) is None


@pytest.mark.parametrize("config", [{"num_warps": 8}, {"warps": 4}])
def test_a_winner_that_the_kernel_refuses_is_named(table, config):
    table(ENTRY | {"config": config})
    with pytest.raises(ValueError, match=r"tuned.json has .* for mosaic_gpu paged_decode: .*warps"):
        tuning.tuned(Config, "mosaic_gpu", "paged_decode", *operands())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chip": "h300"}, "chip is 'h300'; it must be one of a100-40gb"),
        ({"backend": "xla"}, "backend is 'xla'; it must be one of triton"),
        ({"op": "gather_blocks"}, "op is 'gather_blocks'; it must be one of paged_decode"),
        ({"op": "copy_blocks"}, "shape is .* it must have block_bytes, pool_dtype"),
        ({"config": {}}, "config is {}; it must have integers"),
        ({"config": {"num_warps": True}}, "it must have integers"),
        ({"microseconds": 0}, "microseconds is 0; it must be above 0"),
        ({"note": "fast"}, "it must be an object of backend, chip, config"),
    ],
)
def test_a_damaged_entry_is_refused_by_number_and_field(tmp_path, change, message):
    with pytest.raises(ValueError, match="entry 1 of table.json: .*" + message):
        tuning.load(write(tmp_path / "table.json", ENTRY | {"chip": "h200"}, ENTRY | change))


def test_two_entries_for_one_place_are_refused(tmp_path):
    with pytest.raises(ValueError, match="entry 1 of table.json is there twice: h100 mosaic_gpu paged_decode"):
        tuning.load(write(tmp_path / "table.json", ENTRY, ENTRY))


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="table.json is no table of tuned configurations"):
        tuning.load(path)


def test_entries_are_what_load_reads(tmp_path):
    table = tuning.load(write(tmp_path / "a.json", ENTRY, ENTRY | {"chip": "h200"}))
    assert tuning.load(write(tmp_path / "b.json", *tuning.entries(table))) == table


def test_a_default_that_wins_takes_an_old_winner_out(tmp_path):
    table = tuning.load(write(tmp_path / "a.json", ENTRY, ENTRY | {"chip": "h200"}))
    place = tuning.key("h100", "mosaic_gpu", "paged_decode", SHAPE)
    assert {place.chip for place in tuning.merged(table, [(place, None)])} == {"h200"}
    faster = tuning.Winner({"num_warps": 1}, 10, 100)
    assert tuning.merged(table, [(place, faster)])[place] == faster and table[place] != faster


@pytest.mark.parametrize(
    ("op", "shapes", "expected"),
    [
        ("flash_attention", [(2, 5, 9, 64), (2, 7, 3, 64)], {"heads": 9, "kv_heads": 3, "head_dim": 64}),
        ("write_kv", [(5, 3, 64), (11, 3, 32, 64)], {"kv_heads": 3, "head_dim": 64, "block_size": 32}),
        ("copy_blocks", [(11, 3, 32, 64)], {"block_bytes": 3 * 32 * 64 * 4}),
    ],
)
def test_shape_of_each_op(op, shapes, expected):
    shape = tuning.shape_of(op, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert set(shape) == set(tuning.SHAPE_FIELDS[op]) and shape["pool_dtype"] == "float32"
    assert {name: shape[name] for name in expected} == expected


def test_candidates_are_what_the_configuration_takes():
    found = tune.candidates(Config)
    assert {config.num_warps for config in found} == {2, 4}
    assert {config.num_stages for config in found} == set(tune.VALUES["num_stages"])
    assert {config.colour for config in found} == {7} and len(found) == len(set(found))


def search(monkeypatch, seconds, results=None):
    """`best` over configurations that take these seconds; what `results` names computes something else, or fails."""

    def call(config):
        result = (results or {}).get(config, 1.0)

        def run():
            if isinstance(result, Exception):
                raise result
            return jnp.full(4, result)

        run.config = config
        return run

    def alternate(calls, rounds):
        return {name: [seconds[call.config]] * rounds for name, call in calls.items()}

    monkeypatch.setattr(tune, "alternate", alternate)
    return tune.best(call, [config for config in seconds if config is not None], rounds=3)


def test_the_fastest_wins(monkeypatch):
    slow, fast = Config(1), Config(2)
    winner, seconds = search(monkeypatch, {None: 2.0, slow: 3.0, fast: 1.0})
    assert winner == fast and seconds == {None: 2.0, slow: 3.0, fast: 1.0}


def test_what_is_hardly_faster_is_noise(monkeypatch):
    assert search(monkeypatch, {None: 2.0, Config(1): 1.99})[0] is None


def test_what_fails_or_is_wrong_does_not_win(monkeypatch, capsys):
    failing, wrong = Config(1), Config(2)
    results = {failing: RuntimeError("out of shared memory\nand more"), wrong: 1.5}
    winner, seconds = search(monkeypatch, {None: 2.0, failing: 1.0, wrong: 1.0}, results)
    assert winner is None and set(seconds) == {None}
    lines = capsys.readouterr().err.splitlines()
    assert "out of shared memory" in lines[0] and "0.5 off the default's" in lines[1] and len(lines) == 2


def test_without_a_chip_one_line_says_so(capsys):
    assert jax.default_backend() == "cpu"
    assert tune.main([]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert tune.main(["--chips", "h100"]) == 1
    assert "this needs the chip h100; JAX runs on cpu here" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--op", "gather"], ["--chips", "h300"], ["--json", "/nowhere/at/all.json"]])
def test_wrong_arguments_are_one_line_and_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        tune.main(arguments)
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_samples_are_taken_in_turn():
    order = []
    samples = timing.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert {name: len(times) for name, times in samples.items()} == {"a": 2, "b": 2}
    assert order[:4] == ["a", "a", "b", "b"]  # each is warmed
    turns = "".join(order[4:])
    assert turns.replace("a" * timing.MAX_CALLS, "A").replace("b" * timing.MAX_CALLS, "B") == "ABAB"


def test_ratios_are_paired():
    assert timing.paired_ratio([2.0, 30.0, 6.0], [1.0, 10.0, 1.5]) == 3.0
