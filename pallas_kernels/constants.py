"""What every backend agrees on, so that their results do too."""

TILE = 64  # tokens of the KV axis that are taken together, at positions that are multiples of it
MASKED = -1e30  # the score of a key that must not count: finite, so that a row with no keys does not turn into NaN
