"""What the tests of the stores share: parts, a clock, and rows that show whose they are."""

import pathlib

import numpy as np

from deepseek_jax.serve import record

ROOT = pathlib.Path(__file__).parents[2]
PARTS = {"main": record.Part(2, 16), "keys": record.Part(2, 8), "latest": record.Part(1, 4)}
BLOCK = 8
HOUR = 3600.0


class Clock:

  def __init__(self):
    self.seconds = 1_000_000.0

  def __call__(self):
    return self.seconds


def text_of(seed, n):
  return np.random.default_rng(seed).integers(0, 129_280, n)


def rows_of(tokens, parts=PARTS):
  """Rows that depend on every token up to their own."""
  n = len(tokens) // 2 * 2
  sums = np.cumsum(tokens[:n])
  return {
      name: (sums[ratio - 1 :: ratio, None] * (i + 3) + np.arange(size)).astype(np.uint8)
      for i, (name, (ratio, size)) in enumerate(parts.items())
  }


def save(store, tokens):
  return store.save(tokens, rows_of(tokens))


def keys(kv):
  return sorted(key for key in kv.list().result() if record.parse_key(key))


def assert_serves(store, tokens, length):
  """Reading gives the rows of exactly the first `length` tokens."""
  hit, rows = store.read(store.lookup(tokens))
  assert hit.length == length
  for name, want in rows_of(tokens[:length]).items():
    assert rows[name].dtype == np.uint8
    np.testing.assert_array_equal(rows[name], want)
