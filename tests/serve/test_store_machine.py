"""Promise P9: random operations on both stores against a small model, the ledger checked each time.

Rows are a pure function of the text that they belong to, so a stale or foreign row shows at once.
"""

import collections
import functools
import hashlib
import random

import numpy as np
import pytest
import tensorstore as ts

from deepseek_jax.serve import persistent, record, session

OPERATIONS = 10_000
BLOCK = 8
PARTS = {"main": record.Part(1, 8), "keys": record.Part(2, 12)}
MULTIPLE = 2
LAYOUT = record.Layout("model", PARTS, BLOCK)
BUDGET = 9_000
GUARANTEE_MS = 72 * 3_600_000
TTL = 300
HOST_BYTES = 2_400


@functools.lru_cache(4096)
def rows_of(text):
  """Row j of a part, from the tokens up to the row's last and from the part's name."""
  n = len(text) - len(text) % MULTIPLE
  return {
      name: np.frombuffer(
          b"".join(
              hashlib.blake2b(bytes(text[:stop]), digest_size=size, key=name.encode()).digest()
              for stop in range(ratio, n + 1, ratio)
          ),
          np.uint8,
      ).reshape(n // ratio, size)
      for name, (ratio, size) in PARTS.items()
  }


def windows_of(text, floor):
  first = max(floor, len(text) - 6)
  digest = hashlib.blake2b(bytes(text)).digest() * 2
  rows = np.frombuffer(digest, np.uint8)[: 12 * (len(text) - first)]
  return session.WindowState(first, len(text), floor, rows.reshape(2, len(text) - first, 6))


class Block:
  """A stored block: when it was used and created, its size, and whether its bytes are damaged."""

  def __init__(self, now, size):
    self.used = self.created = now
    self.size, self.bad = size, False


class Model:
  """What the stores must do: blocks by the text up to their end, windows by their text."""

  def __init__(self):
    self.blocks, self.windows = {}, {}

  def family(self, text, stop):
    return [k for k in self.blocks if parent_of(k) == parent_of(text[:stop])]

  def nearest(self, text, stop):
    def shared(k):
      same = [a == b for a, b in zip(k, text[:stop])] + [False]
      return same.index(False) // MULTIPLE * MULTIPLE

    start = (stop - 1) // BLOCK * BLOCK
    for k in sorted(self.family(text, stop), key=lambda k: (-shared(k), -self.blocks[k].created)):
      if shared(k) <= start:
        break
      if not self.blocks[k].bad:
        return k, shared(k)
      del self.blocks[k]
    return None, start

  def lookup(self, text, now):
    path, length = [], 0
    for stop in ends(text):
      exact = text[:stop] in self.blocks
      key, length = (text[:stop], stop) if exact else self.nearest(text, stop)
      path += [key] if key is not None else []
      if not exact:
        break
    for key in path:
      self.blocks[key].used = now
    return path, length

  def read(self, path, length):
    for i, key in enumerate(path):
      if self.blocks[key].bad:
        del self.blocks[key]
        return i * BLOCK
    return length

  def save(self, text, now, writes):
    for stop in ends(text):
      key = text[:stop]
      if key not in self.blocks and stop % BLOCK:
        near, shared = self.nearest(text, stop)
        key = near if shared == stop else key
      if key not in self.blocks:
        size = size_of(key, now)
        if not self.make_room(size, now) or not writes:
          return
        writes -= 1
        tails = [k for k in self.family(text, stop) if len(k) < stop and key[: len(k)] == k]
        for k in tails:
          del self.blocks[k]
        self.blocks[key] = Block(now, size)
      self.blocks[key].used = now

  def bytes(self):
    return sum(block.size for block in self.blocks.values())

  def make_room(self, size, now):
    if self.bytes() + size > BUDGET:
      while self.bytes() > BUDGET - size - BUDGET // 16:
        parents = {parent_of(k) for k in self.blocks}
        due = [k for k, b in self.blocks.items() if now - b.used > GUARANTEE_MS]
        leaves = [k for k in due if k not in parents]
        if not leaves:
          break
        # Only what damage cut off its parent can be as old as another leaf.
        del self.blocks[min(leaves, key=lambda k: (self.blocks[k].used, digest(parent_of(k))))]
    return self.bytes() + size <= BUDGET

  def expire(self, now):
    self.windows = {k: v for k, v in self.windows.items() if now - v[1] <= TTL}

  def put(self, text, state, now, replaces):
    self.windows.pop(replaces, None)
    self.windows.pop(text, None)
    while (
        sum(v[0].rows.nbytes for v in self.windows.values()) + state.rows.nbytes > HOST_BYTES // 10
    ):
      del self.windows[min(self.windows, key=lambda k: self.windows[k][1])]
    self.windows[text] = (state, now)


def ends(text):
  n = len(text) - len(text) % MULTIPLE
  return [min(start + BLOCK, n) for start in range(0, n, BLOCK)]


def parent_of(text):
  return text[: (len(text) - 1) // BLOCK * BLOCK]


@functools.cache
def digest(text):
  if not text:
    return LAYOUT.space
  parent = parent_of(text)
  return record.chain(digest(parent), np.array(text[len(parent) :], "<i4"))


def size_of(text, now):
  start = len(parent_of(text))
  step = record.Step("0" * 32, "0" * 32, np.array(text[start:], "<i4"))
  return LAYOUT.pack(step, LAYOUT.rows(rows_of(text), start, len(text)), now)[0].size


class Disk:
  """A key-value store that is full after some writes."""

  def __init__(self, kv):
    self.kv, self.left = kv, float("inf")
    self.read, self.list = kv.read, kv.list

  def write(self, key, value):
    if value is not None:
      if self.left < 1:
        raise OSError(28, "No space left on device")
      self.left -= 1
    return self.kv.write(key, value)


class Machine:
  """Runs one operation on the stores and on the model, and compares."""

  def __init__(self, seed):
    self.random = random.Random(seed)
    self.seconds = 1_000_000
    self.kv = ts.KvStore.open("memory://").result()
    self.model = Model()
    self.texts = [()]
    self.totals = collections.Counter()
    self.disk = None
    self.reload()

  def reload(self):
    if self.disk:
      self.totals.update(self.persistent.counters())
      self.totals.update({f"session/{k}": v for k, v in self.session.counters().items()})
    self.persistent = persistent.PersistentStore(
        self.kv, "model", PARTS, budget_bytes=BUDGET, block=BLOCK, clock=lambda: self.seconds
    )
    self.disk = self.persistent._kv = Disk(self.kv)
    self.session = session.SessionStore("model", host_bytes=HOST_BYTES, clock=lambda: self.seconds)
    self.model.windows = {}
    for block in self.model.blocks.values():
      block.used = block.created
    self.exact = True

  def text(self):
    """A known text, cut anywhere, and continued anyhow: two tokens, so that texts often agree."""
    known = self.random.choice(self.texts)
    known = known[: self.random.choice([len(known), self.random.randint(0, len(known))])]
    more = tuple(self.random.choices((0, 1), k=self.random.choice([0, 0, 1, 3, 8, 20])))
    return (known + more)[:48]

  def save(self, writes=10**6):
    text = self.text()
    self.disk.left = writes
    self.persistent.save(np.array(text, int), rows_of(text))
    self.disk.left = float("inf")
    self.model.save(text, self.seconds * 1000, writes)
    self.texts = [*self.texts[-11:], text]

  def read(self):
    text = self.text()
    hit = self.persistent.lookup(np.array(text, int))
    path, length = self.model.lookup(text, self.seconds * 1000)
    assert hit.length == length
    assert len(hit.records) == len(path)
    hit, rows = self.persistent.read(hit)
    assert hit.length == self.model.read(path, length)
    for name, want in rows_of(text[: hit.length]).items():
      np.testing.assert_array_equal(rows[name], want)

  def put(self):
    before = self.persistent.counters()
    text = self.text()
    state = windows_of(text, self.random.randint(0, len(text)))
    replaces = self.random.choice([None, None, None, *self.model.windows][:4])
    self.session.put(np.array(text, int), state, replaces and np.array(replaces))
    self.model.expire(self.seconds)
    self.model.put(text, state, self.seconds, replaces)
    assert self.persistent.counters() == before

  def find(self):
    text = self.random.choice([(), *self.model.windows]) + self.text()
    found = self.session.find(np.array(text, int))
    self.model.expire(self.seconds)
    known = [k for k in self.model.windows if text[: len(k)] == k]
    assert (found is None) == (not known)
    if known:
      state, _ = self.model.windows[max(known, key=len)]
      self.model.windows[max(known, key=len)] = (state, self.seconds)
      assert found[:3] == state[:3]
      np.testing.assert_array_equal(found.rows, state.rows)
      found.rows[:] = 7  # a copy: what the store keeps does not change

  def wait(self):
    self.seconds += self.random.choice([TTL - 1, TTL, TTL + 1, 3600, 36 * 3600, 73 * 3600])

  def damage(self):
    """Flips a bit, truncates or deletes a stored object behind the store's back."""
    listed = sorted(filter(None, map(record.parse_key, self.kv.list().result())))
    if not listed:
      return
    found = self.random.choice(listed)
    owns = {digest(k): k for k in self.model.blocks}
    data = bytearray(self.kv.read(found.key).result().value)
    at = self.random.randrange(len(data))
    kind = self.random.choice(["flip", "truncate", "delete"])
    if kind == "delete":
      self.kv.write(found.key, None).result()
      del self.model.blocks[owns[found.own]]
      self.exact = False
      return
    if kind == "flip":
      data[at] ^= 1 << self.random.randrange(8)
    self.kv.write(found.key, bytes(data if kind == "flip" else data[:at])).result()
    self.model.blocks[owns[found.own]].bad = True

  def recount(self):
    self.persistent.recount()
    self.exact = True

  def check(self):
    """The ledger: the store's bytes are those of the objects there, which are the model's."""
    listed = [*filter(None, map(record.parse_key, self.kv.list().result()))]
    blocks = self.model.blocks
    assert {r.own for r in listed} == {digest(k) for k in blocks}
    bytes_listed = sum(r.size for r in listed)
    assert bytes_listed == self.model.bytes() <= BUDGET
    held = self.persistent._bytes
    assert held == bytes_listed if self.exact else held >= bytes_listed
    kept = self.session._kept.values()
    assert self.session._bytes == sum(k.state.rows.nbytes for k in kept) <= HOST_BYTES // 10

  def run(self):
    operations = {
        self.save: 30,
        lambda: self.save(self.random.randint(0, 2)): 4,
        self.read: 30,
        self.put: 14,
        self.find: 14,
        self.wait: 4,
        self.damage: 3,
        self.recount: 1,
        self.reload: 1,
    }
    for operation in self.random.choices([*operations], [*operations.values()], k=OPERATIONS):
      self.seconds += 1
      operation()
      self.check()
    self.reload()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_operations_match_the_model(seed):
  machine = Machine(seed)
  machine.run()
  happened = {name for name, count in machine.totals.items() if count}
  assert happened >= {
      *("hits", "misses", "lost_tokens", "evicted_budget", "replaced_tails", "refused_budget"),
      *("write_failed", "truncated", "corrupt_header", "corrupt_checksum"),
      *("session/hits", "session/misses", "session/replaced", "session/expired"),
      "session/evicted_budget",
  }
