"""Every backend, by name, for the tests that all of them must pass."""

from __future__ import annotations

import pytest
from backends import BACKENDS, Backend


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """One backend, as it runs on a machine without an accelerator."""
    backend = BACKENDS[request.param]
    if backend.obstacle:
        pytest.skip(backend.obstacle)
    return backend
