"""No row depends on a later one or on another document: by gradient, and bit by bit."""

import numpy as np
import pytest

ONE = [[1] * 24] * 2
PACKED = [[1] * 5 + [2] * 3 + [3] * 9 + [4] + [5] * 6, [1] * 2 + [0] + [2] * 7 + [3] * 12 + [0] * 2]


def one_hot(shape, *at):
  weights = np.zeros(shape, np.float32)
  weights[at] = 1
  return weights


@pytest.mark.slow
def test_a_row_has_no_gradient_into_later_rows_or_other_lines(tiny):
  """In a model with every mode, both stacks, an Engram and a pool."""
  inputs = tiny.inputs(ONE)
  reached = np.zeros(24, bool)
  for t in range(24):
    moved = tiny.sensitivity(tiny.model(), inputs, one_hot((2, 24), 0, t))
    assert moved[0, t] > 0
    assert not moved[0, t + 1 :].any(), t
    assert not moved[1].any()
    reached = moved[0] > 0
  assert reached.all()  # far past the window: entries carry the gradient


def test_a_document_has_no_gradient_into_its_neighbours(tiny):
  inputs = tiny.inputs(PACKED)
  segments = inputs.rows.segments
  for line in range(2):
    for number in set(segments[line]) - {0}:
      own = np.zeros((2, 24), bool)
      own[line] = segments[line] == number
      moved = tiny.sensitivity(tiny.model(), inputs, own)
      assert (moved[own] > 0).all()
      assert not moved[~own].any(), (line, number)


def test_padding_gets_no_gradient_and_stays_finite(tiny):
  inputs = tiny.inputs(PACKED)
  padding = inputs.rows.segments == 0
  moved = tiny.sensitivity(tiny.model(), inputs, ~padding)
  assert not moved[padding].any()
  assert np.isfinite(tiny.logits(tiny.model(), inputs)).all()


@pytest.mark.parametrize("segments", [ONE, PACKED], ids=["one document", "packed"])
def test_changing_a_token_leaves_earlier_rows_bitwise_unchanged(tiny, segments):
  """Selections too: a gradient would not see an index that looks ahead."""
  inputs = tiny.inputs(segments)
  before = tiny.logits(tiny.model(), inputs)
  for t in range(24):
    tokens = inputs.tokens.copy()
    tokens[:, t] = (tokens[:, t] + 7) % 64
    after = tiny.logits(tiny.model(), tiny.inputs(segments, tokens))
    same_document = inputs.rows.segments == inputs.rows.segments[:, t : t + 1]
    may_change = same_document & (np.arange(24) >= t)
    np.testing.assert_array_equal(after[~may_change], before[~may_change])
    live = inputs.rows.segments[:, t] > 0
    assert (after[live, t] != before[live, t]).any(-1).all()
