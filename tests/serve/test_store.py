"""Laws of the pair: two lifetimes, and no window without the global entries of its tokens."""

import hashlib
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorboardX
import tensorstore as ts

from deepseek_jax.serve import persistent, record, session, store
from tests.serve.stores import Clock

ROOT = pathlib.Path(__file__).parents[2]
PARTS = {"main": record.Part(2, 16), "keys": record.Part(2, 8)}
BLOCK = 8
HOUR = 3600.0


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def open_store(clock):
  kv = ts.KvStore.open("memory://").result()

  def open_store(url=kv, budget_bytes=10**6, host_bytes=10**6):
    return store.Store(
        persistent.PersistentStore(
            url, "model", PARTS, budget_bytes=budget_bytes, block=BLOCK, clock=clock
        ),
        session.SessionStore("model", host_bytes=host_bytes, clock=clock),
    )

  return open_store


def text_of(seed, n):
  return np.random.default_rng(seed).integers(0, 1000, n)


def rows_of(tokens):
  sums = np.cumsum(tokens[: len(tokens) // 2 * 2])[1::2, None]
  return {name: (sums + np.arange(part.row_bytes)).astype(np.uint8) for name, part in PARTS.items()}


def window_of(tokens):
  stop = len(tokens)
  rows = np.full((2, min(4, stop), 8), tokens.sum() % 251, np.uint8)
  return session.WindowState(max(0, stop - 4), stop, 0, rows)


def save(pair, tokens, replaces=None):
  pair.save(tokens, rows_of(tokens))
  pair.put(tokens, window_of(tokens), replaces)


def test_the_window_lives_for_minutes_and_the_global_entries_for_days(open_store, clock):
  pair, tokens = open_store(), text_of(0, 40)
  save(pair, tokens)
  clock.seconds += 5 * 60
  hit, windows = pair.lookup(tokens)
  assert (hit.length, windows.stop) == (40, 40)
  clock.seconds += 5 * 60 + 1
  hit, windows = pair.lookup(tokens)
  assert (hit.length, windows) == (40, None)
  clock.seconds += 72 * HOUR
  (hit, windows), rows = pair.read(tokens, pair.lookup(tokens))
  assert (hit.length, windows) == (40, None)
  np.testing.assert_array_equal(rows["main"], rows_of(tokens)["main"])
  assert pair.counters()["session/expired"] == 1
  assert pair.counters()["persistent/hits"] == 3


def test_a_window_beyond_the_global_hit_is_not_used(open_store):
  """A15: of two hit lengths the shorter counts, and a window ends within it."""
  pair, tokens = open_store(), text_of(1, 40)
  pair.put(tokens, window_of(tokens))
  assert pair.lookup(tokens) == (persistent.Hit(0, ()), None)
  pair.put(tokens[:16], window_of(tokens[:16]))
  pair.save(tokens[:24], rows_of(tokens[:24]))
  hit, windows = pair.lookup(tokens)
  assert (hit.length, windows.stop) == (24, 16)


def test_a_hit_that_reading_shortens_takes_its_window_along(open_store):
  pair, tokens = open_store(), text_of(2, 40)
  save(pair, tokens)
  pair.put(tokens[:8], window_of(tokens[:8]))
  found = pair.lookup(tokens)
  assert found.windows.stop == 40
  pair.persistent._kv.write(found.hit.records[2].key, b"").result()
  (hit, windows), rows = pair.read(tokens, found)
  assert (hit.length, windows.stop) == (16, 8)
  assert rows["main"].shape == (8, 16)
  pair.persistent._kv.write(found.hit.records[0].key, None).result()
  (hit, windows), rows = pair.read(tokens, found)
  assert (hit.length, windows) == (0, None)
  assert rows["main"].shape == (0, 16)
  counters = pair.counters()
  assert counters["persistent/truncated"] == 1
  assert counters["persistent/missing"] == 1
  assert counters["persistent/lost_tokens"] == 24 + 40


def contents(pair):
  kv = pair.persistent._kv
  data = [kv.read(key).result().value for key in sorted(kv.list().result())]
  return hashlib.sha256(b"".join(data)).digest()


def test_windows_never_change_global_bytes(open_store, clock):
  pair = open_store(host_bytes=3000)
  texts = [text_of(10 + i, 20 + i) for i in range(8)]
  for tokens in texts:
    save(pair, tokens)
  before = contents(pair), pair.counters()["persistent/bytes"]
  for _ in range(3):
    for tokens in texts:
      pair.put(tokens, window_of(tokens))
    clock.seconds += 301
  counters = pair.counters()
  assert counters["session/evicted_budget"] > 0
  assert counters["session/expired"] > 0
  assert (contents(pair), counters["persistent/bytes"]) == before


_RESTART = """
import sys
import numpy as np
from deepseek_jax.serve import persistent, record
assert "jax" not in sys.modules
parts = {"main": record.Part(2, 16), "keys": record.Part(2, 8)}
store = persistent.PersistentStore(sys.argv[1], "model", parts, budget_bytes=10**6, block=8)
tokens = np.random.default_rng(3).integers(0, 1000, 500)
hit, rows = store.read(store.lookup(tokens))
sys.stdout.buffer.write(b"".join(rows[name].tobytes() for name in sorted(rows)))
"""


def test_a_session_of_50_turns_is_bounded_and_survives_a_restart(open_store, tmp_path):
  """A20: as many objects as the text has blocks, one window state, the same bytes afterwards."""
  pair, tokens = open_store(tmp_path), text_of(3, 500)
  for n in range(10, 501, 10):
    hit, windows = pair.lookup(tokens[:n])
    assert hit.length == n - 10
    assert (windows.stop if windows else 0) == n - 10
    save(pair, tokens[:n], replaces=tokens[: n - 10])
    counters = pair.counters()
    assert counters["persistent/objects"] == -(-n // BLOCK)
    assert counters["persistent/tokens"] == n
    assert counters["session/states"] == 1
  done = subprocess.run(
      [sys.executable, "-c", _RESTART, str(tmp_path)], cwd=ROOT, check=True, capture_output=True
  )
  rows = rows_of(tokens)
  assert done.stdout == b"".join(rows[name].tobytes() for name in sorted(rows))


def test_either_store_may_be_absent(open_store):
  tokens = text_of(4, 16)
  pair = open_store()
  save(pair, tokens)
  alone = store.Store(pair.persistent, None)
  assert alone.lookup(tokens).windows is None
  assert not alone.put(tokens, window_of(tokens))
  alone = store.Store(None, pair.session)
  assert alone.lookup(tokens) == (persistent.Hit(0, ()), None)
  assert alone.read(tokens, alone.lookup(tokens)) == (alone.lookup(tokens), {})
  assert alone.save(tokens, rows_of(tokens)) == 0
  assert store.Store(None, None).counters() == {}


def test_counters_are_flat_and_go_to_tensorboard(open_store, tmp_path):
  pair, tokens = open_store(), text_of(5, 16)
  save(pair, tokens)
  pair.lookup(tokens)
  pair.count("replays")
  pair.count("replayed_tokens", 12)
  pair.count("replays")
  counters = pair.counters()
  assert counters["replays"] == 2
  assert counters["replayed_tokens"] == 12
  assert counters["persistent/hit_tokens"] == 16
  assert counters["session/hits"] == 1
  assert counters["persistent/misses"] == 0
  written = {}
  writer = type(
      "Writer", (), {"add_scalar": lambda name, value, step: written.update({name: value})}
  )
  pair.write_tensorboard(writer, 3)
  assert written == {f"store/{name}": value for name, value in counters.items()}
  with tensorboardX.SummaryWriter(str(tmp_path)) as writer:
    pair.write_tensorboard(writer, 3)
  assert [file.stat().st_size > 1000 for file in tmp_path.iterdir()] == [True]
