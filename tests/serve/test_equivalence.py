"""Prefill in any chunks, then decode, is the forward pass; lines of a batch do not meet."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from deepseek_jax.cache import Table
from deepseek_jax.config import CacheFormats
from deepseek_jax.nn.rows import Rows
from deepseek_jax.serve import decode, replay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile")]

W = 4
LENGTHS = np.arange(1, 3 * W + 1)  # one prompt of each length: a line of one batch
TOTAL = 4 * W  # tokens of a line, prompt and continuation
ROUNDED = ("main_kv", "index", "window_kv")


def teacher_forced(served, ids, chunk, *, model=None, lengths=LENGTHS, cache=None, storage=None):
  """Cache, and logits from every line's last prompt row on, [B, T, V]; NaN before it."""
  model = model or served.model()
  if cache is None:
    cache = served.cache(model, lines=len(ids), storage=storage)
  prompts = [line[:n] for line, n in zip(ids, lengths)]
  plans = [replay.exact(int(n)) for n in lengths]
  cache, first, _ = served.reader(model, chunk=chunk).prefill(cache, prompts, plans)
  cache, logits = served.write(cache, ids, lengths, model)
  logits[np.arange(len(ids)), np.asarray(lengths) - 1] = np.asarray(first)
  return cache, logits


def largest(logits, expected, lengths=LENGTHS):
  """Largest difference from every line's last prompt row on."""
  own = np.arange(expected.shape[1]) >= np.asarray(lengths)[:, None] - 1
  assert np.isfinite(logits[own]).all()
  return np.abs(logits - expected)[own].max()


@pytest.fixture(scope="module")
def ids(served):
  return served.ids(TOTAL)


@pytest.fixture(scope="module")
def expected(served, ids):
  return served.forward(served.model(), ids)


@pytest.fixture(scope="module")
def run(served, ids):
  """Returns `run(chunk)`: cache on the host and logits of all lines."""
  return functools.cache(lambda chunk: jax.device_get(teacher_forced(served, ids, chunk)))


@pytest.mark.parametrize("chunk", [1, 2, W - 1, W, W + 1, 7, TOTAL])
def test_decode_is_the_forward_pass(run, expected, chunk):
  """Every prompt length 1..3W in one batch, both parities of the m = 2 group in every step."""
  _, logits = run(chunk)
  assert np.abs(expected).max() > 1
  assert largest(logits, expected) < 1e-5


def test_both_stacks_write_what_they_read_and_no_more(served, run):
  """⌊n/m⌋ entries, also while n < W; behind them the poison of the empty table."""
  cache, _ = run(W)
  empty = served.cache()
  for spec, table, blank in zip(
      served.model().schedule.kv_sources * 2,
      cache.main_kv + cache.index_keys,
      empty.main_kv + empty.index_keys,
      strict=True,
  ):
    written = (served.rows(table) != served.rows(blank)).any(-1)
    np.testing.assert_array_equal(
        written, np.broadcast_to(np.arange(table.layout.rows) < TOTAL // spec.ratio, written.shape)
    )
  np.testing.assert_array_equal(cache.lengths, TOTAL)


def test_a_prompt_writes_no_entry_of_an_open_group(served, ids):
  empty, reader = served.cache(), served.reader(chunk=W)
  prompts, plans = [line[:n] for line, n in zip(ids, LENGTHS)], [replay.exact(n) for n in LENGTHS]
  cache, _, _ = reader.prefill(served.cache(), prompts, plans)
  for spec, table, blank in zip(
      served.model().schedule.kv_sources, cache.main_kv, empty.main_kv, strict=True
  ):
    written = (served.rows(table) != served.rows(blank)).any(-1)
    assert written.sum(1).tolist() == [n // spec.ratio for n in LENGTHS]
  np.testing.assert_array_equal(cache.lengths, LENGTHS)
  np.testing.assert_array_equal(cache.floors, 0)


def test_a_line_is_its_own_single_run_bit_for_bit(served, ids, run):
  """Ragged neighbours, or none: 1, m − 1, m, m + 1, … and each line alone in the batch."""
  cache, logits = run(W)
  for line in (0, 1, 2, 4, 11):
    prompts, plans = [None] * len(ids), [None] * len(ids)
    n = int(LENGTHS[line])
    prompts[line], plans[line] = ids[line, :n], replay.exact(n)
    alone, first, _ = served.reader(chunk=W).prefill(served.cache(), prompts, plans)
    np.testing.assert_array_equal(first[line], logits[line, n - 1])
    assert not np.delete(first, line, axis=0).any()
    stops = np.where(np.arange(len(ids)) == line, n, TOTAL)
    alone, own = served.write(alone, ids, stops)
    np.testing.assert_array_equal(own[line, n:], logits[line, n:])
    assert served.same_bytes(served.line(alone, line), served.line(cache, line))
    for other in range(len(ids)):
      if other != line:
        assert served.same_bytes(served.line(alone, other), served.line(served.cache(), other))


def test_the_order_of_lines_changes_nothing(served, ids, run):
  cache, logits = run(W)
  order = np.random.default_rng(0).permutation(len(ids))
  other, moved = teacher_forced(served, ids[order], W, lengths=LENGTHS[order])
  np.testing.assert_array_equal(moved, logits[order])
  for here, there in enumerate(order):
    assert served.same_bytes(served.line(other, here), served.line(cache, there))


def test_a_used_line_is_as_good_as_a_new_one(served, ids, run):
  """After another, longer text whose state is left as it is, and in part as poison."""
  cache, logits = run(W)
  other = served.ids(TOTAL, seed=9)
  used, _ = teacher_forced(served, other, W, lengths=np.full(len(ids), TOTAL - 1))
  used = jax.device_get(used)
  for start in (used, served.poisoned(used)):
    again, found = teacher_forced(served, ids, W, cache=start)
    np.testing.assert_array_equal(found, logits)
    # Entries behind the text are the other one's.
    for one, two in zip(again.main_kv, cache.main_kv):
      own = slice(0, TOTAL * one.layout.rows // cache.capacity)
      np.testing.assert_array_equal(served.rows(one)[:, own], served.rows(two)[:, own])


def test_a_line_that_does_not_read_keeps_its_state(served, ids, run):
  cache, _ = run(W)
  live = np.arange(len(ids)) % 3 == 0
  after, _ = decode.step(served.model(), cache, ids[:, 0], live, served.classes)
  for line, moved in enumerate(live):
    assert moved != served.same_bytes(served.line(after, line), served.line(cache, line))


def new_texts(served, storage=None):
  """An empty cache of which only the tables are poisoned."""
  blank = served.cache(storage=storage)
  return dataclasses.replace(
      blank,
      history=np.full_like(blank.history, served.pad_class),
      lengths=np.zeros_like(blank.lengths),
      floors=np.zeros_like(blank.floors),
  )


def test_the_first_token_can_be_decoded(served, ids, expected):
  _, logits = served.write(new_texts(served), ids, np.zeros(len(ids), int))
  assert largest(logits, expected, np.ones(len(ids), int)) < 1e-5


def test_prompt_log_probabilities_are_of_all_rows(served, ids, expected):
  reader = served.reader(chunk=TOTAL)
  prompts = [line[:n] for line, n in zip(ids, LENGTHS)]
  plans = [replay.exact(int(n)) for n in LENGTHS]
  _, last, every = reader.prefill(served.cache(), prompts, plans, every=True)
  for line, n in enumerate(LENGTHS):
    np.testing.assert_allclose(every[line], expected[line, :n], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(last[line], every[line][-1])


@pytest.fixture(scope="module")
def rounded(served):
  """A model that rounds everything, three texts, and the forward pass.

  Rounding is discontinuous: where two correct programs put a value on different sides of a boundary
  logits part. Of these weights and texts no logit moved by more than 5e-5 under fifty random
  relative changes of all weights by 6e-8.
  """
  model = served.model(quantize=ROUNDED, seed=0)
  ids = served.ids(TOTAL, lines=3)
  return model, ids, served.forward(model, ids)


def test_packed_caches_give_back_what_the_forward_pass_rounds(served, rounded):
  model, ids, expected = rounded
  lengths = np.array([1, W, 2 * W + 1])
  cache, logits = teacher_forced(served, ids, W - 1, model=model, lengths=lengths)
  assert cache.main_kv[0].layout.storage == "fp4_e2m1_e4m3_16"
  assert largest(logits, expected, lengths) < 1e-3


def test_the_error_grows_with_the_format_and_the_path_stays(served, ids, expected):
  """A model that rounds nothing, over caches of fewer and fewer bits."""
  model, errors = served.model(), []
  for storage in ("float32", "bfloat16", "fp8_e4m3_e8m0_32", "mxfp4"):
    cache = new_texts(served, CacheFormats(main_kv=storage, index=storage, window_kv=storage))
    rows = jax.tree.map(lambda a: a[:, :1], Rows.single(*ids.shape))
    read = jax.eval_shape(model.encode, ids[:, :1], rows, served.ngrams(ids)[:, :1], cache)
    for table in (read.entries.kv, read.entries.index_keys, read.cache.encoder_window):
      assert isinstance(table, Table)
      assert table.layout.storage == storage
    _, logits = served.write(cache, ids, np.zeros(len(ids), int))
    errors.append(np.sqrt(np.mean((logits - expected) ** 2)))
  assert errors[0] < 1e-6
  assert 10 * errors[0] < errors[1] < errors[2] < errors[3] < 0.5 * expected.std()
