"""The persistent store: global entries of token prefixes, in a folder or a bucket.

Main KV and index keys of a prefix (report, section 3.2.1) are guaranteed for hours, and beyond that
evicted least recently used first under a byte budget.
"""

import collections
import contextlib
import heapq
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import tensorstore as ts
from absl import logging

from deepseek_jax.serve.record import (
    FORMAT_VERSION,
    Damaged,
    Layout,
    Part,
    Record,
    Step,
    chain,
    parse_key,
)

COUNTERS = (
    *("hits", "misses", "hit_tokens", "lost_tokens", "saved_blocks", "saved_bytes"),
    *("evicted_budget", "replaced_tails", "refused_budget", "write_failed", "read_failed"),
    *("missing", "truncated", "corrupt_header", "corrupt_checksum", "misplaced"),
    *("wrong_version", "wrong_identity"),
)

_MANIFEST = "manifest.json"
# Requests in flight, for stores where each takes milliseconds.
_WAVE = 32
# What tensorstore raises for the errors of file systems and networks.
_FAILURES = (ValueError, OSError, RuntimeError)


class Hit(NamedTuple):
  """A stored prefix of `length` tokens, and its records from the root on; only the last is partial.

  A caller that needs less may lower `length` to any multiple of every ratio.
  """

  length: int
  records: tuple[Record, ...]


class PersistentStore:
  """Global entries of token prefixes, shared by longest common prefix; one thread an instance.

  Several processes may share a store: what is there is asked of the store itself, the index only
  serves accounting and eviction. It is listed anew after each sixteenth of the budget that this
  process writes, so every further process can overrun the budget by as much.
  """

  def __init__(
      self,
      url: str | pathlib.Path | Mapping | ts.KvStore,
      identity: str,
      parts: Mapping[str, Part],
      *,
      budget_bytes: int,
      block: int = 64,
      guarantee_hours: float = 72.0,
      clock: Callable[[], float] = time.time,
  ):
    """Opens a store, or creates it.

    Args:
      url: a folder, or a URL, spec or open store of tensorstore.
      identity: digest of configuration, weights and cache formats; entries of another identity
        are never seen.
      parts: what every entry consists of, by name.
      budget_bytes: of all records, headers included, whatever their identity.
      block: tokens per record.
      guarantee_hours: that a record is kept after its last write or hit; of what other processes
        did, only the write is known.
      clock: seconds.

    Raises:
      ValueError: a value that is not allowed, or a store that does not open or has another format
        version.
    """
    if not guarantee_hours > 0:
      raise ValueError(f"guarantee_hours: {guarantee_hours}, allowed > 0")
    if not budget_bytes > 0:
      raise ValueError(f"budget_bytes: {budget_bytes}, allowed > 0")
    self.layout = Layout(identity, parts, block)
    self.budget_bytes = budget_bytes
    self._guarantee = guarantee_hours * 3_600_000
    self._slack = budget_bytes // 16
    self._clock = clock
    self._counts = collections.Counter(dict.fromkeys(COUNTERS, 0))
    # When this process last used each record, in milliseconds.
    self._used: dict[Record, int] = {}
    self._bytes = self._unlisted = 0
    self._open(url)
    self.recount()

  def _open(self, url: str | pathlib.Path | Mapping | ts.KvStore) -> None:
    if isinstance(url, pathlib.Path) or (isinstance(url, str) and "://" not in url):
      url = pathlib.Path(url).absolute().as_uri()
    if isinstance(url, str) and not url.endswith("/"):
      url += "/"
    try:
      self._kv = url if isinstance(url, ts.KvStore) else ts.KvStore.open(url).result()
      spec = self._kv.spec().to_json()
      self._folder = pathlib.Path(spec["path"]) if spec["driver"] == "file" else None
      manifest = self._kv.read(_MANIFEST).result()
      if manifest.state == "missing":
        self._kv.write(_MANIFEST, json.dumps({"version": FORMAT_VERSION})).result()
      if self._folder and isinstance(url, str):
        # A power failure may leave records unwritten, which their checksums show. Waiting for the
        # disk takes 6 ms a record, eight times as long as writing it.
        self._kv = ts.KvStore.open(spec | {"file_io_sync": False}).result()
    except _FAILURES as error:
      raise ValueError(f"url: {url}, allowed a store that can be written ({error})") from error
    if manifest.state == "missing":
      return
    try:
      found = json.loads(manifest.value)["version"]
    except (ValueError, KeyError, TypeError):
      found = manifest.value[:40]
    if found != FORMAT_VERSION:
      raise ValueError(f"url: {url} has format version {found!r}, allowed {FORMAT_VERSION}")

  def lookup(self, tokens: np.ndarray) -> Hit:
    """The longest stored prefix of `tokens`, in multiples of every ratio; a miss has length 0."""
    records: list[Record] = []
    length = 0
    for step, children in self._families(self.layout.steps(tokens), _WAVE):
      exact = [child for child in children if child.own == step.own]
      found, common = (exact[0], len(step.tokens)) if exact else self._nearest(step, children)
      if common:
        records.append(found)
        self._touch(found)
        length += common
      if not exact:
        break
    self._counts["hits" if length else "misses"] += 1
    self._counts["hit_tokens"] += length
    return Hit(length, tuple(records))

  def read(self, hit: Hit) -> tuple[Hit, dict[str, np.ndarray]]:
    """Reads and verifies; returns what is valid of `hit` and its rows, uint8 [rows, row_bytes].

    The first record that is absent or damaged ends the hit before it and is counted by reason; a
    damaged one is deleted.

    Raises:
      ValueError: `hit` is of another model or layout, or of a length that its records do not have.
    """
    layout = self.layout
    if any(record.space != layout.space for record in hit.records):
      raise ValueError("hit.records: of another model or layout, allowed what lookup returned")
    held = sum(record.tokens for record in hit.records)
    if hit.length % layout.multiple or not 0 <= hit.length <= held:
      raise ValueError(
          f"hit.length: {hit.length}, allowed multiples of {layout.multiple} to {held}"
      )
    records = hit.records[: math.ceil(hit.length / layout.block)]
    pieces = [layout.empty(), *self._rows(records)]
    count = len(pieces) - 1
    length = min(hit.length, count * layout.block)
    self._counts["lost_tokens"] += hit.length - length
    whole = {name: np.concatenate([rows[name] for rows in pieces]) for name in layout.parts}
    return Hit(length, records[:count]), layout.rows(whole, 0, length)

  def save(self, tokens: np.ndarray, parts: Mapping[str, np.ndarray]) -> int:
    """Stores what is not there yet of a text's entries, from the root on.

    A block that does not fit, or whose write fails, ends the saving and is counted. Nothing is
    raised for it: the text is served without.

    Args:
      tokens: token ids [n]; the last n modulo the multiple of every ratio are not stored.
      parts: by name, uint8 [rows, row_bytes] of the other tokens.

    Returns:
      How many tokens of the text are stored now.

    Raises:
      ValueError: tokens or parts of another form.
    """
    layout = self.layout
    steps = layout.steps(tokens)
    layout.check(parts, len(tokens))
    done = 0
    # One family at a time: making room may delete from those that follow.
    for step, children in self._families(steps, 1):
      stored = self._stored(step, children)
      if stored is None:
        rows = layout.rows(parts, done, done + len(step.tokens))
        stored, data = layout.pack(step, rows, self._now())
        if not self._make_room(stored.size):
          self._counts["refused_budget"] += len(steps) - done // layout.block
          break
        if not self._write(stored, data):
          break
        for child in children:
          if child.own == chain(step.parent, step.tokens[: child.tokens]):
            self._delete(child)
            self._counts["replaced_tails"] += 1
      self._touch(stored)
      done += len(step.tokens)
    return done

  def recount(self) -> None:
    """Lists the store, to account for what other processes wrote and deleted."""
    try:
      records = [*filter(None, map(parse_key, self._kv.list().result()))]
    except _FAILURES as error:
      self._failed("read_failed", "list", error)
      return
    self._used = {record: self._used.get(record, record.created) for record in records}
    self._bytes = sum(record.size for record in records)
    self._unlisted = 0

  def counters(self) -> dict[str, int]:
    """Counts since opening, and gauges: `bytes` and `objects` of all, `tokens` of this model."""
    tokens = sum(record.tokens for record in self._used if record.space == self.layout.space)
    return {**self._counts, "bytes": self._bytes, "objects": len(self._used), "tokens": tokens}

  def _now(self) -> int:
    return int(self._clock() * 1000)

  def _families(self, steps: list[Step], wave: int) -> Iterator[tuple[Step, list[Record]]]:
    """Each step with what is stored under its parent, listed `wave` at a time."""
    for start in range(0, len(steps), wave):
      part = steps[start : start + wave]
      folders = [f"{self.layout.space}/{step.parent}" for step in part]
      # "0" is the character after "/".
      ranges = [ts.KvStore.KeyRange(f"{folder}/", f"{folder}0") for folder in folders]
      for step, future in zip(part, [*map(self._kv.list, ranges)]):
        try:
          children = sorted(filter(None, map(parse_key, future.result())), reverse=True)
        except _FAILURES as error:
          self._failed("read_failed", step.parent, error)
          children = []
        yield step, children

  def _nearest(self, step: Step, children: list[Record]) -> tuple[Record | None, int]:
    """The child that shares the most tokens with a block, the newest of equals, and how many."""
    trail = self.layout.trail(step.tokens)
    bounds = {child: self.layout.common_at_most(child, step.tokens, trail) for child in children}
    best, most = None, 0
    for child in sorted(children, key=lambda c: (bounds[c], c.created), reverse=True):
      if bounds[child] <= most:
        break
      if loaded := self._load(child, self._kv.read(child.key)):
        common = self.layout.common(loaded[0], step.tokens)
        best, most = (child, common) if common > most else (best, most)
    return best, most

  def _stored(self, step: Step, children: list[Record]) -> Record | None:
    """The child that holds all of a block: the same, or one that a short block begins."""
    for child in children:
      if child.own == step.own:
        return child
    if len(step.tokens) < self.layout.block:
      child, common = self._nearest(step, children)
      if common == len(step.tokens):
        return child
    return None

  def _load(self, record: Record, future: ts.Future):
    """Token ids and rows of a record, or None and a count of the reason."""
    try:
      result = future.result()
    except _FAILURES as error:
      self._failed("read_failed", record.key, error)
      return None
    if result.state == "missing":
      self._counts["missing"] += 1
      self._forget(record)
      return None
    try:
      return self.layout.unpack(record, result.value)
    except Damaged as damage:
      self._failed(str(damage), record.key, "deleted")
      self._delete(record)
      return None

  def _rows(self, records: tuple[Record, ...]) -> Iterator[dict[str, np.ndarray]]:
    """The rows of each record up to the first that cannot be served."""
    for start in range(0, len(records), _WAVE):
      wave = records[start : start + _WAVE]
      futures = [self._kv.read(record.key) for record in wave]
      for record, future in zip(wave, futures):
        loaded = self._load(record, future)
        if loaded is None:
          return
        yield loaded[1]

  def _write(self, record: Record, data: bytes) -> bool:
    try:
      self._kv.write(record.key, data).result()
    except _FAILURES as error:
      self._failed("write_failed", record.key, error)
      return False
    self._counts["saved_blocks"] += 1
    self._counts["saved_bytes"] += record.size
    self._unlisted += record.size
    return True

  def _delete(self, record: Record) -> bool:
    try:
      self._kv.write(record.key, None).result()
    except _FAILURES as error:
      self._failed("write_failed", record.key, error)
      return False
    self._forget(record)
    if self._folder:
      # The driver leaves the folder of every parent behind; while it has records it stays.
      with contextlib.suppress(OSError):
        (self._folder / record.key).parent.rmdir()
    return True

  def _failed(self, counter: str, what: str, reason: Exception | str) -> None:
    self._counts[counter] += 1
    logging.warning("persistent store, %s: %s (%s)", counter, what, reason)

  def _touch(self, record: Record) -> None:
    if record not in self._used:
      self._bytes += record.size
    self._used[record] = self._now()

  def _forget(self, record: Record) -> None:
    if self._used.pop(record, None) is not None:
      self._bytes -= record.size

  def _make_room(self, size: int) -> bool:
    """Whether a record of `size` bytes fits, after evicting where that helps."""
    if size > self.budget_bytes:
      return False
    if self._bytes + size > self.budget_bytes or self._unlisted > self._slack:
      self.recount()
    if self._bytes + size > self.budget_bytes:
      # The slack saves the next writes a listing each.
      self._evict(self.budget_bytes - size - self._slack)
    return self._bytes + size <= self.budget_bytes

  def _evict(self, target: int) -> None:
    """Deletes leaves past their guarantee, least recently used first, down to `target` bytes."""
    now = self._now()
    children = collections.Counter(record.parent for record in self._used)
    owners = collections.defaultdict(list)
    for record, used in self._used.items():
      if now - used > self._guarantee:
        owners[record.own].append((used, record))
    heap = [item for own, items in owners.items() if not children[own] for item in items]
    heapq.heapify(heap)
    while heap and self._bytes > target:
      _, record = heapq.heappop(heap)
      if not self._delete(record):
        return
      self._counts["evicted_budget"] += 1
      children[record.parent] -= 1
      if not children[record.parent]:
        for item in owners[record.parent]:
          heapq.heappush(heap, item)
