"""The session store: window entries of running conversations, in host memory, for minutes.

Window entries are small, cheap to replay and useless once a conversation is over (report, section
3.2.1): they live for a time after their last use, in a fraction of the host's memory.
"""

import collections
import hashlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from deepseek_jax.serve.record import as_tokens

COUNTERS = ("hits", "misses", "saved", "replaced", "expired", "evicted_budget", "refused_budget")

_POISON = 0xFF


class WindowState(NamedTuple):
  """Window entries of positions [first, stop) of a text's first `stop` tokens.

  `floor` is the window floor that they were made with; `rows` are uint8
  [layers, stop - first, row_bytes] as packed.
  """

  first: int
  stop: int
  floor: int
  rows: np.ndarray


class _Kept(NamedTuple):
  state: WindowState
  used: float


def _host_bytes() -> int:
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check(tokens: np.ndarray, state: WindowState) -> None:
  if not 0 <= state.floor <= state.first <= state.stop:
    bounds = state.floor, state.first, state.stop
    raise ValueError(f"state.floor, first, stop: {bounds}, allowed 0 <= floor <= first <= stop")
  if state.stop != len(tokens):
    raise ValueError(f"state.stop: {state.stop}, allowed the length of tokens ({len(tokens)})")
  rows = state.rows
  if rows.dtype != np.uint8 or rows.ndim != 3 or rows.shape[1] != state.stop - state.first:
    allowed = f"uint8 [layers, {state.stop - state.first}, row_bytes]"
    raise ValueError(f"state.rows: {rows.dtype} {rows.shape}, allowed {allowed}")


class SessionStore:
  """Window states by text, expired first and then least recently used; one thread an instance.

  The store owns its copies, and overwrites them when they go: a stale view shows.
  """

  def __init__(
      self,
      identity: str,
      *,
      ttl_minutes: float = 5.0,
      fraction: float = 0.10,
      host_bytes: int | None = None,
      clock: Callable[[], float] = time.monotonic,
  ):
    """Makes an empty store.

    Args:
      identity: digest of configuration, weights and cache formats.
      ttl_minutes: that a state lives after it was last put or found.
      fraction: of the host's memory, for all states.
      host_bytes: the host's memory; None asks the system.
      clock: seconds.

    Raises:
      ValueError: a value that is not allowed.
    """
    if not ttl_minutes > 0:
      raise ValueError(f"ttl_minutes: {ttl_minutes}, allowed > 0")
    if not 0 < fraction <= 1:
      raise ValueError(f"fraction: {fraction}, allowed in (0, 1]")
    if not identity:
      raise ValueError(f"identity: {identity!r}, allowed a digest of the model")
    if host_bytes is None:
      host_bytes = _host_bytes()
    if not host_bytes > 0:
      raise ValueError(f"host_bytes: {host_bytes}, allowed > 0")
    self.budget_bytes = int(fraction * host_bytes)
    self._root = hashlib.blake2b(identity.encode()).digest()
    self._ttl = ttl_minutes * 60
    self._clock = clock
    self._counts = collections.Counter(dict.fromkeys(COUNTERS, 0))
    # In order of use, which is also the order in which they expire.
    self._kept: collections.OrderedDict[bytes, _Kept] = collections.OrderedDict()
    self._stops: collections.Counter[int] = collections.Counter()
    self._bytes = 0

  def put(self, tokens: np.ndarray, state: WindowState, replaces: np.ndarray | None = None) -> bool:
    """Keeps a copy of `state`, whose text is `tokens`; False and a count if it exceeds the budget.

    Args:
      tokens: token ids [stop].
      state: its window entries.
      replaces: the text of an older state that is given up for this one, as a session does with
        the state of its previous turn.

    Raises:
      ValueError: tokens or a state of another form.
    """
    tokens = as_tokens(tokens)
    _check(tokens, state)
    self._expire()
    if replaces is not None and self._drop(self._key(as_tokens(replaces))):
      self._counts["replaced"] += 1
    key = self._key(tokens)
    self._drop(key)
    if state.rows.nbytes > self.budget_bytes:
      self._counts["refused_budget"] += 1
      return False
    while self._bytes + state.rows.nbytes > self.budget_bytes:
      self._drop(next(iter(self._kept)))
      self._counts["evicted_budget"] += 1
    self._kept[key] = _Kept(state._replace(rows=state.rows.copy()), self._clock())
    self._stops[state.stop] += 1
    self._bytes += state.rows.nbytes
    self._counts["saved"] += 1
    return True

  def find(self, tokens: np.ndarray) -> WindowState | None:
    """A copy of the living state whose text is the longest that `tokens` begins with."""
    tokens = as_tokens(tokens)
    self._expire()
    found, done = None, 0
    digest = hashlib.blake2b(self._root)
    for stop in sorted(stop for stop in self._stops if stop <= len(tokens)):
      digest.update(tokens[done:stop].tobytes())
      done = stop
      if (key := digest.digest()) in self._kept:
        found = key
    if found is None:
      self._counts["misses"] += 1
      return None
    self._counts["hits"] += 1
    state = self._kept[found].state
    self._kept[found] = _Kept(state, self._clock())
    self._kept.move_to_end(found)
    return state._replace(rows=state.rows.copy())

  def counters(self) -> dict[str, int]:
    """Counts since the start, and gauges: `bytes` and `states` that are kept."""
    self._expire()
    return {**self._counts, "bytes": self._bytes, "states": len(self._kept)}

  def _key(self, tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(self._root + tokens.tobytes()).digest()

  def _expire(self) -> None:
    oldest = self._clock() - self._ttl
    while self._kept and (key := next(iter(self._kept))) and self._kept[key].used < oldest:
      self._drop(key)
      self._counts["expired"] += 1

  def _drop(self, key: bytes) -> bool:
    kept = self._kept.pop(key, None)
    if kept is None:
      return False
    stop = kept.state.stop
    self._stops[stop] -= 1
    if not self._stops[stop]:
      del self._stops[stop]
    self._bytes -= kept.state.rows.nbytes
    kept.state.rows[:] = _POISON
    return True
