"""Laws of the persistent store: what is saved is hit, and lifetimes are kept."""

import pathlib
import random

import numpy as np
import pytest
import tensorstore as ts

from deepseek_jax.serve import persistent, record
from tests.serve.stores import (
    BLOCK,
    HOUR,
    PARTS,
    Clock,
    assert_serves,
    keys,
    rows_of,
    save,
    text_of,
)


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def kv():
  return ts.KvStore.open("memory://").result()


@pytest.fixture
def open_store(kv, clock):
  def open_store(url=kv, identity="model", parts=PARTS, **kwargs):
    settings = {"budget_bytes": 10**6, "block": BLOCK, "clock": clock} | kwargs
    return persistent.PersistentStore(url, identity, parts, **settings)

  return open_store


@pytest.mark.parametrize("n", [*range(20), 63, 64, 65, 700])
def test_what_is_saved_is_served(open_store, n):
  tokens = text_of(n, n)
  assert save(open_store(), tokens) == n // 2 * 2
  store = open_store()
  assert_serves(store, tokens, n // 2 * 2)
  assert_serves(store, np.append(tokens, 5), n // 2 * 2)
  counters = store.counters()
  assert counters["hits"] == 2 * (n > 1)
  assert counters["misses"] == 2 * (n <= 1)
  assert counters["tokens"] == n // 2 * 2


def test_saving_again_writes_nothing(open_store, kv):
  store, tokens = open_store(), text_of(0, 43)
  save(store, tokens)
  before = keys(kv)
  for n in (43, 42, 40, 21, 5):
    assert save(store, tokens[:n]) == n // 2 * 2
  assert keys(kv) == before
  assert store.counters()["saved_blocks"] == 6


@pytest.mark.parametrize("offset", range(41))
def test_divergence_loses_less_than_a_group(open_store, offset):
  store, tokens = open_store(), text_of(1, 40)
  save(store, tokens)
  other = tokens.copy()
  other[offset:] += 1
  assert_serves(store, other, offset // 2 * 2)
  assert_serves(store, tokens[:offset], offset // 2 * 2)


def test_a_longer_text_replaces_its_tail(open_store, kv):
  store, tokens = open_store(), text_of(2, 24)
  for n in range(2, 25, 2):
    save(store, tokens[:n])
    assert len(keys(kv)) == -(-n // BLOCK)
    assert_serves(store, tokens, n)
  assert store.counters()["replaced_tails"] == 9


def test_two_tails_of_one_parent_live_side_by_side(open_store):
  store, a = open_store(), text_of(3, 14)
  b = np.append(a[:12], [7, 8])
  save(store, a)
  save(store, b)
  assert_serves(store, a, 14)
  assert_serves(store, b, 14)


def test_only_the_best_of_many_children_is_read(open_store):
  """Chats behind one system prompt: the trail in the key says which object to read."""
  store = open_store()
  start = text_of(4, BLOCK)
  chats = [np.concatenate([start, text_of(100 + i, BLOCK)]) for i in range(200)]
  for chat in chats:
    save(store, chat)
  read = []
  get = store._kv.read
  store._kv = type(
      "Kv", (), {"read": lambda key: read.append(key) or get(key), "list": store._kv.list}
  )
  assert store.lookup(chats[77][:14]).length == 14
  assert len(read) == 1
  assert store.lookup(np.concatenate([start, text_of(9, 6)])).length == BLOCK
  assert len(read) < 10


def test_equal_trails_of_different_tokens_are_told_apart(open_store):
  layout = record.Layout("model", PARTS, BLOCK)
  pairs = np.arange(2000).reshape(-1, 2)
  trails = [layout.trail(pair) for pair in pairs]
  twin = next(i for i in range(1, 1000) if trails[i] == trails[0])
  store = open_store()
  save(store, pairs[twin])
  assert_serves(store, pairs[0], 0)
  save(store, pairs[0])
  assert_serves(store, pairs[0], 2)
  assert_serves(store, pairs[twin], 2)


def test_a_shorter_length_of_a_hit_is_served(open_store):
  store, tokens = open_store(), text_of(5, 40)
  save(store, tokens)
  hit = store.lookup(tokens)
  for length in range(0, 41, 2):
    short, rows = store.read(hit._replace(length=length))
    assert short.length == length
    np.testing.assert_array_equal(rows["latest"], rows_of(tokens)["latest"][:length])
  for length in (-2, 3, 42):
    with pytest.raises(ValueError, match="hit.length"):
      store.read(hit._replace(length=length))
  with pytest.raises(ValueError, match="hit.records"):
    open_store(identity="other").read(hit)


def test_no_tokens_are_zero_length_rows(open_store):
  store = open_store()
  assert save(store, text_of(0, 0)) == 0
  _, rows = store.read(store.lookup(text_of(0, 0)))
  assert {name: array.shape for name, array in rows.items()} == {
      name: (0, part.row_bytes) for name, part in PARTS.items()
  }


def test_flash_stores_890_bytes_a_token(open_store, kv):
  """Main KV 256 + 32 and index keys 64 + 4 bytes of three sources with m = 2 and one with m = 1."""
  parts = {}
  for layer, ratio in ((2, 2), (8, 2), (14, 2), (20, 1)):
    parts[f"{layer}.main"] = record.Part(ratio, 256 + 32)
    parts[f"{layer}.keys"] = record.Part(ratio, 64 + 4)
  store = open_store(parts=parts, block=64, budget_bytes=10**9)
  tokens = text_of(6, 1000)
  rows = rows_of(tokens, parts)
  assert sum(array.nbytes for array in rows.values()) == 890 * 1000
  store.save(tokens, rows)
  hit, read = store.read(store.lookup(tokens))
  assert hit.length == 1000
  assert all(np.array_equal(read[name], rows[name]) for name in parts)
  headers = 0
  for key in keys(kv):
    _, _, header = record._PREFIX.unpack_from(kv.read(key).result().value)
    headers += record._PREFIX.size + header + record._DIGEST_BYTES
  assert store.counters()["bytes"] - headers == 890 * 1000
  assert headers < 0.04 * 890 * 1000


# A16: repeated prompts hit, aligned or not.


def test_sessions_in_turn_hit(open_store):
  store = open_store()
  rng = np.random.default_rng(11)
  sessions = [text_of(20 + i, 3 * BLOCK + i) for i in range(8)]
  for turn in range(4):
    for i, tokens in enumerate(sessions):
      if turn:
        assert_serves(store, tokens, len(tokens) // 2 * 2)
        edited = np.append(tokens[:-1], tokens[-1] + 1)
        assert_serves(store, edited, (len(tokens) - 1) // 2 * 2)
      save(store, tokens)
      sessions[i] = tokens
    assert store.counters()["misses"] == 0
    for i, tokens in enumerate(sessions):
      longer = np.append(tokens, rng.integers(0, 100, 5 + i))
      assert_serves(store, longer, len(tokens) // 2 * 2)
      save(store, longer)
      sessions[i] = longer


def test_another_model_or_layout_sees_nothing(open_store):
  tokens = text_of(10, 16)
  save(open_store(), tokens)
  for other in (open_store(identity="other"), open_store(block=16)):
    assert other.lookup(tokens).length == 0
    assert other.counters()["misses"] == 1
    assert other.counters()["tokens"] == 0
    assert other.counters()["bytes"] > 0


# P10: the guarantee, and the budget beyond it.


def size_of_blocks(open_store, n=1):
  store = open_store(ts.KvStore.open("memory://").result())
  save(store, text_of(0, n * BLOCK))
  return store.counters()["bytes"]


def test_an_entry_is_there_at_72_hours_and_gives_way_after(open_store, clock):
  budget = size_of_blocks(open_store) * 3 // 2
  store = open_store(budget_bytes=budget)
  old, new = text_of(12, BLOCK), text_of(13, BLOCK)
  save(store, old)
  clock.seconds += 72 * HOUR
  assert save(store, new) == 0
  assert store.counters()["refused_budget"] == 1
  store = open_store(budget_bytes=budget)  # what is stored says when
  assert save(store, new) == 0
  assert store.counters()["evicted_budget"] == 0
  clock.seconds += 1
  assert save(store, new) == BLOCK
  assert store.counters()["evicted_budget"] == 1
  assert_serves(store, old, 0)
  assert_serves(store, new, BLOCK)


def test_a_hit_renews_the_guarantee_and_the_least_recent_goes_first(open_store, clock):
  store = open_store(budget_bytes=size_of_blocks(open_store) * 7 // 2)
  texts = [text_of(14 + i, BLOCK) for i in range(5)]
  for tokens in texts[:3]:
    save(store, tokens)
    clock.seconds += HOUR
  store.lookup(texts[0])
  clock.seconds += 80 * HOUR
  store.lookup(texts[2])
  assert save(store, texts[3]) == BLOCK
  assert [store.lookup(t).length > 0 for t in texts] == [True, False, True, True, False]
  assert save(store, texts[4]) == 0
  assert store.counters()["evicted_budget"] == 1


def test_leaves_go_before_their_parents(open_store, clock):
  store = open_store(budget_bytes=size_of_blocks(open_store, 6))
  tokens = text_of(19, 6 * BLOCK)
  save(store, tokens)
  clock.seconds += 80 * HOUR
  assert save(store, text_of(20, 3 * BLOCK)) == 3 * BLOCK
  length = store.lookup(tokens).length
  assert length == 2 * BLOCK
  # What is stored is the beginning of one text and all of the other: nothing is cut off.
  assert store.counters()["tokens"] == length + 3 * BLOCK
  assert_serves(store, tokens, length)


def test_an_object_beyond_the_budget_evicts_nothing(open_store, clock):
  store = open_store(budget_bytes=size_of_blocks(open_store) - 1)
  save(store, text_of(25, 2))
  clock.seconds += 80 * HOUR
  assert save(store, text_of(26, BLOCK)) == 0
  assert store.lookup(text_of(25, 2)).length == 2


def test_eviction_leaves_no_folder_behind(open_store, clock, tmp_path):
  store = open_store(tmp_path, budget_bytes=size_of_blocks(open_store, 4))
  for i in range(6):
    save(store, text_of(30 + i, 4 * BLOCK))
    clock.seconds += 80 * HOUR
  folders = [folder for folder in tmp_path.glob("*/*") if folder.is_dir()]
  assert len(folders) <= 4
  assert all(any(folder.iterdir()) for folder in folders)


def test_two_instances_in_turn_keep_to_the_budget_and_to_the_truth(open_store, tmp_path, clock):
  budget = size_of_blocks(open_store, 12)
  stores = [open_store(tmp_path, budget_bytes=budget) for _ in range(2)]
  rng = random.Random(52)
  for _ in range(200):
    store = rng.choice(stores)
    tokens = text_of(60 + rng.randrange(6), rng.randrange(2, 40, 2))
    hit, rows = store.read(store.lookup(tokens))
    for name, want in rows_of(tokens[: hit.length]).items():
      np.testing.assert_array_equal(rows[name], want)
    save(store, tokens)
    clock.seconds += rng.choice([1, HOUR, 40 * HOUR])
    used = sum(file.stat().st_size for file in tmp_path.glob("*/*/*"))
    assert used <= budget + budget // 16
  assert all(store.counters()["evicted_budget"] for store in stores)


# What is not allowed.


def test_folders_urls_and_specs_open(open_store, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  tokens = text_of(70, 16)
  save(open_store("a b"), tokens)
  for url in (
      pathlib.Path("a b"),
      tmp_path / "a b",
      (tmp_path / "a b").as_uri(),
      {"driver": "file", "path": f"{tmp_path}/a b/"},
  ):
    assert open_store(url).lookup(tokens).length == 16
  assert save(open_store("memory://"), tokens) == 16


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("guarantee_hours: 0", {"guarantee_hours": 0}),
        ("guarantee_hours: nan", {"guarantee_hours": float("nan")}),
        ("budget_bytes: 0", {"budget_bytes": 0}),
        ("budget_bytes: -1", {"budget_bytes": -1}),
        ("block: 7, allowed multiples of", {"block": 7}),
        ("block: 0", {"block": 0}),
        ("identity: ''", {"identity": ""}),
        ("parts: {}", {"parts": {}}),
        (r"parts\['a'\]", {"parts": {"a": record.Part(0, 4)}}),
        (r"parts\['a'\]", {"parts": {"a": record.Part(1, 0)}}),
        ("url: nosuch://x/", {"url": "nosuch://x"}),
        ("url: file:///dev/null/", {"url": "/dev/null"}),
    ],
)
def test_settings_that_are_not_allowed(open_store, field, settings):
  with pytest.raises(ValueError, match=field):
    open_store(**settings)


@pytest.mark.parametrize(
    "tokens", [np.zeros(3), np.zeros((1, 2), int), np.array([-1]), np.array([2**31])]
)
def test_tokens_that_are_not_allowed(open_store, tokens):
  with pytest.raises(ValueError, match="tokens: "):
    open_store().lookup(tokens)
  with pytest.raises(ValueError, match="tokens: "):
    open_store().save(tokens, {})


def test_parts_that_are_not_allowed(open_store):
  store, tokens = open_store(), text_of(71, 9)
  rows = rows_of(tokens)
  for wrong in (
      {},
      rows | {"more": rows["main"]},
      rows | {"main": rows["main"][:-1]},
      rows | {"main": rows["main"].astype(np.int32)},
  ):
    with pytest.raises(ValueError, match="parts"):
      store.save(tokens, wrong)
  assert store.counters()["objects"] == 0
