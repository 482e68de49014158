"""Laws of conversations: what is kept is continued, replayed or recomputed, and never misread."""

import errno
import shutil

import numpy as np
import pytest

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats
from deepseek_jax.serve import record, replay
from tests.serve.engines import EPS, Clock, Serving, same

HOUR = 3600
PACKED = ("main_kv", "index", "window_kv")
# Tokens read and written a turn: fewer and more than W, odd and even.
TURNS = [(9, 6), (1, 9), (2, 1), (3, 2), (4, 7), (7, 12), (1, 3), (12, 1), (1, 1), (31, 9)]


@pytest.fixture(scope="module")
def serving(served, quick_compile):
  with Serving(served) as made:
    yield made


def counted(engine, **wanted):
  """The counters of decisions are these, and every other one is absent."""
  names = ("continued", "replayed", "replayed_tokens", "recomputed_miss", "recomputed_short_hit")
  counters = engine.store.counters()
  assert {name: counters[name] for name in names if name in counters} == wanted


def payload(engine):
  """Tokens of all records, their bytes by part, and all bytes; every byte is verified."""
  store, parts, tokens, size = engine.store.persistent, {}, 0, 0
  for key in filter(None, map(record.parse_key, store._kv.list().result())):
    data = store._kv.read(key.key).result().value
    ids, rows = store.layout.unpack(key, data)
    tokens, size = tokens + len(ids), size + len(data)
    parts = {name: parts.get(name, 0) + a.nbytes for name, a in rows.items()}
  return tokens, parts, size


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "atol"), [((), EPS), (PACKED, 1e-3)], ids=["f32", "packed"])
def test_a_continued_turn_is_the_cold_turn(serving, tmp_path, quantize, atol):
  """B = C over ten turns, which leave one window state, and on disk the bytes of the tokens."""
  model = serving.model(quantize)
  engine, cold = serving.engine(tmp_path, model=model), serving.engine(model=model)
  per_token = Cache.init(serving.config, engine.storage, batch=1, capacity=1).bytes_per_token
  text, kept = [], 0
  for number, (length, new) in enumerate(TURNS):
    text = text + serving.text(length, number)
    (found,), (expected,) = (serving.ask(e, text, new=new) for e in (engine, cold))
    same(found, expected, atol)
    assert found[0][1:3] == (("C", kept) if number else ("B", 0))
    text = text + found[0].tokens
    kept = (len(text) - 1) // 2 * 2
    tokens, parts, size = payload(engine)
    assert set(parts) == {f"layer{n}.{kind}" for n in (1, 2) for kind in ("main_kv", "index_keys")}
    assert (tokens, sum(parts.values())) == (kept, kept * per_token)
    counters = engine.store.counters()
    assert (counters["persistent/tokens"], counters["persistent/bytes"]) == (tokens, size)
    files = [f.stat().st_size for f in tmp_path.rglob("*") if f.is_file() and "." not in f.name]
    assert sum(files) == size
    assert counters["session/states"] == 1
    assert counters["session/bytes"] <= kept * serving.window_bytes(engine)
  assert counters["session/bytes"] <= (2 * serving.window + 2) * serving.window_bytes(engine)
  counted(engine, continued=len(TURNS) - 1, recomputed_miss=1)


def test_the_window_lives_for_minutes_and_the_entries_for_days(serving, tmp_path):
  clock, w = Clock(), serving.window
  engine, cold = serving.engine(tmp_path, clock=clock), serving.engine()
  text = serving.text(30)
  text = text + serving.ask(engine, text)[0][0].tokens
  for count in (1, 2):
    clock.seconds += 5 * 60
    text = text + serving.text(5, count)
    (found,), (expected,) = serving.ask(engine, text), serving.ask(cold, text)
    same(found, expected)
    counted(engine, continued=count, recomputed_miss=1)
    text = text + found[0].tokens
  for number, after in ((1, 5 * 60 + 1), (2, 72 * HOUR)):
    clock.seconds += after
    text, cached = text + serving.text(1), (len(text) - 1) // 2 * 2
    _, windows, entries = serving.stored(engine, text)
    assert windows is None
    (found,) = serving.ask(engine, text)
    assert found[0][1:3] == ("D", cached)
    plan = replay.replayed(len(text), cached, w)
    same(found, serving.by_plan(engine, text, plan, entries), atol=0)
    tokens = {"replayed": number, "replayed_tokens": number * w}
    counted(engine, continued=2, recomputed_miss=1, **tokens)
    # The approximation shows.
    assert np.abs(found[1][0] - serving.ask(cold, text)[0][1][0]).max() > 30 * EPS
    text = text + found[0].tokens
  # Windows of a replay have its floor, and what continues them is a longer replay.
  text = text + serving.text(3)
  (found,) = serving.ask(engine, text)
  assert found[0][1:3] == ("C", (len(text) - 4) // 2 * 2)
  same(found, serving.by_plan(engine, text, replay.replayed(len(text), cached, w), entries))
  counted(engine, continued=3, recomputed_miss=1, **tokens)


@pytest.mark.parametrize("length", range(1, 8))
def test_hits_of_at_most_w_tokens_are_recomputed(serving, tmp_path, length):
  clock, text = Clock(), serving.text(length)
  engine = serving.engine(tmp_path, clock=clock)
  serving.ask(engine, text, new=1)
  clock.seconds += 5 * 60 + 1
  text, cached = text + serving.text(9), length // 2 * 2
  (found,), (cold,) = serving.ask(engine, text), serving.ask(serving.engine(), text)
  if cached > serving.window:
    assert found[0][1:3] == ("D", cached)
    counted(engine, recomputed_miss=1, replayed=1, replayed_tokens=serving.window)
    return
  assert found[0][1:3] == ("B", 0)
  same(found, cold, atol=0)
  counted(
      engine, **({"recomputed_short_hit": 1} if cached else {}), recomputed_miss=2 - bool(cached)
  )


def test_sessions_that_part_within_a_block_do_not_mix(serving, tmp_path):
  """A13, A16: their turns alternate; the second begins with what the first has left."""
  engine, cold = serving.engine(tmp_path), serving.engine()
  for shared in (12, 13, 16, 21):
    cut = shared // 2 * 2
    one, two = (serving.text(shared, shared) + serving.text(9, 50 + i) for i in (1, 2))
    for turn in range(3):
      (found,) = serving.ask(engine, one)
      assert found[0].arm == ("C" if turn else "B")
      same(found, serving.ask(cold, one)[0])
      one = one + found[0].tokens + serving.text(turn + 3, 1)
      if not turn:
        _, _, entries = serving.stored(engine, two)
      (found,) = serving.ask(engine, two)
      assert found[0].arm == ("C" if turn else "D")
      assert turn or found[0].cached == cut
      plan = replay.replayed(len(two), cut, serving.window)
      same(found, serving.by_plan(engine, two, plan, entries))
      two = two + found[0].tokens + serving.text(turn + 3, 2)


def test_a_batch_takes_an_arm_a_line(serving, tmp_path):
  clock = Clock()
  engine = serving.engine(tmp_path, clock=clock)
  texts = [serving.text(n, n) for n in (30, 3, 17, 21)]
  lost, alive = texts[0], texts[2]
  lost = lost + serving.ask(engine, lost)[0][0].tokens + [5]
  clock.seconds += 5 * 60 + 1
  alive = alive + serving.ask(engine, alive)[0][0].tokens + [5]
  _, _, entries = serving.stored(engine, lost)
  batch = serving.ask(engine, lost, texts[1], alive, texts[3])
  assert [reply.arm for reply, _ in batch] == ["D", "B", "C", "B"]
  cold = serving.engine()
  for i, text in ((1, texts[1]), (2, alive), (3, texts[3])):
    same(batch[i], serving.ask(cold, text)[0])
  plan = replay.replayed(len(lost), 38, serving.window)
  same(batch[0], serving.by_plan(engine, lost, plan, entries))


@pytest.mark.parametrize("length", [20, 21, 24])
def test_a_repeated_prompt_hits_in_this_process_and_in_the_next(serving, tmp_path, length):
  text = serving.text(length)
  (first,) = serving.ask(serving.engine(tmp_path), text)
  replies = []
  for engine in (serving.engine(tmp_path), serving.engine(tmp_path)):
    for _ in range(2):
      replies += serving.ask(engine, text)
      assert replies[-1][0][1:3] == ("D", length // 2 * 2)
    counters = engine.store.counters()
    assert (counters["persistent/hits"], counters["persistent/misses"]) == (2, 0)
    assert counters["persistent/hit_tokens"] == length // 2 * 4
    counted(engine, replayed=2, replayed_tokens=2 * serving.window)
  for reply in replies[1:]:
    same(reply, replies[0], atol=0)
  assert first[0].arm == "B"


@pytest.mark.slow
def test_entries_of_other_weights_or_formats_are_not_found(serving, tmp_path):
  text = serving.text(30)
  own = serving.engine(tmp_path)
  serving.ask(own, text)
  for model in (serving.model(seed=1), serving.model(PACKED)):
    other = serving.engine(tmp_path, model=model)
    (found,), (cold,) = serving.ask(other, text), serving.ask(serving.engine(model=model), text)
    same(found, cold, atol=0)
    assert found[0][1:3] == ("B", 0)
    counters = other.store.counters()
    assert (counters["persistent/hits"], counters["persistent/misses"]) == (0, 1)
    counted(other, recomputed_miss=1)
    assert serving.ask(own, text)[0][0][1:3] == ("D", 30)


def test_entries_that_a_model_rounds_differently_are_others(serving, tmp_path):
  """Also where both are stored in one format."""
  wide, half = (CacheFormats(*[kind] * 3) for kind in ("float32", "bfloat16"))
  spaces = [
      serving.engine(
          tmp_path, model=serving.model(quantize), cache=cache
      ).store.persistent.layout.space
      for quantize in ((), ("index",), PACKED)
      for cache in (wide, half)
  ]
  assert len(set(spaces)) == 6


class Full:
  """A key-value store that takes no further bytes after some writes."""

  def __init__(self, kv, writes):
    self._kv, self._left = kv, writes

  def __getattr__(self, name):
    return getattr(self._kv, name)

  def write(self, key, value):
    self._left -= 1
    if self._left < 0:
      raise OSError(errno.ENOSPC, "No space left on device")
    return self._kv.write(key, value)


@pytest.mark.parametrize("writes", [0, 1, 2, 4])
def test_a_full_disk_ends_the_saving_and_not_the_reply(serving, tmp_path, writes):
  engine, cold, text = serving.engine(tmp_path), serving.engine(), serving.text(30)
  persistent = engine.store.persistent
  kv, persistent._kv = persistent._kv, Full(persistent._kv, writes)
  (found,), (expected,) = serving.ask(engine, text), serving.ask(cold, text)
  same(found, expected, atol=0)
  assert engine.store.counters()["persistent/write_failed"] == 1
  text = text + found[0].tokens + serving.text(3)
  hit, windows, entries = serving.stored(engine, text)
  assert (hit, windows) == (8 * writes, None)
  (found,) = serving.ask(engine, text)
  plan = replay.replayed(len(text), hit, serving.window)
  assert found[0][1:3] == (plan.arm, plan.cached)
  same(found, serving.by_plan(engine, text, plan, entries), atol=0)
  persistent._kv = kv
  (found,) = serving.ask(engine, text)
  assert serving.stored(engine, text)[0] == len(text) // 2 * 2


REASONS = ("missing", "truncated", "corrupt_header", "corrupt_checksum", "misplaced")


@pytest.fixture(scope="module")
def turn(serving, tmp_path_factory):
  """A folder with one turn, the text of the next, and what may be answered to it."""
  folder = tmp_path_factory.mktemp("store")
  engine = serving.engine(folder)
  text = serving.text(30)
  read = text + serving.ask(engine, text)[0][0].tokens
  following = read + serving.text(2)
  kept, windows, entries = serving.stored(engine, following)
  assert (kept, windows.stop) == (38, 38)
  plan = replay.continued(len(following), kept, serving.window)
  legitimate = {("C", kept): serving.by_plan(engine, following, plan, entries, windows)}
  for c in (0, 8, 16, 24, 32, kept):
    plan = replay.replayed(len(following), c, serving.window)
    found = serving.by_plan(engine, following, plan, entries)
    legitimate[plan.arm, plan.cached] = found
  return text, following, legitimate


def test_the_answers_can_be_told_apart(turn):
  logits = np.stack([logits[0] for _, logits in turn[2].values()])
  apart = np.abs(logits[:, None] - logits).max(-1)
  # Of C and B it is promised that they cannot.
  assert list(turn[2])[:2] == [("C", 38), ("B", 0)]
  assert apart[0, 1] < EPS
  assert len(logits) == 7
  assert (apart[1:, 1:] + np.eye(6)).min() > EPS


@pytest.mark.parametrize("seed", range(50))
def test_after_a_fault_the_reply_is_that_of_its_arm(serving, turn, tmp_path, seed):
  """P11: something in the store's folder is damaged between two turns."""
  text, following, legitimate = turn
  rng, clock = np.random.default_rng(seed), Clock()
  engine = serving.engine(tmp_path, clock=clock)
  serving.ask(engine, text)
  files = sorted(f for f in tmp_path.rglob("*") if f.is_file())
  assert len(files) == 6
  damaged, kind = files[seed % 6], ("flip", "cut", "delete", "delete all")[rng.integers(4)]
  record_hit = damaged.name != "manifest.json"
  data = bytearray(damaged.read_bytes())
  if kind == "flip":
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    damaged.write_bytes(data)
  elif kind == "cut":
    damaged.write_bytes(data[: rng.integers(len(data))])
  elif kind == "delete" or not record_hit:
    damaged.unlink()
  else:
    shutil.rmtree(damaged.parent)
  lost = rng.random() < 0.5
  clock.seconds += lost * (5 * 60 + 1)

  (found,) = serving.ask(engine, following)
  arm, cached = found[0][1:3]
  same(found, legitimate[arm, cached], atol=0)
  counters = engine.store.counters()
  told = sum(counters[f"persistent/{reason}"] for reason in REASONS)
  if record_hit:
    assert arm in "BD"
    assert cached < 38
    assert told == (kind in ("flip", "cut"))
  else:
    assert (arm, cached, told) == ("D" if lost else "C", 38, 0)
  name = {"B": "recomputed_", "C": "continued", "D": "replayed"}[arm]
  assert sum(n for key, n in counters.items() if key.startswith(name) and "tok" not in key) == (
      1 + (arm == "B")
  )
  # What was lost is written again.
  assert serving.stored(engine, following)[0] == len(following) // 2 * 2
