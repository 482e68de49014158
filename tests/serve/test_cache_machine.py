"""Random operations on the lines of one device cache, against lines that were alone (P9)."""

import collections
from typing import NamedTuple

import jax
import numpy as np
import pytest

from deepseek_jax.cache import Cache
from deepseek_jax.serve import decode, replay, state
from tests.serve.engines import EPS, Serving

LINES, LONGEST, SAVED = 4, 72, 5
OPERATIONS = 600


class Alone(NamedTuple):
  """A line that was read by itself: its cache on the host and the logits of its next token."""

  cache: Cache
  logits: np.ndarray


class Line(NamedTuple):
  """What the model knows of a line: its text, how its encoder came about, and the line alone.

  `replays` are the cached lengths of the bounded replays that its encoder's state goes back to.
  """

  text: list[int]
  replays: tuple[int, ...]
  alone: Alone


class Saved(NamedTuple):
  """Exported state of a line's first tokens, and what a line needs to be made from it."""

  text: list[int]
  replays: tuple[int, ...]
  entries: dict[str, np.ndarray]
  windows: state.WindowState


class Machine:
  """One cache of some lines, and a small model of it."""

  def __init__(self, serving, seed):
    self.serving, self.window = serving, serving.window
    self.engine = serving.engine()
    self.reader, self.storage = self.engine.reader, self.engine.storage
    self.schedule = self.engine.model.schedule
    self.rng = np.random.default_rng(seed)
    self.cache = self.blank(LINES)
    self.lines: list[Line | None] = [None] * LINES
    self.saved: collections.deque[Saved] = collections.deque(maxlen=SAVED)
    self.done = collections.Counter()

  def blank(self, lines):
    """A poisoned cache."""
    return self.serving.served.poisoned(
        Cache.init(self.serving.config, self.storage, batch=lines, capacity=LONGEST)
    )

  def tokens(self, count):
    return self.rng.integers(0, self.serving.config.vocab_size, count).tolist()

  def read(self, cache, line, lines, text, plan):
    prompts, plans = [None] * lines, [None] * lines
    prompts[line], plans[line] = np.array(text), plan
    cache, logits, _ = self.reader.prefill(cache, prompts, plans)
    return jax.device_get(cache), np.asarray(logits)[line]

  def alone(self, text, replays, exact=False):
    """A text by itself, with nothing that any other line has touched (spec 17)."""
    n, cache = len(text), self.blank(1)
    plan = replay.exact(n) if exact else replay.cold(n, self.window)
    if replays:
      *before, cached = replays
      source = self.alone(text[:cached], tuple(before)).cache
      rows = state.take_entries(source, self.schedule, 0, cached)
      state.put_entries(cache, self.schedule, 0, rows)
      plan = replay.replayed(n, cached, self.window)
    return Alone(*self.read(cache, 0, 1, text, plan))

  # Operations: each returns the lines that it may touch.

  def start(self):
    """Arms A and B."""
    line, text = self.pick(None), self.tokens(self.rng.integers(1, 40))
    exact = bool(self.rng.integers(2))
    plan = replay.exact(len(text)) if exact else replay.cold(len(text), self.window)
    self.done[plan.arm] += 1
    return self.put(line, text, (), plan, exact)

  def resume(self):
    """Arms C and D: exported state in another line, or the same."""
    if not self.saved:
      return []
    line, kept = self.pick(None), self.saved[self.rng.integers(len(self.saved))]
    text = kept.text + self.tokens(self.rng.integers(0, 16))
    cached, windows = len(kept.text), kept.windows
    plan = replay.continued(len(text), cached, self.window, windows.floor)
    if state.reaches(windows, plan, self.window) and self.rng.random() < 0.7:
      replays = kept.replays
    else:
      plan = replay.replayed(len(text), cached, self.window)
      replays = (*kept.replays, cached) if plan.arm == "D" else ()
    if len(text) > LONGEST - 20 or len(replays) > 2:
      return []
    cache = self.writable()
    if plan.cached:
      state.put_entries(cache, self.schedule, line, kept.entries)
    if plan.arm == "C":
      state.put_window(cache, line, windows, plan.encoder_start)
    self.cache = cache
    self.done[plan.arm] += 1
    return self.put(line, text, replays, plan)

  def put(self, line, text, replays, plan, exact=False):
    self.cache, logits = self.read(self.cache, line, LINES, text, plan)
    self.lines[line] = Line(text, replays, self.alone(text, replays, exact))
    self.same(logits, self.lines[line])
    return [line]

  def write(self):
    """Some steps of some live lines, each at its own position."""
    live = np.array([x is not None and len(x.text) < LONGEST - 1 for x in self.lines])
    live &= self.rng.random(LINES) < 0.7
    for _ in range(self.rng.integers(1, 7)):
      if not live.any():
        break
      tokens = np.array(self.tokens(LINES), np.int32)
      self.cache, logits = self.step(self.cache, tokens, live)
      for line in np.flatnonzero(live):
        text, replays, alone = self.lines[line]
        alone = Alone(*self.step(alone.cache, tokens[line, None], np.array([True])))
        alone = alone._replace(logits=alone.logits[0])
        self.lines[line] = Line([*text, int(tokens[line])], replays, alone)
        self.same(logits[line], self.lines[line])
        live[line] = len(text) < LONGEST - 1
      self.done["step"] += 1
    return list(range(LINES))

  def step(self, cache, tokens, live):
    cache, logits = decode.step(self.engine.weights, cache, tokens, live, self.engine.classes)
    return jax.device_get(cache), np.asarray(logits)

  def free(self):
    """Poison in every table, tail, history and counter of a line."""
    line = self.pick(None)
    cache, poison = self.writable(), self.blank(LINES)
    for rings in (True, False):
      own = lambda c, r=rings: jax.tree.leaves((c.encoder_window, c.decoder_window) if r else (
          c.main_kv, c.index_keys, c.tails, c.history, c.lengths, c.floors))  # fmt: skip
      for a, b in zip(own(cache), own(poison)):
        a[(slice(None), line) if rings else line] = b[(slice(None), line) if rings else line]
    self.cache, self.lines[line] = cache, None
    self.done["free"] += 1
    return [line]

  def export(self):
    line = self.pick(True)
    if line is None:
      return []
    text, replays, _ = self.lines[line]
    windows = state.take_window(self.cache, line, int(self.cache.floors[line, 0]))
    count = len(text) // 2 * 2
    windows = state.until(windows, count)
    if windows is not None:
      rows = state.take_entries(self.cache, self.schedule, line, count)
      self.saved.append(Saved(text[:count], replays, rows, windows))
      self.done["export"] += 1
    return []

  def anew(self):
    """A live line is what its text gives when it is read afresh, not only step by step."""
    line = self.pick(True)
    if line is None:
      return []
    text, replays, alone = self.lines[line]
    # What the encoder made of it, that is: the decoder's floor would be another prompt's.
    fresh = self.alone(text, replays)
    both = fresh.cache, alone.cache
    entries = [state.take_entries(cache, self.schedule, 0, len(text)) for cache in both]
    for name in entries[0]:
      one, two = (rows[name].view(np.float32) for rows in entries)
      np.testing.assert_allclose(one, two, atol=EPS, rtol=0)
    self.done["anew"] += 1
    return []

  def pick(self, live):
    lines = [i for i, x in enumerate(self.lines) if live is None or (x is not None)]
    return int(self.rng.choice(lines)) if lines else None

  def writable(self):
    return jax.tree.map(np.array, self.cache)

  def same(self, logits, line):
    np.testing.assert_allclose(logits, line.alone.logits, atol=EPS, rtol=0)

  def probe(self):
    """The next logits of every live line after one more token, without keeping it."""
    live = np.array([x is not None for x in self.lines])
    tokens = np.array(self.tokens(LINES), np.int32)
    _, logits = self.step(self.writable(), tokens, live)
    for line in np.flatnonzero(live):
      alone = jax.tree.map(np.array, self.lines[line].alone.cache)
      _, expected = self.step(alone, tokens[line, None], np.array([True]))
      np.testing.assert_allclose(logits[line], expected[0], atol=EPS, rtol=0)

  def ledger(self):
    """The cache has the bytes of its shapes, and every line the length of its text."""
    assert self.cache.bytes == self.blank(LINES).bytes
    for line, known in enumerate(self.lines):
      if known is not None:
        assert self.cache.lengths[line] == len(known.text)

  def run(self, count):
    operations = [self.start, self.resume, self.write, self.free, self.export, self.anew]
    chances = np.array([3, 5, 6, 2, 5, 1]) / 22
    for _ in range(count):
      before = [self.serving.served.line(self.cache, i) for i in range(LINES)]
      touched = self.rng.choice(operations, p=chances)()
      for line in set(range(LINES)) - set(touched):
        assert self.serving.served.same_bytes(
            before[line], self.serving.served.line(self.cache, line)
        )
      self.ledger()
      self.probe()


@pytest.fixture(scope="module")
def serving(served, quick_compile):
  with Serving(served) as made:
    yield made


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_every_line_is_what_it_would_be_alone(serving, seed):
  machine = Machine(serving, seed)
  machine.run(OPERATIONS)
  assert all(machine.done[name] >= 4 for name in "ABCD"), machine.done
  assert machine.done["step"] > 50
