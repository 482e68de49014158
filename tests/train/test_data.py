"""Laws of packing and of the pipeline: every example once an epoch, also after a stop."""

import collections
import json

import chex
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_jax import tokenizer as tok
from deepseek_jax.train import data
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.turns import Views

BYTES = tok.ByteTokenizer()
CLASSES = tok.token_classes(BYTES)
SEQ_LEN = 24


def make_examples(n=23, seed=0):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(2, SEQ_LEN + 1, n)
  return [
      Example(
          rng.integers(3, BYTES.vocab_size, length).astype(np.int32),
          np.r_[False, rng.random(length - 1) < 0.5],
      )
      for length in lengths
  ]


EXAMPLES = make_examples()
VIEWS = Views(EXAMPLES)


def make_pipeline(examples=EXAMPLES, seed=3, **changes):
  sizes = dict(seq_len=SEQ_LEN, batch_size=2, accumulation=2, ngram_order=4)
  return data.Pipeline(Views(examples, seed=seed), BYTES, **(sizes | changes))


def flat(x):
  return x.reshape(-1, *x.shape[2:])


@given(st.data())
def test_packing_keeps_every_example_once_and_no_row_overflows(draw):
  seq_len = draw.draw(st.integers(1, 30))
  lengths = draw.draw(st.lists(st.integers(1, seq_len), max_size=120))
  order = draw.draw(st.permutations(range(len(lengths))))
  rows = data.pack(lengths, seq_len, order)
  assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
  used = [sum(lengths[i] for i in row) for row in rows]
  assert all(0 < n <= seq_len for n in used)
  # First-fit: of rows that were open together at most one is half empty.
  if len(rows) <= data.OPEN_ROWS:
    assert sum(2 * n <= seq_len for n in used) <= 1


def test_packing_fills_the_first_row_with_room():
  assert data.pack([5, 4, 3, 2, 1], 7, [0, 1, 2, 3, 4]) == [[0, 3], [1, 2], [4]]


def test_packing_closes_the_oldest_row_when_too_many_are_open():
  n = data.OPEN_ROWS + 1
  rows = data.pack([4] * n + [3], 7, range(n + 1))
  assert rows == [[0], [1, n], *([i] for i in range(2, n))]


@pytest.mark.parametrize("length", [0, 8])
def test_an_example_that_fits_no_row_is_named(length):
  with pytest.raises(ValueError, match=f"example 1: {length} tokens, allowed are 1 to 7"):
    data.pack([3, length], 7, [0, 1])


def test_every_epoch_holds_every_example_once_in_its_own_order():
  pipeline = make_pipeline()
  epochs = [pipeline.epoch(e) for e in range(4)]
  for rows in epochs:
    assert sorted(i for row in rows for i in row) == list(range(len(EXAMPLES)))
  assert len({json.dumps(rows) for rows in epochs}) == 4
  assert make_pipeline(seed=4).epoch(0) != epochs[0]


def test_batches_run_through_the_epochs_without_gap_or_repetition():
  pipeline = make_pipeline(batch_size=3, accumulation=1)
  batches = iter(pipeline)
  seen = [i for _ in range(20) for i in next(batches).example_ids]
  told = [i for e in range(12) for row in pipeline.epoch(e) for i in row]
  assert len(seen) > 2 * len(EXAMPLES)
  assert seen == told[: len(seen)]
  counts = collections.Counter(seen)
  assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("stop", range(1, 21))
def test_a_stop_after_any_step_changes_nothing(stop):
  going = iter(make_pipeline())
  for _ in range(stop):
    next(going)
  state = json.loads(json.dumps(going.get_state()))
  resumed = iter(make_pipeline())
  resumed.set_state(state)
  for _ in range(3):
    chex.assert_trees_all_equal(next(resumed), next(going))


def test_the_state_outlives_another_batch_size():
  going = iter(make_pipeline())
  next(going)
  resumed = iter(make_pipeline(batch_size=1, accumulation=4))
  resumed.set_state(going.get_state())
  assert next(resumed).example_ids == next(going).example_ids


@pytest.mark.parametrize("other", [{"seed": 5}, {"seq_len": 25}, {"examples": EXAMPLES[1:]}])
def test_a_state_of_other_data_is_refused(other):
  with pytest.raises(ValueError, match="same examples, seq_len and seed"):
    iter(make_pipeline(**other)).set_state(iter(make_pipeline()).get_state())


def test_packed_rows_hold_every_example_as_if_alone():
  packed = next(iter(make_pipeline(batch_size=4)))
  batch, rows = packed.batch, packed.batch.rows
  assert batch.tokens.shape == (2, 4, SEQ_LEN)
  assert batch.ngrams.shape == (2, 4, SEQ_LEN, 4)
  ids = iter(packed.example_ids)
  for row in range(8):
    segments = flat(rows.segments)[row]
    for segment in range(1, segments.max() + 1):
      at = segments == segment
      own = next(ids)
      tokens, loss = EXAMPLES[own]
      alone = data.collate(VIEWS, [[own]], len(tokens), BYTES.pad_id, CLASSES, 4)
      np.testing.assert_array_equal(flat(batch.tokens)[row][at], tokens)
      np.testing.assert_array_equal(flat(rows.positions)[row][at], np.arange(len(tokens)))
      np.testing.assert_array_equal(flat(batch.ngrams)[row][at], alone.ngrams[0])
      np.testing.assert_array_equal(
          flat(batch.ngrams)[row][at], tok.ngrams(CLASSES[tokens], CLASSES[BYTES.pad_id])
      )
      # The last token of a document has no target: the next one is of another document.
      np.testing.assert_array_equal(flat(batch.targets)[row][at], [*tokens[1:], BYTES.pad_id])
      np.testing.assert_array_equal(flat(batch.weights)[row][at], [*loss[1:], 0])
  assert next(ids, None) is None
  pads = rows.segments == 0
  assert pads.any()
  assert not rows.writes[pads].any()
  assert not rows.positions[pads].any()
  assert not batch.weights[pads].any()
  assert (batch.tokens[pads] == BYTES.pad_id).all()
  assert (batch.targets[pads] == BYTES.pad_id).all()
  assert (batch.ngrams[pads] == [-1, *[CLASSES[BYTES.pad_id]] * 3]).all()


def test_an_epoch_weighs_every_response_token_once():
  rows = make_pipeline().epoch(0)
  batch = data.collate(VIEWS, [*rows, []], SEQ_LEN, BYTES.pad_id)
  assert batch.ngrams is None
  assert batch.weights.sum() == sum(example.loss.sum() for example in EXAMPLES)
  assert not batch.rows.segments[-1].any()


def test_a_split_is_disjoint_complete_and_repeatable_even_with_repetitions():
  examples = [*EXAMPLES, *make_examples()[::2]]
  train, held_out = data.split(examples, 0.2, seed=1)
  keys = lambda side: [example.tokens.tobytes() for example in side]
  assert not set(keys(train)) & set(keys(held_out))
  assert sorted(keys(train) + keys(held_out)) == sorted(keys(examples))
  assert len(set(keys(held_out))) == round(0.2 * len(EXAMPLES))
  assert keys(data.split(examples, 0.2, seed=1)[1]) == keys(held_out)
  assert keys(data.split(examples, 0.2, seed=2)[1]) != keys(held_out)
  with pytest.raises(ValueError, match="eval_fraction 0.0 of 23"):
    data.split(EXAMPLES, 0.0, seed=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"examples": []}, "examples: 0, expected 1"),
        ({"batch_size": 0}, "batch_size: 0, expected 1"),
        ({"accumulation": 0}, "accumulation: 0, expected 1"),
        ({"seed": -1}, "seed: -1, expected 0"),
        ({"ngram_order": -1}, "ngram_order: -1, expected 0"),
        ({"seq_len": 3}, r"example \d+: \d+ tokens, allowed are 1 to 3"),
        (
            {"examples": [EXAMPLES[0], Example(np.array([0, -1]), np.array([False, True]))]},
            "example 1: token id -1 at index 1",
        ),
    ],
)
def test_an_unfit_pipeline_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    make_pipeline(**changes)
