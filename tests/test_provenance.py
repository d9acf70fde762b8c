"""What a result file says of where it comes from."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

import jax
import numpy
import pytest

import pagedjax
from pagedjax import provenance as module
from pagedjax.provenance import git_state, package_versions, provenance


def test_a_record_is_plain_data_and_equal_for_equal_runs():
    device = jax.devices()[0]
    record = provenance({"block_size": 16}, {"workload": 3}, device)
    assert json.loads(json.dumps(record)) == record == provenance({"block_size": 16}, {"workload": 3}, device)
    assert record["device"] == {"platform": "cpu", "kind": device.device_kind, "count": len(jax.devices())}
    assert record["configuration"] == {"block_size": 16} and record["seeds"] == {"workload": 3}
    assert record["machine"] is not None and set(record["machine"]) == {"python", "system", "processor", "cores"}
    assert provenance({}, {})["device"] is None


def test_versions_are_of_what_is_installed(monkeypatch: pytest.MonkeyPatch):
    versions = package_versions()
    assert versions["pagedjax"] == pagedjax.__version__ and versions["numpy"] == numpy.__version__
    assert {"jax", "jaxlib", "flax", "transformers"} <= versions.keys() and "pytest" not in versions

    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "requires", none)
    assert package_versions()["jaxlib"] == versions["jaxlib"]


def test_git_says_commit_and_whether_anything_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def git(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "a.py"
    file.write_text("1")
    git("init", "--quiet")
    assert git_state(file) is None  # not tracked: the checkout is of something else
    git("add", "a.py")
    git("commit", "--quiet", "--message", "x")
    commit = git("rev-parse", "HEAD")
    assert git_state(file) == {"commit": commit, "clean": True}
    (tmp_path / "b.py").write_text("2")
    assert git_state(file) == {"commit": commit, "clean": False}
    monkeypatch.setenv("PATH", "")
    assert git_state(file) is None
