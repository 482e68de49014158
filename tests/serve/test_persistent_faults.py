"""Faults of the persistent store: damage, full disks, other versions, other processes.

Nothing is ever served from a bad object (promise P11).
"""

import random
import subprocess
import sys

import numpy as np
import pytest
import tensorstore as ts

from deepseek_jax.serve import persistent, record
from tests.serve.stores import (
    BLOCK,
    PARTS,
    ROOT,
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


def rewrite(kv, key, change):
  data = bytearray(kv.read(key).result().value)
  kv.write(key, bytes(change(data) or data)).result()


@pytest.mark.parametrize("seed", range(50))
def test_damage_anywhere_shortens_the_hit(open_store, kv, seed):
  rng = random.Random(seed)
  tokens = text_of(seed, 46)
  save(open_store(), tokens)
  store = open_store()
  hit = store.lookup(tokens)
  broken = rng.randrange(len(hit.records))
  key = hit.records[broken].key
  kind = ("flip", "truncate", "delete", "extend", "flip")[seed % 5]
  if kind == "delete":
    kv.write(key, None).result()
  else:
    data = bytearray(kv.read(key).result().value)
    at = rng.randrange(len(data))
    if kind == "flip":
      data[at] ^= 1 << rng.randrange(8)
    kv.write(
        key, bytes({"flip": data, "truncate": data[:at], "extend": data + b"\0"}[kind])
    ).result()
  short, rows = store.read(hit)
  assert short.length == broken * BLOCK
  assert short.records == hit.records[:broken]
  for name, want in rows_of(tokens[: broken * BLOCK]).items():
    np.testing.assert_array_equal(rows[name], want)
  counters = store.counters()
  reasons = ("missing", "truncated", "corrupt_header", "corrupt_checksum", "wrong_version")
  assert sum(counters[reason] for reason in reasons) == 1
  assert counters["lost_tokens"] == 46 - broken * BLOCK
  assert key.encode() not in keys(kv)
  assert counters["bytes"] == sum(record.parse_key(key).size for key in keys(kv))
  # Once saved again, all of it is there again.
  assert save(store, tokens) == 46
  assert_serves(store, tokens, 46)


def test_zeroed_index_keys_are_not_served_with_their_main_kv(open_store, kv):
  tokens = text_of(7, 8)
  save(open_store(), tokens)
  keys_bytes = rows_of(tokens)["keys"].tobytes()
  [key] = keys(kv)
  rewrite(kv, key, lambda data: data.replace(keys_bytes, bytes(len(keys_bytes))))
  store = open_store()
  assert_serves(store, tokens, 0)
  assert store.counters()["corrupt_checksum"] == 1


def test_another_version_or_model_or_place_is_not_served(open_store, kv):
  tokens, other = text_of(8, 8), text_of(9, 8)
  for reason in ("wrong_version", "wrong_identity", "misplaced"):
    store = open_store()
    save(store, tokens)
    [stored] = store.lookup(tokens).records
    if reason == "wrong_version":
      rewrite(kv, stored.key, lambda data: data[:8] + (2).to_bytes(4, "little") + data[12:])
    else:
      foreign = open_store(identity="other" if reason == "wrong_identity" else "model")
      text = tokens if reason == "wrong_identity" else other
      save(foreign, text)
      [found] = foreign.lookup(text).records
      kv.write(stored.key, kv.read(found.key).result().value).result()
    assert_serves(store, tokens, 0)
    assert store.counters()[reason] == 1
    assert stored.key.encode() not in keys(kv)


@pytest.mark.parametrize("manifest", [b'{"version": 2}', b"{}", b"not json", b""])
def test_another_format_version_is_refused(open_store, tmp_path, manifest):
  open_store(tmp_path)
  (tmp_path / "manifest.json").write_bytes(manifest)
  found = "version 2" if b"2" in manifest else "version b"
  with pytest.raises(ValueError, match=rf"{tmp_path.name}/ has format {found}.*allowed 1"):
    open_store(tmp_path)


def test_a_full_disk_is_counted_and_survived(open_store, kv, caplog):
  store, tokens = open_store(), text_of(40, 40)
  good, writes = store._kv, []

  def write(key, value):
    writes.append(key)
    if len(writes) > 2:
      raise OSError(28, "No space left on device")
    return good.write(key, value)

  store._kv = type("Kv", (), {"read": good.read, "list": good.list, "write": write})
  assert save(store, tokens) == 2 * BLOCK
  assert store.counters()["write_failed"] == 1
  assert "No space left" in caplog.text
  assert_serves(store, tokens, 2 * BLOCK)
  store._kv = good
  assert save(store, tokens) == 40
  assert_serves(store, tokens, 40)


def test_a_store_that_cannot_be_listed_or_read_is_a_miss(open_store):
  store, tokens = open_store(), text_of(41, 20)
  save(store, tokens)
  good = store._kv
  broken = type("Broken", (), {"result": lambda: (_ for _ in ()).throw(ValueError("UNAVAILABLE"))})
  store._kv = type("Kv", (), {"read": lambda key: broken, "list": lambda *_: broken})
  assert store.lookup(tokens).length == 0
  store.recount()
  store._kv = good
  hit = store.lookup(tokens)
  store._kv = type("Kv", (), {"read": lambda key: broken})
  assert store.read(hit)[0].length == 0
  store._kv = good
  assert_serves(store, tokens, 20)
  assert store.counters()["read_failed"] == 3


_PROCESS = """
import resource, sys
import numpy as np
from deepseek_jax.serve import persistent, record
from tests.serve.stores import (
    BLOCK, HOUR, PARTS, ROOT, Clock, assert_serves, keys, rows_of, save, text_of,
)
assert "jax" not in sys.modules
folder, limit, seed, n = sys.argv[1], *map(int, sys.argv[2:])
parts = {"main": record.Part(2, 16), "keys": record.Part(2, 8), "latest": record.Part(1, 4)}
store = persistent.PersistentStore(folder, "model", parts, budget_bytes=10**6, block=8)
tokens = np.random.default_rng(seed).integers(0, 129_280, n)
hit, rows = store.read(store.lookup(tokens))
sums = np.cumsum(tokens)
new = {k: (sums[r - 1 :: r, None] * (i + 3) + np.arange(b)).astype(np.uint8)
       for i, (k, (r, b)) in enumerate(parts.items())}
assert all(np.array_equal(rows[k], new[k][: len(rows[k])]) for k in parts)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
saved = store.save(tokens, new)
print(hit.length, saved, store.counters()["write_failed"])
"""


def process(folder, seed, n, limit=10**9):
  """What another process hits, then has stored, and how many of its writes fail."""
  command = [sys.executable, "-c", _PROCESS, str(folder), str(limit), str(seed), str(n)]
  done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
  return [int(word) for word in done.stdout.split()]


def test_processes_share_a_folder(open_store, tmp_path):
  store = open_store(tmp_path)
  save(store, text_of(50, 20))
  assert process(tmp_path, 50, 40) == [20, 40, 0]
  assert_serves(store, text_of(50, 60), 40)
  assert process(tmp_path, 50, 40) == [40, 40, 0]
  # One deletes what the other knows: a miss, and nothing worse.
  hit = store.lookup(text_of(50, 40))
  other = open_store(tmp_path)
  for stored in hit.records[2:]:
    other._delete(stored)
  assert store.read(hit)[0].length == 2 * BLOCK
  assert store.counters()["missing"] == 1
  assert process(tmp_path, 50, 40) == [16, 40, 0]
  store.recount()
  assert_serves(store, text_of(50, 40), 40)
  listed = [file.name for file in tmp_path.glob("*/*/*")]
  assert store.counters()["objects"] == len(listed) == 5


def test_a_real_write_failure_leaves_nothing_visible(open_store, tmp_path):
  tokens = text_of(51, 24)
  assert process(tmp_path, 51, 24, limit=100) == [0, 0, 1]
  assert not [file for file in tmp_path.glob("*/**/*") if file.is_file()]
  store = open_store(tmp_path)
  assert_serves(store, tokens, 0)
  assert save(store, tokens) == 24
  assert_serves(store, tokens, 24)
