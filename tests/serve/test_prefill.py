"""Which rows a reader hands to its programs, what it refuses, and the words Engram sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.nn.rows import Rows
from deepseek_jax.serve import decode, prefill, replay

W = 4


def every_plan(n, c):
  """One of each arm, for stacks of 3 and 4 layers."""
  return (
      replay.exact(n),
      replay.cold(n, W),
      replay.continued(n, c, W),
      replay.replayed(n, c, W),
      replay.exact_replay(n, c, W, 3, 4),
  )


@pytest.fixture
def recorded(monkeypatch):
  """The chunks that a reader hands to its programs, which run nothing: (program, tokens, rows, …).

  Entries are (name, tokens, rows, ngrams, decoder floors or None).
  """
  calls = []

  def encode(model, cache, tokens, rows, ngrams):
    calls.append(("encode", tokens, rows, ngrams, None))
    return cache

  def extend(model, cache, tokens, rows, ngrams, floors, *, every=False):
    calls.append(("extend", tokens, rows, ngrams, floors))
    return cache, np.zeros((*tokens.shape, 1)) if every else np.zeros((len(tokens), 1))

  monkeypatch.setattr(prefill, "encode", encode)
  monkeypatch.setattr(prefill, "extend", extend)
  return calls


class TestReader:

  @pytest.mark.parametrize("buckets", [(1,), (3,), (2, 5), (W, 4 * W)])
  def test_every_row_of_a_plan_is_read_once(self, served, recorded, buckets):
    """Ragged plans in one batch; n-grams are the whole text's, also after a hit (Engram)."""
    ids = served.ids(3 * W)
    ngrams, reader = served.ngrams(ids), served.reader(buckets=buckets)
    cache = served.cache()
    for c in (0, 2, W, W + 2, 2 * W):
      plans = [
          every_plan(n, min(n, c))[line % 5] if line != 7 else None
          for line, n in enumerate(range(1, 3 * W + 1))
      ]
      prompts = [None if p is None else line[: p.length] for p, line in zip(plans, ids)]
      recorded.clear()
      reader.prefill(cache, prompts, plans)
      for line, plan in enumerate(plans):
        for program, stop, first in (("encode", "decoder_start", "encoder_start"),
                                     ("extend", "length", "decoder_start")):  # fmt: skip
          read = []
          for name, tokens, rows, words, floors in recorded:
            live = rows.segments[line] > 0
            # Live rows come first.
            assert (np.diff(live.astype(int)) <= 0).all()
            if name != program or plan is None:
              assert name != program or not live.any()
              continue
            positions = rows.positions[line, live]
            read.extend(positions)
            np.testing.assert_array_equal(tokens[line, live], ids[line, positions])
            np.testing.assert_array_equal(words[line, live], ngrams[line, positions])
            np.testing.assert_array_equal(rows.writes[line, live], positions >= plan.cached)
            assert not rows.writes[line, ~live].any()
            assert (rows.floors[line, live] == plan.encoder_floor).all()
            if program == "extend":
              assert (floors[line] == plan.decoder_floor).all()
          if plan is not None:
            assert read == list(range(getattr(plan, first), getattr(plan, stop)))

  def test_chunks_have_the_lengths_of_the_buckets(self, served, recorded):
    ids, plan = served.ids(60, lines=1), replay.cold(60, W)
    served.reader(buckets=(8, 32)).prefill(served.cache(lines=1), [ids[0]], [plan])
    lengths = [(name, tokens.shape[1]) for name, tokens, *_ in recorded]
    assert lengths == [("encode", 32), ("encode", 32), ("extend", W)]
    assert prefill.chunk_lengths(0, (4, 8)) == []
    assert prefill.chunk_lengths(8, (4, 8)) == [8]
    assert prefill.chunk_lengths(21, (4, 8)) == [8, 8, 8]
    assert prefill.chunk_lengths(20, (4, 8)) == [8, 8, 4]

  @pytest.mark.parametrize(
      ("prompt", "plan", "says"),
      [
          ([], replay.exact(1), "the prompt is empty"),
          (np.zeros(0, np.int32), replay.exact(1), "the prompt is empty"),
          (np.zeros(257, np.int32), replay.exact(257), "has 257 tokens; the cache holds 256"),
          ([3, 64], replay.exact(2), r"token id 64 at index 1 is outside \[0, 64\)"),
          ([-1, 3], replay.exact(2), r"token id -1 at index 0"),
          ([1.0, 3], replay.exact(2), "must be integers"),
          ([1, 3], replay.exact(3), "the plan is for 3 tokens; the prompt has 2"),
          (None, replay.exact(3), "must be integers"),
          (np.arange(34), replay.continued(34, 29, W), "cached is 29; .* a multiple of 2 tokens"),
      ],
  )
  def test_bad_prompts_are_refused_before_anything_runs(self, served, recorded, prompt, plan, says):
    good, fine = np.arange(5), replay.exact(5)
    with pytest.raises(ValueError, match=says):
      served.reader().prefill(served.cache(lines=2), [good, prompt], [fine, plan])
    assert not recorded

  def test_a_prompt_that_fills_the_cache_is_read(self, served, recorded):
    served.reader().prefill(served.cache(lines=1), [np.zeros(256, int)], [replay.exact(256)])
    assert sum(tokens.shape[1] for _, tokens, *_ in recorded) == 256


class TestHistory:

  def test_decode_sees_the_words_of_the_uncut_text(self, served, monkeypatch):
    """A text cut at every offset, a line each, and read on one token at a time."""
    length = 40
    text = served.ids(length, lines=1)
    ids = np.repeat(text, length, axis=0)
    words, cuts = served.ngrams(ids), np.arange(1, length + 1)
    cache, seen = served.cache(lines=length), []
    padded = np.arange(length) < cuts[:, None]
    rows = jax.tree.map(lambda a: np.where(padded, a, 0), Rows.single(length, length))
    cache = prefill.advance(cache, rows, words, np.zeros((length, 2), np.int32))

    def advance(model, cache, tokens, rows, ngrams, floors, how):
      seen.append((np.asarray(rows.positions[:, 0]), np.asarray(ngrams[:, 0])))
      both = jnp.stack([rows.floors[:, 0], floors[:, 0]], axis=1)
      cache = prefill.advance(cache, rows, ngrams, both)
      return prefill.Extended(cache, jnp.zeros((length, 1, 1)), (), ())

    class Blind:
      logits = staticmethod(lambda hidden: hidden)

    monkeypatch.setattr(decode, "extend_rows", advance)
    at = cuts
    while (live := at < length).any():
      tokens = ids[np.arange(length), np.minimum(at, length - 1)]
      cache, _ = decode.decode_row(Blind, cache, tokens, live, served.classes)
      positions, ngrams = seen[-1]
      np.testing.assert_array_equal(positions[live], at[live])
      np.testing.assert_array_equal(ngrams[live], words[live, at[live]])
      at = at + live
    np.testing.assert_array_equal(cache.lengths, length)
    np.testing.assert_array_equal(cache.history, words[:, -1, :-1])
