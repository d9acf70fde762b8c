"""The wheel: both packages, typed, and nothing imported that is not declared."""

from __future__ import annotations

import ast
import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import pagedjax

ROOT = Path(__file__).parent.parent
# A module's distribution, where the names differ.
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "huggingface_hub": "huggingface-hub"}
# Optional, and asked for by name when it is missing.
OPTIONAL = {"torch"}
# Imported by what we import, which does not declare it: transformers renders chat templates with jinja2.
INDIRECT = {"jinja2"}


def name_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0].lower()


@pytest.fixture(scope="module")
def project() -> dict:
    """The `[project]` table."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_both_packages_typed_and_nothing_else(wheel):
    names = wheel.namelist()
    assert {"pagedjax/py.typed", "pallas_kernels/py.typed", "pagedjax/cli/__init__.py"} <= set(names)
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"pagedjax", "pallas_kernels"}
    sources = {
        str(path.relative_to(ROOT)) for top in ("pagedjax", "pallas_kernels") for path in ROOT.glob(f"{top}/**/*.py")
    }
    assert sources <= set(names)


def test_the_wheel_says_its_version_licence_and_command(wheel):
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert metadata["Version"] == pagedjax.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert {"cuda12", "tpu", "experiments", "notebooks", "aot", "test"} <= set(metadata.get_all("Provides-Extra", []))
    assert b"pagedjax = pagedjax.cli:main" in wheel.read(f"{info}/entry_points.txt")
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_the_citation_is_of_this_version():
    assert f"\nversion: {pagedjax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("package", ["pagedjax", "pallas_kernels"])
def test_every_import_is_declared(project, package):
    declared = set(map(name_of, project["dependencies"]))
    ours = {"pagedjax", "pallas_kernels"} if package == "pagedjax" else {"pallas_kernels"}
    allowed = set(sys.stdlib_module_names) | declared | ours | OPTIONAL
    for path in sorted((ROOT / package).rglob("*.py")):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add((node.module or "").split(".")[0])
        undeclared = {name for name in modules if DISTRIBUTIONS.get(name, name) not in allowed}
        assert not undeclared, f"{path.relative_to(ROOT)} imports {undeclared}, which pyproject.toml does not declare"


def test_every_declared_dependency_is_imported(project):
    text = "\n".join(path.read_text() for top in ("pagedjax", "pallas_kernels") for path in (ROOT / top).rglob("*.py"))
    modules = {distribution: module for module, distribution in DISTRIBUTIONS.items()}
    for requirement in project["dependencies"]:
        name = name_of(requirement)
        assert name in INDIRECT or re.search(rf"(import|from) {modules.get(name, name)}\b", text), (
            f"{name} is declared but never imported"
        )
