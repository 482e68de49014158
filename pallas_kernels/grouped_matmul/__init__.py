"""Products of rows grouped by expert with plain, FP4 or FP8 weights."""
