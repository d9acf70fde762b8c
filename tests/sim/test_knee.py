"""Finding the highest rate that is served fast enough."""

from __future__ import annotations

import pytest

from pagedjax.errors import ConfigError
from pagedjax.sim.knee import find_knee


@pytest.mark.parametrize("knee", [0.02, 0.7, 1.0, 1.01, 37.0])
def test_the_knee_is_found_to_a_per_cent_from_below(knee):
    probes = []
    found = find_knee(lambda rate: rate <= knee, first=1.0, lowest=0.001, highest=100.0, progress=probes.append)
    assert knee / 1.01 <= found <= knee
    assert all(probe.holds == (probe.rate <= knee) for probe in probes) and len(probes) < 25


def test_no_knee_is_said_and_ends():
    with pytest.raises(ConfigError, match=r"not served fast enough even at 0\.00\d+ a second"):
        find_knee(lambda rate: False, first=1.0, lowest=0.01, highest=100.0)
    with pytest.raises(ConfigError, match=r"fast enough at every rate up to 128 a second"):
        find_knee(lambda rate: True, first=1.0, lowest=0.01, highest=100.0)


def test_a_rate_at_which_nobody_comes_leads_upwards_and_is_no_knee():
    def holds(rate, slowest=5.0):
        return None if rate < 3.0 else rate <= slowest

    assert 5.0 / 1.01 <= find_knee(holds, first=1.0, lowest=0.01, highest=100.0) <= 5.0
    with pytest.raises(ConfigError, match=r"not served fast enough at 3 a second, and at 2.9\d+ none come"):
        find_knee(lambda rate: holds(rate, 0.0), first=1.0, lowest=0.01, highest=100.0)
