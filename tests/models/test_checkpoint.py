"""Converted checkpoints: written once, restored in either dtype and any sharding, never half."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_model import CONFIG, random_tensors

from pagedjax.cli import main
from pagedjax.errors import CheckpointError
from pagedjax.models import loader
from pagedjax.models.checkpoint import MANIFEST, save_checkpoint
from pagedjax.models.loader import load_model
from pagedjax.models.registry import KNOWN_MODELS, WheelRecipe
from pagedjax.models.weights import build_params, keep


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a tiny model, without a tokenizer."""
    params = build_params(CONFIG, random_tensors(CONFIG).__getitem__, keep, desc="", progress=False)
    save_checkpoint(tmp_path / "checkpoint", CONFIG, params, None, {"name": "test"})
    return tmp_path / "checkpoint"


def count_conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def counted(folder: Path, *args: object) -> None:
        made.append(folder.name)
        save_checkpoint(folder, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(loader, "save_checkpoint", counted)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restored_as_saved_in_the_wanted_dtype(folder: Path, dtype: str):
    model = load_model(folder, dtype=dtype, progress=False)
    assert model.config == CONFIG
    assert model.tokenizer is None
    assert model.source == {"kind": "checkpoint", "name": str(folder), "made_from": {"name": "test"}}
    expected = build_params(CONFIG, random_tensors(CONFIG).__getitem__, keep, desc="", progress=False)
    assert jax.tree.structure(model.params) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(model.params), jax.tree.leaves(expected), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want.astype(dtype))


def test_restored_with_the_sharding_that_is_given(folder: Path):
    script = (
        "import jax, sys\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "from pagedjax.models.loader import load_model\n"
        "mesh = jax.make_mesh((2,), ('tensor',))\n"
        "def placement(path, shape):\n"
        "    return NamedSharding(mesh, P('tensor') if path[-2] == 'down_proj' else P())\n"
        "params = load_model(sys.argv[1], dtype='bfloat16', sharding=placement, progress=False).params\n"
        "kernel = params['layers_0']['mlp']['down_proj']['kernel']\n"
        "assert [s.data.shape for s in kernel.addressable_shards] == [(32, 96)] * 2, kernel.sharding\n"
        "assert params['final_norm']['scale'].sharding.is_fully_replicated\n"
        "params = load_model(sys.argv[1], dtype='float32', sharding=NamedSharding(mesh, P()), progress=False).params\n"
        "assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(params))\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", script, str(folder)], env=env, check=True)


def edit_manifest(folder: Path, edit: Callable[[dict], object]) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    edit(data)
    (folder / MANIFEST).write_text(json.dumps(data))


def a_weight_file(folder: Path) -> Path:
    return max(
        (path for path in (folder / "params").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest is missing": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} is missing: the checkpoint is incomplete"),
    "manifest is not JSON": (lambda f: (f / MANIFEST).write_text("{"), f"{MANIFEST} cannot be read"),
    "manifest is a folder": (lambda f: ((f / MANIFEST).unlink(), (f / MANIFEST).mkdir()), "cannot be read.*directory"),
    "manifest lacks a key": (lambda f: edit_manifest(f, lambda m: m.pop("files")), "cannot be read.*'files'"),
    "other version": (
        lambda f: edit_manifest(f, lambda m: m.update(version=99)),
        "format 'pagedjax-checkpoint' version 99; allowed: 'pagedjax-checkpoint' version 1",
    ),
    "misshapen tensor": (
        lambda f: edit_manifest(f, lambda m: m["tensors"].update({"final_norm/scale": [63]})),
        r"tensor 'final_norm/scale' has shape \[63\]; expected \[64\]",
    ),
    "missing tensor": (
        lambda f: edit_manifest(f, lambda m: m["tensors"].pop("final_norm/scale")),
        r"tensor 'final_norm/scale' has shape none; expected \[64\]",
    ),
    "impossible model": (
        lambda f: edit_manifest(f, lambda m: m["config"].update(num_kv_heads=3)),
        "num_kv_heads=3 is not allowed",
    ),
    "file missing": (lambda f: a_weight_file(f).unlink(), r"expected \d+ bytes, found no such file"),
    "file cut short": (lambda f: a_weight_file(f).write_bytes(b"1234"), r"expected \d+ bytes, found 4 bytes"),
    "file altered": (lambda f: flip_a_byte(a_weight_file(f)), r"was altered, its CRC-32 is \w+; expected \w+"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_given_by_path_is_refused(folder: Path, damage: str):
    do, message = DAMAGES[damage]
    do(folder)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, dtype="float32", progress=False)


def test_known_model_is_converted_once(recipe: WheelRecipe, home: Path, monkeypatch: pytest.MonkeyPatch):
    made = count_conversions(monkeypatch)
    first = load_model("tiny", dtype="float32", progress=False)
    (home / "gguf" / "tiny.gguf").unlink()  # later starts do not even look at it
    second = load_model("tiny", dtype="float32", progress=False)
    assert len(made) == 1
    assert (
        first.source
        == second.source
        == {
            "kind": "known",
            "name": "tiny",
            "file": "tiny.gguf",
            "sha256": recipe.sha256,
        }
    )
    assert second.tokenizer is not None
    assert second.tokenizer("hello").input_ids == first.tokenizer("hello").input_ids  # pyright: ignore[reportOptionalCall]
    assert second.tokenizer.chat_template == first.tokenizer.chat_template  # pyright: ignore[reportOptionalMemberAccess]
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    tensors = random_tensors(CONFIG)
    expected = build_params(CONFIG, tensors.__getitem__, keep, desc="", progress=False)
    jax.tree.map(np.testing.assert_array_equal, first.params, expected)


@pytest.mark.parametrize("damage", ["manifest is not JSON", "file cut short", "file altered", "other version"])
def test_damaged_known_model_is_converted_anew(
    recipe: WheelRecipe, home: Path, monkeypatch: pytest.MonkeyPatch, damage: str
):
    made = count_conversions(monkeypatch)
    first = load_model("tiny", dtype="float32", progress=False)
    do, message = DAMAGES[damage]
    do(home / "models" / "tiny")
    with pytest.warns(UserWarning, match=f"{message}.*; converting tiny anew"):
        second = load_model("tiny", dtype="float32", progress=False)
    assert len(made) == 2
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


def test_half_written_known_model_is_converted_anew(recipe: WheelRecipe, home: Path, monkeypatch: pytest.MonkeyPatch):
    made = count_conversions(monkeypatch)
    load_model("tiny", dtype="float32", progress=False)
    (home / "models" / "tiny" / MANIFEST).unlink()
    with pytest.warns(UserWarning, match=f"{MANIFEST} is missing.*; converting tiny anew"):
        load_model("tiny", dtype="float32", progress=False)
    assert len(made) == 2


def test_checkpoint_of_other_weights_is_converted_anew(
    recipe: WheelRecipe, home: Path, monkeypatch: pytest.MonkeyPatch
):
    load_model("tiny", dtype="float32", progress=False)
    made = count_conversions(monkeypatch)
    manifest = home / "models" / "tiny" / MANIFEST
    manifest.write_text(manifest.read_text().replace(recipe.sha256, "0" * 64))
    with pytest.warns(UserWarning, match=r"was made from other weights than those of tiny-model==1\.0"):
        load_model("tiny", dtype="float32", progress=False)
    assert len(made) == 1


@pytest.mark.parametrize("call", ["save", "restore"])
def test_ctrl_c_while_orbax_works_is_one_line_and_the_next_start_is_whole(
    recipe: WheelRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
):
    whole: list[str] = []
    original = getattr(ocp.Checkpointer, call)

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        result = original(self, *args, **options)
        whole.append(call)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, call, interrupted)
        assert main(["generate", "hello", "--model", "tiny"]) == 130
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "pagedjax: interrupted" and captured.out == ""
    assert "Traceback" not in captured.err and whole == [call]
    params = load_model("tiny", dtype="float32", progress=False).params
    expected = build_params(CONFIG, random_tensors(CONFIG).__getitem__, keep, desc="", progress=False)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_two_at_once_convert_once(recipe: WheelRecipe, monkeypatch: pytest.MonkeyPatch):
    made = count_conversions(monkeypatch)
    loaded = []
    threads = [
        threading.Thread(target=lambda: loaded.append(load_model("tiny", dtype="float32", progress=False)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 2
    assert len(made) == 1


def test_the_real_model_restores(smollm2: loader.LoadedModel):
    assert smollm2.source["sha256"] == KNOWN_MODELS["smollm2-135m"].sha256
    assert sum(leaf.size for leaf in jax.tree.leaves(smollm2.params)) == 134_515_008
