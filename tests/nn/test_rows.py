"""Laws of rows: where documents start, and what padding may do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.nn.rows import Rows

SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3, 3]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0, 0], [0, 0, 0, 1, 2, 3, 4]])


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_positions_restart_with_every_document_and_padding_writes_nothing(make):
  rows = Rows.of_segments(make(SEGMENTS))
  np.testing.assert_array_equal(rows.positions, POSITIONS)
  np.testing.assert_array_equal(rows.floors, np.zeros_like(SEGMENTS))
  np.testing.assert_array_equal(rows.segments, SEGMENTS)
  np.testing.assert_array_equal(rows.writes, SEGMENTS > 0)
  assert rows.reads is None
  assert all(type(x) is type(rows.segments) for x in rows[:4])
  assert [x.dtype for x in rows[:4]] == [np.int32, np.int32, np.int32, bool]


def test_leading_axes_and_jit_change_nothing():
  rows = jax.jit(Rows.of_segments)(jnp.stack([SEGMENTS, SEGMENTS[::-1]]))
  np.testing.assert_array_equal(rows.positions, np.stack([POSITIONS, POSITIONS[::-1]]))


def test_a_single_document_counts_from_zero():
  rows = Rows.single(2, 5)
  np.testing.assert_array_equal(rows.positions, np.tile(np.arange(5), (2, 1)))
  assert rows.writes.all()
  assert (rows.segments == 1).all()
