"""The store: what is kept of a text, in two stores with two lifetimes and two policies.

Global entries outlive window entries by days (report, section 3.2.1). What is found decides how a
prompt is resumed: with a living window it continues, without one the window is replayed, and
without global entries the prompt is computed whole.
"""

import collections
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from tensorboardX import SummaryWriter

from deepseek_jax.serve.persistent import Hit, PersistentStore
from deepseek_jax.serve.session import SessionStore, WindowState


class Lookup(NamedTuple):
  """What is there of a text: global entries, and window entries that end within them, or None."""

  hit: Hit
  windows: WindowState | None


class Store:
  """A persistent and a session store, either of which may be absent, and the counters of both."""

  def __init__(self, persistent: PersistentStore | None, session: SessionStore | None):
    self.persistent = persistent
    self.session = session
    self._counts: collections.Counter[str] = collections.Counter()

  def lookup(self, tokens: np.ndarray) -> Lookup:
    """The longest global hit, and the longest living window state of a text within that hit."""
    hit = self.persistent.lookup(tokens) if self.persistent else Hit(0, ())
    return Lookup(hit, self._windows(tokens, hit))

  def read(self, tokens: np.ndarray, found: Lookup) -> tuple[Lookup, dict[str, np.ndarray]]:
    """Verified rows of a hit, and what is left of the lookup if the hit had to be shortened.

    Window entries without the global entries of the same tokens are no state to resume from: they
    are looked for again within what is left.
    """
    if self.persistent is None:
      return found, {}
    hit, rows = self.persistent.read(found.hit)
    windows = found.windows
    if windows is not None and windows.stop > hit.length:
      windows = self._windows(tokens, hit)
    return Lookup(hit, windows), rows

  def save(self, tokens: np.ndarray, parts: Mapping[str, np.ndarray]) -> int:
    """`PersistentStore.save`; 0 without one."""
    return self.persistent.save(tokens, parts) if self.persistent else 0

  def put(self, tokens: np.ndarray, state: WindowState, replaces: np.ndarray | None = None) -> bool:
    """`SessionStore.put`; False without one."""
    return self.session.put(tokens, state, replaces) if self.session else False

  def count(self, name: str, n: int = 1) -> None:
    """Adds `n` to a counter of the caller's, such as replays or recomputed prompts by reason."""
    self._counts[name] += n

  def counters(self) -> dict[str, int]:
    """Every count and gauge, flat: persistent/…, session/… and the caller's names."""
    stores = {"persistent": self.persistent, "session": self.session}
    return dict(self._counts) | {
        f"{name}/{counter}": value
        for name, store in stores.items()
        if store
        for counter, value in store.counters().items()
    }

  def write_tensorboard(self, writer: SummaryWriter, step: int) -> None:
    """Writes `counters` as scalars under store/."""
    for name, value in self.counters().items():
      writer.add_scalar(f"store/{name}", value, step)

  def _windows(self, tokens: np.ndarray, hit: Hit) -> WindowState | None:
    return self.session.find(tokens[: hit.length]) if self.session and hit.length else None
