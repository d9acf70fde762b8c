"""Every backend, by name, for the tests that all of them must pass."""

from __future__ import annotations

from typing import Any

import pytest

BACKENDS = {
    "reference": {"backend": "reference"},
    "xla": {"backend": "xla"},
    "triton": {"backend": "triton", "interpret": True},
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The arguments that choose one backend, on a machine without an accelerator."""
    return BACKENDS[request.param]
