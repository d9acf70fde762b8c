"""What every backend agrees on."""

MASKED = -1e30  # the score of a key that must not count: finite, so that a row with no keys does not turn into NaN
