"""Selection on the kernels, interpreted: the same entries as the reference, ties included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.cache import Layout, Table
from deepseek_jax.nn.compressor import Entries
from deepseek_jax.nn.indexer import Queries
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.selection import select

HEADS = 4


def drawn(shape, seed):
  """Small integers, exact in every format and sum: many equal scores."""
  return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), jnp.float32)


def queries(rows, width, seed):
  b, t = rows.positions.shape
  weights = jnp.asarray(np.random.default_rng(seed).choice([-1.0, 0.5, 1.0, 2.0], (b, t, HEADS)))
  return Queries(drawn((b, t, HEADS, width), seed), weights.astype(jnp.float32))


def at(*positions):
  """One row a line, or a line of rows; position −1 is padding."""
  positions = jnp.asarray(positions, jnp.int32)
  live = positions >= 0
  return Rows(jnp.maximum(positions, 0), 0 * positions, live.astype(jnp.int32), live)


def both(run):
  """What `run(implementation)` gives by the reference and by the kernels."""
  expected = jax.jit(functools.partial(run, "reference"))()
  with pltpu.force_tpu_interpret_mode():
    return expected, jax.jit(functools.partial(run, "pallas"))()


@pytest.mark.slow
def test_unpacked_entries_of_packed_documents():
  """Rows of two documents and padding over 300 entries; pool and choice of 128."""
  first, second = 220, 80
  last = jnp.concatenate([jnp.arange(first), jnp.arange(second)])[None]
  segments = jnp.asarray([[1] * first + [2] * second], jnp.int32)
  keys = drawn((1, first + second, 16), 1)
  entries = Entries(keys, keys, last, segments)
  rows = at([3, 150, 219, 79, -1])._replace(segments=jnp.asarray([[1, 1, 1, 2, 0]], jnp.int32))

  def run(implementation):
    how = dict(m=1, k=128, chunk=8, block_size=2, same_rows=False, implementation=implementation)
    own, pool = select(queries(rows, 16, 2), rows, entries, blocks=128, **how)
    inside, _ = select(queries(rows, 16, 3), rows, entries, pool=pool, **how)
    found = lambda s: (s.slots, jnp.where(s.slots < 0, 0.0, s.scores))
    return found(own), found(inside), jnp.sort(pool, axis=-1)[..., -100:]

  expected, ours = both(run)
  assert (np.asarray(expected[0][0]) >= 0).sum(-1).tolist() == [[4, 128, 128, 80, 0]]
  jax.tree.map(np.testing.assert_array_equal, ours, expected)


@pytest.mark.slow
def test_packed_keys_of_a_cache():
  """9,216 stored entries of two lines, a pool of 1,024 blocks, and rows that see few or none."""
  c, m = 9 * 1024, 2
  table = jax.tree.map(jnp.asarray, Table.zeros((2,), Layout("mxfp4", c, 128)))
  table = table.append(jnp.broadcast_to(jnp.arange(c), (2, c)), drawn((2, c, 128), 4))
  last = jnp.broadcast_to(jnp.arange(c) * m + m - 1, (2, c))
  entries = Entries(None, table, last, jnp.ones_like(last))
  rows = at([m * c - 1], [700])

  def run(implementation):
    how = dict(m=m, k=128, chunk=8, block_size=8, same_rows=False, implementation=implementation)
    own, pool = select(queries(rows, 128, 5), rows, entries, blocks=1024, **how)
    inside, _ = select(queries(rows, 128, 6), rows, entries, pool=pool, **how)
    dead, _ = select(queries(rows, 128, 7), at([-1], [0]), entries, **how)
    return own.slots, pool, inside.slots, dead.slots

  expected, ours = both(run)
  jax.tree.map(np.testing.assert_array_equal, ours, expected)
  assert (np.asarray(ours[1]) >= 0).sum(-1).tolist() == [[1024], [44]]
  assert (np.asarray(ours[3]) == -1).all()
