"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_harness import TINY, Runs, forget_programs

from pagedjax.device.compilation_cache import use_compilation_cache
from pagedjax.models.llama import init_params
from pagedjax.models.loader import LoadedModel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file run in one process: they share engines, which take long to compile."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session", autouse=True)
def compilation_cache() -> None:
    """Engines of the same shapes compile once a machine, not once a test."""
    use_compilation_cache()


@pytest.fixture(scope="module", autouse=True)
def few_shared_programs(few_programs: None) -> Iterator[None]:
    """Engines share programs within a file of tests."""
    yield
    forget_programs()


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """A random two-layer model without a tokenizer."""
    return LoadedModel(TINY, init_params(TINY, seed=0), None, {"name": "random"})


@pytest.fixture(scope="session")
def runs(tiny: LoadedModel) -> Runs:
    """See `Runs`."""
    return Runs(tiny)
