"""Every backend, by name, for the tests that all of them must pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backends import BACKENDS, RACE, Backend

from pagedjax.device.compilation_cache import use_compilation_cache


@pytest.fixture(autouse=True, scope="session")
def compilation_cache() -> None:
    """Later runs take most programs from the cache folder; those that call back into Python are compiled anew."""
    use_compilation_cache()


@pytest.fixture(autouse=True)
def no_race(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert RACE not in capsys.readouterr().out


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Backend:
    """One backend, as it runs on a machine without an accelerator; its tests run in one process and share programs."""
    backend = BACKENDS[request.param]
    if backend.obstacle:
        pytest.skip(backend.obstacle)
    return backend
