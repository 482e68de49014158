"""Served runs of a golden file: decode, the serving arms, and one-pass simulations of them.

Everything is returned under the file's own keys. Arms C and E are not stored there; they are run
for the cached lengths of arm D and must give what arms B and A give (spec 17).
"""

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.cache import Cache, Table, ring_positions
from deepseek_jax.config import CacheFormats, ReplayConfig
from deepseek_jax.eval.golden import Case
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve import decode, prefill, replay, state
from deepseek_jax.serve.weights import Weights
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.data import Batch, collate
from deepseek_jax.train.turns import Turn, Views, row_counts

DECODE = re.compile(r"decode_logits_from(\d+)$")
REPLAY = re.compile(r"(arm[A-E]|sim[BD])(?:_[cp](\d+))?_(.+)$")
_POISON_WORD, _POISON_VALUE = 0x7E7E7E7E, 1e4


def poisoned(table: Table) -> Table:
  """The table with large finite values in every row: what nobody may read."""
  fill = lambda a: np.full_like(a, _POISON_WORD if a.dtype == np.int32 else _POISON_VALUE)
  return jax.tree.map(fill, table)


class Runs:
  """A model and the lines of a case, served.

  Args:
    case: ids are one prompt and its continuation a line.
    model: with the case's weights.
  """

  def __init__(self, case: Case, model: Transformer):
    self.case, self.model, self.weights = case, model, Weights.of(model)
    self.storage = CacheFormats.of(model.compute)
    self.window = case.config.sliding_window
    pad = 0 if case.classes is None else int(case.classes[case.config.engram_pad_token_id])
    length = case.ids.shape[1]
    buckets = tuple(sorted({min(length, b) for b in (self.window, 4 * self.window, length)}))
    self.reader = prefill.Reader(model, buckets, case.classes, pad)

  def cache(self) -> Cache:
    """An empty cache whose tables hold poison."""
    lines, length = self.case.ids.shape
    empty = Cache.init(
        self.case.config,
        self.storage,
        batch=lines,
        capacity=length,
        pad_class=self.reader.pad_class,
    )
    return jax.tree.map(
        lambda t: poisoned(t) if isinstance(t, Table) else t, empty,
        is_leaf=lambda t: isinstance(t, Table),
    )  # fmt: skip

  def read(self, plan: replay.Plan, cache: Cache) -> tuple[Cache, np.ndarray]:
    """Prefill of every line by one plan; logits of the last prompt row."""
    prompts = [line[: plan.length] for line in self.case.ids]
    cache, logits, _ = self.reader.prefill(cache, prompts, [plan] * len(prompts))
    return cache, np.asarray(logits)

  def write(self, cache: Cache, first: np.ndarray, start: int) -> np.ndarray:
    """Logits [B, rows, V] from the last prompt row on, reading the given continuation."""
    logits, live = [first], np.ones(len(self.case.ids), bool)
    for i in range(start, self.case.ids.shape[1]):
      cache, new = decode.step(self.weights, cache, self.case.ids[:, i], live, self.case.classes)
      logits.append(np.asarray(new))
    return np.stack(logits, axis=1)

  def decoded(self, start: int) -> np.ndarray:
    """Teacher-forced logits of positions from `start` on after an exact prefill."""
    cache, first = self.read(replay.exact(start), self.cache())
    return self.write(cache, first, start)[:, 1:]

  def windows(self, cache: Cache, first: int) -> np.ndarray:
    """Window latents of all layers from position `first` on, [B, layers, n, H]."""
    parts = []
    for ring in (cache.encoder_window, cache.decoder_window):
      at = np.asarray(ring_positions(jnp.asarray(cache.lengths), self.window))[0]
      order = np.argsort(at)
      keep = order[at[order] >= first]
      parts.append(np.asarray(ring.read(jnp.float32))[:, :, keep])
    return np.moveaxis(np.concatenate(parts), 0, 1)

  def entries(self, cache: Cache, length: int, first: int) -> Iterator[tuple[str, np.ndarray]]:
    """Main KV and index keys of tokens [first, length) by suffix of the file's keys."""
    sources = self.model.schedule.kv_sources
    for spec, kv, keys in zip(sources, cache.main_kv, cache.index_keys):
      own = slice(first // spec.ratio, length // spec.ratio)
      yield f"kv{spec.layer}", np.asarray(kv.read(jnp.float32))[:, own]
      yield f"index_k{spec.layer}", np.asarray(keys.read(jnp.float32))[:, own]

  def kept(self, source: Cache, cached: int) -> Cache:
    """A poisoned cache with the entries of the first `cached` tokens of another."""
    cache = self.cache()
    for line in range(len(self.case.ids)):
      rows = state.take_entries(source, self.model.schedule, line, cached)
      state.put_entries(cache, self.model.schedule, line, rows)
    return cache

  def arms(self) -> Iterator[tuple[str, np.ndarray]]:
    """Every array of arms A to E by the file's key, `armC_c…` and `armE_c…` included."""
    n, w = int(self.case.golden["prompt_len"]), self.window
    schedule = self.model.schedule
    exact, first = self.read(replay.exact(n), self.cache())
    whole = jax.device_get(exact)
    yield "armA_window_kv", self.windows(whole, n - w)
    for key, value in self.entries(whole, n, 0):
      yield f"armA_{key}", value
    yield "armA_logits", self.write(exact, first, n)
    cold, first = self.read(replay.cold(n, w), self.cache())
    yield "armB_window_kv", self.windows(jax.device_get(cold), n - w)
    for key, value in self.entries(jax.device_get(cold), n, 0):
      yield f"armB_{key}", value
    yield "armB_logits", self.write(cold, first, n)
    for c in np.atleast_1d(self.case.golden.get("cached_lengths", ())):
      yield from self._resumed(int(c), n, whole, schedule)

  def _resumed(self, c, n, whole, schedule):
    w = self.window
    # A hit of at most W tokens is recomputed by `replay.replayed`; the file keeps it as it is.
    start, tail = max(0, c - w), max(0, n - w)
    bounded = replay.Plan("D", n, c, start, start, tail, tail)
    replays = replay.Plan("D", c, c, start, start, c, c)
    lines = [line[:c] for line in self.case.ids]
    for_windows, _, _ = self.reader.prefill(self.kept(whole, c), lines, [replays] * len(lines))
    yield f"armD_c{c}_replay_window_kv", self.windows(for_windows, start)[
        :, : len(schedule.encoder)
    ]
    yield f"armD_c{c}_floor", np.asarray(start)
    cache, first = self.read(bounded, self.kept(whole, c))
    host = jax.device_get(cache)
    yield f"armD_c{c}_window_kv", self.windows(host, n - w)
    for key, value in self.entries(host, n, c):
      yield f"armD_c{c}_new_{key}", value
    yield f"armD_c{c}_logits", self.write(cache, first, n)
    if c % np.lcm.reduce(schedule.ratios):
      return
    plan = replay.continued(n, c, w)
    before = replay.Plan("B", plan.encoder_start, 0, 0, 0, plan.encoder_start, plan.encoder_start)
    cache = self.kept(whole, c)
    if plan.encoder_start:
      lines = [line[: plan.encoder_start] for line in self.case.ids]
      read, _, _ = self.reader.prefill(self.cache(), lines, [before] * len(lines))
      for line in range(len(lines)):
        state.put_window(cache, line, state.take_window(read, line, 0), plan.encoder_start)
    yield f"armC_c{c}_logits", self.write(*self.read(plan, cache), n)
    plan = replay.exact_replay(n, c, w, len(schedule.encoder), len(schedule.decoder))
    yield f"armE_c{c}_logits", self.write(*self.read(plan, self.kept(whole, c)), n)

  def simulated(self) -> Iterator[tuple[str, np.ndarray]]:
    """Training's simulation of arms B and D, without a cache (spec 17)."""
    golden, w = self.case.golden, self.window
    for p in np.atleast_1d(golden.get("sim_prompt_lengths", ())):
      yield f"simB_p{p}_logits", self._turn(int(p), 0)[:, min(int(p), w) - (p > 0) :]
    n = int(golden.get("prompt_len", 0))
    for c in np.atleast_1d(golden.get("cached_lengths", ())):
      yield f"simD_c{c}_logits", self._turn(n, int(c))[:, min(n, w) - 1 :]

  def _turn(self, prompt: int, hit: int) -> np.ndarray:
    """Logits [B, rows, V] of the decoder's rows where a line is a prompt and its response."""
    case, (lines, total) = self.case, self.case.ids.shape
    loss = np.arange(total) >= prompt
    examples = [Example(line.astype(np.int32), loss) for line in case.ids]
    turns = [[Turn(prompt, total, hit)]] * lines
    _, decoder = row_counts(turns[0], self.window)
    # Room for any prompt and hit, so that all turns are one program.
    views = Views(
        examples, replay=ReplayConfig(total, encoder=1.0), window=self.window, turns=turns
    )
    batch = collate(
        views, [[i] for i in range(lines)], 2 * total, case.config.engram_pad_token_id,
        case.classes, 0 if case.ngrams is None else case.ngrams.shape[-1],
    )  # fmt: skip
    return np.asarray(_simulated(self.model, batch))[:, :decoder]


@jax.jit
def _simulated(model: Transformer, batch: Batch):
  out = model(batch.tokens, batch.rows, batch.ngrams, batch.decoder)
  return model.logits(out.hidden)
