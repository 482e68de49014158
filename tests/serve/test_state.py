"""Between cache and stores: what is taken comes back byte for byte, and only what is asked for."""

import dataclasses

import jax
import numpy as np
import pytest

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats
from deepseek_jax.schedule import Schedule
from deepseek_jax.serve import replay, state
from deepseek_jax.serve.session import WindowState

PACKED = CacheFormats()
PLAIN = CacheFormats("float32", "bfloat16", "float32")
W, LINES = 4, 3

each_storage = pytest.mark.parametrize("storage", [PACKED, PLAIN], ids=["packed", "plain"])


def random_cache(served, storage, seed=0):
  """A cache of random bytes whose lines have read 5, 9 and 2 tokens."""
  cache = Cache.init(served.config, storage, batch=LINES, capacity=1)
  rng = np.random.default_rng(seed)

  def fill(a):
    return rng.integers(0, 256, a.nbytes, np.uint8).view(a.dtype).reshape(a.shape)

  filled = jax.tree.map(fill, cache)
  return dataclasses.replace(filled, lengths=np.array([5, 9, 2], np.int32))


def states(lengths, floor=0, width=5):
  """A window state [first, stop) whose rows say their position, for each (first, stop)."""
  made = []
  for first, stop in lengths:
    rows = np.broadcast_to(np.arange(first, stop, dtype=np.uint8)[:, None], (stop - first, width))
    made.append(WindowState(first, stop, floor, np.stack([rows, rows + 100])))
  return made


class TestEntries:

  @each_storage
  @pytest.mark.parametrize("tokens", [0, 1, 2, 7, 8, 256])
  def test_entries_of_a_prefix_come_back_byte_for_byte(self, served, storage, tokens):
    """An open group has none; other rows and lines keep theirs."""
    schedule = Schedule.from_config(served.config)
    cache, other = random_cache(served, storage), random_cache(served, storage, seed=1)
    before = random_cache(served, storage, seed=1)
    rows = state.take_entries(cache, schedule, 1, tokens)
    assert {name: len(r) for name, r in rows.items()} == {
        "layer1.main_kv": tokens // 2, "layer1.index_keys": tokens // 2,
        "layer3.main_kv": tokens, "layer3.index_keys": tokens,
    }  # fmt: skip
    described = state.parts(served.config, storage)
    for name, part in described.items():
      assert (rows[name].dtype, rows[name].shape[1]) == (np.uint8, part.row_bytes)
      assert len(rows[name]) == tokens // part.ratio
    state.put_entries(other, schedule, 2, rows)
    again = state.take_entries(other, schedule, 2, tokens)
    assert all(again[name].tobytes() == rows[name].tobytes() for name in rows)
    for new, old in zip(
        other.main_kv + other.index_keys, before.main_kv + before.index_keys, strict=True
    ):
      first = tokens * new.layout.rows // cache.capacity
      new, old = served.rows(new), served.rows(old)
      np.testing.assert_array_equal(new[2, first:], old[2, first:])
      np.testing.assert_array_equal(new[:2], old[:2])
    for name in ("encoder_window", "decoder_window", "tails", "history", "lengths", "floors"):
      assert served.same_bytes(getattr(other, name), getattr(before, name)), name

  def test_parts_at_the_released_formats(self, served):
    config = dataclasses.replace(served.config, head_dim=512, index_head_dim=128)
    parts = state.parts(config, PACKED)
    assert {(p.ratio, p.row_bytes) for p in parts.values()} == {
        (2, 288),
        (2, 68),
        (1, 288),
        (1, 68),
    }

  def test_what_does_not_fit_is_refused(self, served):
    schedule, cache = Schedule.from_config(served.config), random_cache(served, PACKED)
    rows = state.take_entries(cache, schedule, 0, 8)
    for name in rows:
      with pytest.raises(ValueError, match=rf"part {name} is missing; entries need \['layer1"):
        state.put_entries(cache, schedule, 0, {k: r for k, r in rows.items() if k != name})
    for name, wrong, says in (
        ("layer1.main_kv", rows["layer1.main_kv"][:, 1:], "rows have shape"),
        ("layer3.index_keys", np.zeros((257, 20), np.uint8), "has 257 rows; the cache holds 256"),
    ):
      with pytest.raises(ValueError, match=says):
        state.put_entries(cache, schedule, 0, rows | {name: wrong})


class TestWindows:

  @each_storage
  def test_windows_come_back_byte_for_byte(self, served, storage):
    cache = random_cache(served, storage)
    for line, (first, stop) in enumerate([(1, 5), (5, 9), (0, 2)]):
      kept = state.take_window(cache, line, 0)
      assert (kept.first, kept.stop, kept.floor) == (first, stop, 0)
      ring = served.rows(cache.encoder_window)
      for i, position in enumerate(range(first, stop)):
        np.testing.assert_array_equal(kept.rows[:, i], ring[:, line, position % W])
      other, before = random_cache(served, storage, 1), random_cache(served, storage, 1)
      state.put_window(other, line, kept, stop)
      other = dataclasses.replace(other, lengths=cache.lengths)
      assert state.take_window(other, line, 0).rows.tobytes() == kept.rows.tobytes()
      rest = [n for n in range(LINES) if n != line]
      np.testing.assert_array_equal(
          served.rows(other.encoder_window)[:, rest], served.rows(before.encoder_window)[:, rest]
      )
      assert served.same_bytes(other.decoder_window, before.decoder_window)

  def test_rows_before_the_floor_are_not_kept(self, served):
    cache = random_cache(served, PACKED)
    kept = state.take_window(cache, 1, 7)
    assert (kept.first, kept.stop, kept.floor) == (7, 9, 7)
    assert kept.rows.shape[1] == 2
    assert state.take_window(cache, 1, 9).rows.shape[1] == 0

  @pytest.mark.parametrize("start", [9, 8, 7, 6, 5, 3])
  def test_rows_are_put_where_the_next_row_looks(self, served, start):
    """From `start` on a row looks back W − 1 positions; the slot it will write is free."""
    cache = random_cache(served, PACKED)
    width = cache.encoder_window.layout.row_bytes
    kept = WindowState(1, 9, 0, np.zeros((3, 8, width), np.uint8))
    kept.rows[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    state.put_window(cache, 0, kept, start)
    ring = served.rows(cache.encoder_window)[0, 0]
    for position in range(max(1, start - W), start):
      assert (ring[position % W] == position).all()

  def test_joined_states_cover_the_newest_positions(self):
    older, newer = states([(3, 7), (5, 9)])
    both = state.joined(older, newer, 2 * W)
    assert (both.first, both.stop, both.floor) == (3, 9, 0)
    assert both.rows[0, :, 0].tolist() == [3, 4, 5, 6, 7, 8]
    assert both.rows[1, :, 0].tolist() == [103, 104, 105, 106, 107, 108]
    cut = state.joined(older, newer, 5)
    assert (cut.first, cut.stop, cut.rows[0, :, 0].tolist()) == (4, 9, [4, 5, 6, 7, 8])
    (adjacent,) = states([(7, 11)])
    assert state.joined(older, adjacent, 2 * W).rows[0, :, 0].tolist() == [*range(3, 11)]

  def test_states_with_a_gap_or_another_floor_are_not_joined(self):
    older, newer, far = states([(3, 7), (5, 9), (8, 12)])
    assert state.joined(older, far, 2 * W) is far
    (other,) = states([(5, 9)], floor=2)
    assert state.joined(older, other, 2 * W) is other
    assert state.joined(newer, older, 2 * W) is older  # it begins before the older one

  @pytest.mark.parametrize(("n", "c"), [(24, 20), (24, 24), (21, 20), (24, 8), (6, 2)])
  def test_a_state_reaches_if_it_holds_every_key_that_rows_look_back_to(self, n, c):
    plan = replay.continued(n, c, W)
    start = plan.encoder_start
    needed = set(range(max(0, start - W + 1), start))
    for stop in range(n + 1):
      for first in range(stop + 1):
        (kept,) = states([(first, stop)])
        holds = needed <= set(range(first, stop))
        assert state.reaches(kept, plan, W) == holds, (first, stop)

  def test_a_floor_belongs_to_its_state(self):
    (kept,) = states([(6, 12)], floor=6)
    assert state.reaches(kept, replay.continued(16, 12, W, floor=6), W)
    assert not state.reaches(kept, replay.continued(16, 12, W), W)
    assert state.reaches(states([(6, 12)], 6)[0], replay.continued(11, 9, W, floor=6), W)


class TestIdentity:

  def test_everything_that_makes_state_foreign_changes_it(self, served):
    weights = {"a": np.arange(6.0), "b": np.ones(2, np.float32)}
    changed = {"a": np.arange(6.0), "b": np.array([1, np.nextafter(np.float32(1), 2)], np.float32)}
    longer = dataclasses.replace(served.config, max_position_embeddings=65)
    found = {
        state.identity(served.config, PACKED, weights),
        state.identity(served.config, PACKED, changed),
        state.identity(served.config, PLAIN, weights),
        state.identity(longer, PACKED, weights),
        state.identity(served.config, PACKED, "released"),
        state.identity(served.config, PACKED, "other"),
    }
    assert len(found) == 6
    assert state.identity(served.config, PACKED, dict(weights)) in found
