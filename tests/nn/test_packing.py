"""A document's logits do not depend on what it is packed, padded or batched with."""

import dataclasses

import jax
import numpy as np
import pytest

LENGTH = 24
# Logits are of order 1. Another shape makes another program, whose sums run in another order.
LIMIT, OTHER_SHAPE = 1e-6, 5e-6


def lines(*documents):
  """Segments [2, 24] from lists of lengths; 0 and negative lengths are that much padding."""
  segments = np.zeros((2, LENGTH), np.int32)
  for line, lengths in enumerate(documents):
    at = 0
    for number, n in enumerate(lengths, start=1):
      segments[line, at : at + abs(n)] = number if n > 0 else 0
      at += abs(n)
  return segments


def solo(tiny, tokens):
  """Logits of one document at the start of a line, padding behind it."""
  padded = np.zeros((2, LENGTH), np.int32)
  padded[0, : len(tokens)] = tokens
  inputs = tiny.inputs(lines([len(tokens)], [LENGTH]), padded)
  return tiny.logits(tiny.model(), inputs)[0, : len(tokens)]


@pytest.mark.parametrize(
    "documents",
    [
        ([5, 3, 9, 1], [1] * 24),
        ([23, 1], [2] * 12),
        ([1, 2, 3, 4, 5, 6, 3], [7, -2, 8, -1, 3]),
        ([-3, 8, -5, 8], [4, 4, 4, 12]),
    ],
    ids=str,
)
def test_packed_documents_equal_their_solo_runs(tiny, documents):
  inputs = tiny.inputs(lines(*documents))
  packed = tiny.logits(tiny.model(), inputs)
  for line in range(2):
    for number in set(inputs.rows.segments[line]) - {0}:
      own = inputs.rows.segments[line] == number
      np.testing.assert_allclose(
          packed[line, own], solo(tiny, inputs.tokens[line, own]), atol=LIMIT, rtol=LIMIT
      )


@pytest.mark.parametrize("left", range(4))
@pytest.mark.parametrize("right", range(4))
def test_padding_on_either_side_is_invisible(tiny, left, right):
  """Whatever its ids: groups are formed over live tokens only, wherever they start."""
  n = LENGTH - left - right
  tokens = np.random.default_rng(n).integers(0, 64, n)
  expected = solo(tiny, tokens)
  rng = np.random.default_rng(left)
  line = np.concatenate([rng.integers(0, 64, left), tokens, rng.integers(0, 64, right)])
  inputs = tiny.inputs(lines([-left, n, -right] if left else [n, -right], [LENGTH]), [line, line])
  ours = tiny.logits(tiny.model(), inputs)[0, left : left + n]
  np.testing.assert_allclose(ours, expected, atol=LIMIT, rtol=LIMIT)


def test_ids_of_padding_are_never_read(tiny):
  segments = lines([5, -3, 9, -7], [-1, 20, -3])
  inputs = tiny.inputs(segments)
  other = tiny.inputs(segments, np.where(segments > 0, inputs.tokens, 63 - inputs.tokens))
  a, b = (tiny.logits(tiny.model(), x)[segments > 0] for x in (inputs, other))
  np.testing.assert_array_equal(a, b)


def test_load_and_balance_count_live_rows_only(tiny):
  segments = lines([5, -3, 9, -7], [-1, 20, -3])
  out = tiny.run(tiny.model(), tiny.inputs(segments))
  np.testing.assert_array_equal(out.load.sum(-1), np.full(8, (segments > 0).sum() * 2))
  inputs = tiny.inputs(segments)
  again = tiny.run(tiny.model(), inputs._replace(tokens=np.where(segments > 0, inputs.tokens, 5)))
  np.testing.assert_array_equal(again.load, out.load)
  np.testing.assert_array_equal(again.balance_loss, out.balance_loss)


def test_every_length_gives_the_prefix_of_the_whole_text(tiny):
  """From one token on, through every residue of the ratio and several windows."""
  tokens = np.random.default_rng(0).integers(0, 64, LENGTH)
  whole = solo(tiny, tokens)
  for n in range(1, LENGTH + 1):
    np.testing.assert_allclose(solo(tiny, tokens[:n]), whole[:n], atol=LIMIT, rtol=LIMIT)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_short_inputs_without_any_padding(tiny, n):
  """One token makes no entry of ratio 2; two make one; five cross the window and leave one over."""
  tokens = np.random.default_rng(0).integers(0, 64, LENGTH)
  inputs = tiny.inputs(np.ones((1, n), np.int32), tokens[:n])
  ours = tiny.logits(tiny.model(), inputs)[0]
  np.testing.assert_allclose(ours, solo(tiny, tokens[:n]), atol=OTHER_SHAPE, rtol=0)


@pytest.mark.slow
def test_an_input_of_padding_alone_is_finite(tiny):
  inputs = tiny.inputs(np.zeros((2, LENGTH), np.int32))
  out = tiny.run(tiny.model(), inputs)
  assert np.isfinite(out.hidden).all()
  assert not np.asarray(out.load).any()
  moved = tiny.gradient(tiny.model(), inputs, np.zeros((2, LENGTH), np.float32))[1]
  assert not any(np.any(g) for g in jax.tree.leaves(moved))


def test_floors_within_the_window_change_nothing_and_higher_ones_do(tiny):
  inputs = tiny.inputs([[1] * LENGTH] * 2)
  window = tiny.config.sliding_window
  at = np.asarray(inputs.rows.positions)
  free = tiny.logits(tiny.model(), inputs)

  def with_floors(floors):
    floors = np.asarray(floors, np.int32)
    return tiny.logits(tiny.model(), inputs._replace(rows=inputs.rows._replace(floors=floors)))

  np.testing.assert_array_equal(with_floors(np.maximum(at - window + 1, 0)), free)
  one = np.zeros_like(at)
  one[0, 9] = 8  # row 9 loses keys 6 and 7
  cut = with_floors(one)
  np.testing.assert_array_equal(cut[0, :9], free[0, :9])
  assert np.abs(cut[0, 9] - free[0, 9]).max() > 1e-3


def test_a_floor_at_the_row_itself_is_a_window_of_one(tiny):
  """The window keeps the row's own key; global entries have no floor."""
  inputs = tiny.inputs([[1] * LENGTH] * 2)
  floored = inputs._replace(rows=inputs.rows._replace(floors=inputs.rows.positions))
  ours = tiny.logits(tiny.model(), floored)
  narrow = tiny.logits(tiny.model(dataclasses.replace(tiny.config, sliding_window=1)), inputs)
  np.testing.assert_allclose(ours, narrow, atol=OTHER_SHAPE, rtol=0)


def test_only_relative_positions_matter(tiny):
  """A whole document moved by whole groups and blocks: every table turns queries and keys alike."""
  inputs = tiny.inputs([[1] * LENGTH] * 2)
  here = tiny.logits(tiny.model(), inputs)
  for shift in (4, 20, 1000):
    moved = inputs.rows._replace(positions=inputs.rows.positions + np.int32(shift))
    there = tiny.logits(tiny.model(), inputs._replace(rows=moved))
    np.testing.assert_allclose(there, here, atol=5e-5, rtol=0)
