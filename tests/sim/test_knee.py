"""Finding the highest rate that is served fast enough."""

from __future__ import annotations

import pytest

from pagedjax.errors import ConfigError
from pagedjax.sim.knee import find_knee


@pytest.mark.parametrize("knee", [0.02, 0.7, 1.0, 1.01, 37.0])
def test_the_knee_is_found_to_a_per_cent_from_below(knee):
    probes = []
    found = find_knee(lambda rate: rate <= knee, first=1.0, lowest=0.001, progress=probes.append)
    assert knee / 1.01 <= found <= knee
    assert all(probe.holds == (probe.rate <= knee) for probe in probes) and len(probes) < 25


def test_no_knee_is_said_and_ends():
    with pytest.raises(ConfigError, match=r"not served fast enough even at 0\.00\d+ a second"):
        find_knee(lambda rate: False, first=1.0, lowest=0.01)
    with pytest.raises(ConfigError, match=r"fast enough at every rate up to 1\.\d+e\+06 a second"):
        find_knee(lambda rate: True, first=1.0, lowest=0.01)
