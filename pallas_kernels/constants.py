"""What every backend agrees on."""

MASKED = -1e30  # the score of a key that must not count: finite, so that a row with no keys does not turn into NaN
TILE = 64  # tokens of the KV axis that a Pallas kernel takes at a time, at fixed positions
SPLIT = 512  # tokens of the KV axis that one program decodes: a fixed size, not a fixed number of splits

FLOATS = ("float32", "bfloat16", "float16")
QUANTIZED = {"int8": 127.0, "float8_e4m3fn": 448.0}  # pool dtypes with a scale per token and head; largest number
