"""Entries in rows of 128 words, against entries in rows of their own."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_jax import word_rows
from pallas_kernels import dispatch

LANES = 128

taken = jax.jit(word_rows.take, static_argnums=2)


@st.composite
def appends(draw):
  """(words of an entry in each buffer, entries, leading axes, slots [*n or 1, T], platform)."""
  words = draw(
      st.lists(st.sampled_from([1, 3, 4, 9, 12, 16, 72, 128, 130]), min_size=1, max_size=2)
  )
  entries = draw(st.sampled_from([1, 7, 32, 128, 256]))
  lead = draw(st.sampled_from([(), (1,), (3,), (2, 1), (2, 3), (2, 1, 2)]))
  served = draw(st.integers(0, len(lead)))
  length = draw(st.sampled_from([1, 1, 2, 5, 40]))
  rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
  axes = (*(1,) * served, *lead[served:])
  kind = draw(st.sampled_from(["chunk", "ring", "any"]))
  all_slots = np.broadcast_to(np.arange(entries + length), (*axes, entries + length))
  slots = rng.permuted(all_slots, axis=-1)[..., :length]
  if kind != "any":
    slots = slots[..., :1] % entries + np.arange(length)
    slots = slots % entries if kind == "ring" else slots
    first, count = rng.integers(0, length, (*axes, 1)), rng.integers(0, entries + 1, (*axes, 1))
    at = np.arange(length)
    slots = np.where((at >= first) & (at < first + count), slots, entries + at % 2 * 1000)
  # They differ in the loop around a single entry alone.
  platform = draw(st.sampled_from(["cpu", "tpu"])) if length == 1 else "cpu"
  return words, entries, lead, slots.astype(np.int32), platform


@given(case=appends())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_appending_changes_the_named_entries_alone(case):
  all_words, entries, lead, slots, platform = case
  rng, length = np.random.default_rng(1), slots.shape[-1]
  word = lambda *shape: rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)
  buffers = tuple(word(*lead, -(-entries * w // LANES), LANES) for w in all_words)
  new = tuple(word(*lead, length, w) for w in all_words)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(dispatch, "platform", lambda: platform)
    found = jax.jit(lambda *a: word_rows.append(*a, entries))(buffers, new, slots)
  every = np.broadcast_to(slots, (*lead, length))
  for before, fresh, after, words in zip(buffers, new, found, all_words):
    expected = before.reshape(*lead, -1).copy()
    for index in np.ndindex(every.shape):
      if every[index] < entries:
        place = every[index] * words
        expected[index[:-1]][place : place + words] = fresh[index]
    np.testing.assert_array_equal(after, expected.reshape(before.shape))


@pytest.mark.parametrize("words", [1, 3, 4, 16, 72, 128, 130])
@pytest.mark.parametrize("entries", [1, 7, 256])
def test_taking_is_indexing(words, entries):
  rng = np.random.default_rng(2)
  buffer = rng.integers(0, 1 << 31, (2, -(-entries * words // LANES), LANES)).astype(np.int32)
  slots = rng.integers(0, entries, (2, 3, 4))
  slots[0, 0] = entries - 1
  rows = buffer.reshape(2, -1)[:, : entries * words].reshape(2, entries, words)
  expected = np.stack([line[own] for line, own in zip(rows, slots)])
  np.testing.assert_array_equal(taken(buffer, slots, words), expected)
