"""Laws of the session store: a state lives for its time, in its budget, and never changes."""

import numpy as np
import pytest

from deepseek_jax.serve import session
from tests.serve.stores import Clock

LAYERS, ROW_BYTES, WINDOW = 3, 8, 4
STATE_BYTES = LAYERS * ROW_BYTES * WINDOW


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def open_store(clock):
  def open_store(states=10, **kwargs):
    settings = {"fraction": 0.5, "host_bytes": 2 * states * STATE_BYTES, "clock": clock} | kwargs
    return session.SessionStore("model", **settings)

  return open_store


def text_of(seed, n):
  return np.random.default_rng(seed).integers(0, 129_280, n)


def state_of(tokens, floor=0):
  stop = len(tokens)
  first = max(floor, stop - WINDOW)
  rows = np.random.default_rng(int(tokens.sum())).integers(
      0, 256, (LAYERS, stop - first, ROW_BYTES), np.uint8
  )
  return session.WindowState(first, stop, floor, rows)


def put(store, tokens, **kwargs):
  return store.put(tokens, state_of(tokens), **kwargs)


def assert_found(store, tokens, stop):
  found = store.find(tokens)
  want = state_of(tokens[:stop])
  assert found[:3] == want[:3]
  np.testing.assert_array_equal(found.rows, want.rows)


def test_the_longest_state_that_a_text_continues_is_found(open_store):
  store, tokens = open_store(), text_of(0, 30)
  for n in (5, 9, 20):
    assert put(store, tokens[:n])
  put(store, np.append(tokens[:20], [1, 2, 3]))
  for n in range(5, 31):
    assert_found(store, tokens[:n], max(stop for stop in (5, 9, 20) if stop <= n))
  assert store.find(tokens[:4]) is None
  assert store.find(np.append(tokens[:4], [9, 9, 9])) is None


def test_a_state_is_alive_until_its_time_and_gone_a_second_later(open_store, clock):
  store, tokens = open_store(ttl_minutes=5), text_of(1, 8)
  put(store, tokens)
  clock.seconds += 299
  assert_found(store, tokens, 8)  # which renews it
  clock.seconds += 300
  assert_found(store, tokens, 8)
  clock.seconds += 301
  assert store.find(tokens) is None
  assert store.counters()["expired"] == 1
  assert store.counters()["bytes"] == 0


def test_expired_states_go_first_and_then_the_least_recently_used(open_store, clock):
  store = open_store(states=3)
  texts = [text_of(2 + i, 8) for i in range(6)]
  for tokens in texts[:3]:
    put(store, tokens)
    clock.seconds += 1
  store.find(texts[0])
  put(store, texts[3])
  alive = [store.find(tokens) is not None for tokens in texts]
  assert alive == [True, False, True, True, False, False]
  assert store.counters()["evicted_budget"] == 1
  clock.seconds += 200
  store.find(texts[2])
  clock.seconds += 200
  put(store, texts[4])
  put(store, texts[5])
  assert store.find(texts[2]) is not None
  assert store.counters()["expired"] == 2
  assert store.counters()["evicted_budget"] == 1
  assert store.counters()["bytes"] == 3 * STATE_BYTES == store.budget_bytes


def test_a_state_beyond_the_budget_is_refused(open_store):
  store, tokens = open_store(states=1), text_of(8, 8)
  put(store, tokens)
  wide = session.WindowState(0, 9, 0, np.zeros((LAYERS, 9, ROW_BYTES), np.uint8))
  assert not store.put(text_of(9, 9), wide)
  assert store.counters()["refused_budget"] == 1
  assert_found(store, tokens, 8)


def test_a_session_of_50_turns_keeps_one_state(open_store):
  """A20: a session that grows does not pile up copies."""
  store, tokens = open_store(states=100), text_of(10, 500)
  for n in range(10, 501, 10):
    put(store, tokens[:n], replaces=tokens[: n - 10])
    assert store.counters()["states"] == 1
    assert store.counters()["bytes"] == STATE_BYTES
    assert_found(store, tokens[:n], n)
  assert store.counters()["replaced"] == 49
  assert not store.find(tokens[:490])


def test_states_are_copies_and_freed_ones_are_poisoned(open_store):
  """A13: nobody reads another text's window, and a stale view shows."""
  store, tokens = open_store(states=1), text_of(11, 8)
  state = state_of(tokens)
  store.put(tokens, state)
  state.rows[:] = 1
  store.find(tokens).rows[:] = 2
  assert_found(store, tokens, 8)
  [kept] = store._kept.values()
  put(store, text_of(12, 8))
  assert (kept.state.rows == 0xFF).all()
  assert store.find(tokens) is None


def test_the_same_text_again_takes_the_place_of_its_state(open_store):
  store, tokens = open_store(), text_of(13, 8)
  put(store, tokens)
  other = session.WindowState(6, 8, 6, np.full((LAYERS, 2, ROW_BYTES), 3, np.uint8))
  store.put(tokens, other)
  found = store.find(tokens)
  assert found[:3] == (6, 8, 6)
  assert (found.rows == 3).all()
  assert store.counters()["states"] == 1
  assert store.counters()["bytes"] == other.rows.nbytes


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (3, 4, 0)])
def test_empty_rows_come_back(open_store, shape):
  store, tokens = open_store(), text_of(14, 8)
  store.put(tokens, session.WindowState(8 - shape[1], 8, 0, np.zeros(shape, np.uint8)))
  assert store.find(tokens).rows.shape == shape


def test_models_do_not_share_states():
  tokens = text_of(15, 8)
  a, b = (session.SessionStore(name, host_bytes=10**6) for name in "ab")
  put(a, tokens)
  b._kept, b._stops = a._kept, a._stops
  assert a.find(tokens)
  assert not b.find(tokens)


def test_the_budget_is_a_fraction_of_the_host():
  store = session.SessionStore("model")
  assert 2**24 < store.budget_bytes < 2**50
  assert session.SessionStore("model", fraction=0.25, host_bytes=1000).budget_bytes == 250


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("ttl_minutes: 0", {"ttl_minutes": 0}),
        ("ttl_minutes: nan", {"ttl_minutes": float("nan")}),
        ("fraction: 0", {"fraction": 0}),
        ("fraction: 1.5", {"fraction": 1.5}),
        ("host_bytes: 0", {"host_bytes": 0}),
    ],
)
def test_settings_that_are_not_allowed(field, settings):
  with pytest.raises(ValueError, match=field):
    session.SessionStore("model", **settings)
  with pytest.raises(ValueError, match="identity"):
    session.SessionStore("")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("state.floor, first, stop", {"floor": 5}),
        ("state.floor, first, stop", {"floor": -1}),
        ("state.stop: 9", {"stop": 9}),
        ("state.rows", {"first": 5}),
        ("state.rows", {"rows": np.zeros((LAYERS, 4, ROW_BYTES), np.int8)}),
        ("state.rows", {"rows": np.zeros((4, ROW_BYTES), np.uint8)}),
    ],
)
def test_states_that_are_not_allowed(open_store, field, change):
  tokens = text_of(16, 8)
  with pytest.raises(ValueError, match=field):
    open_store().put(tokens, state_of(tokens)._replace(**change))
