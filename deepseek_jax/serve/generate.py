"""Generation: look up, continue or replay or recompute, read, write, keep (report 3.2).

A conversation is its tokens. Each call reads whole texts; what the stores kept of them decides how
much of that is work.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax import tokenizer as tok
from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats, ServeConfig
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve import decode, prefill, replay, state
from deepseek_jax.serve.persistent import PersistentStore
from deepseek_jax.serve.sampling import Sampling, sample
from deepseek_jax.serve.session import SessionStore, WindowState
from deepseek_jax.serve.store import Store
from deepseek_jax.serve.weights import Weights

_GREEDY = Sampling()


class Reply(NamedTuple):
  """Answer to one prompt.

  Attributes:
    tokens: generated ids, the stop token included.
    arm: serving arm of the prefill ('B' cold, 'C' continued, 'D' bounded replay).
    cached: prompt tokens whose global entries were found.
    stopped: whether a stop token came.
  """

  tokens: list[int]
  arm: str
  cached: int
  stopped: bool


class Result(NamedTuple):
  """Replies of a batch, and what they took; seconds include compilation where it was needed."""

  replies: list[Reply]
  prefill_seconds: float
  decode_seconds: float
  steps: int
  cache_bytes: dict[str, int]


@dataclasses.dataclass
class Traffic:
  """Tokens read and written since the engine was made."""

  read: int = 0
  written: int = 0

  @property
  def read_to_write(self) -> float:
    return self.read / max(1, self.written)


def user_turn(tokenizer: tok.Tokenizer, text: str, *, first: bool) -> list[int]:
  """A user message up to where the response begins, as conversations are trained on.

  Raises:
    ValueError: a tokenizer without markers for user and assistant, or text that encodes to a
      control token and would forge a turn.
  """
  if tokenizer.user_id is None or tokenizer.assistant_id is None:
    raise ValueError("the tokenizer has no markers for user and assistant; a turn needs both")
  t, ids = tokenizer, tokenizer.encode(text)
  if {t.bos_id, t.eos_id, t.pad_id, t.user_id, t.assistant_id, t.system_id}.intersection(ids):
    raise ValueError("the message holds a control token of the tokenizer; it must be plain text")
  return [*([t.bos_id] if first else []), t.user_id, *ids, t.assistant_id]


class Engine:
  """A model that reads and writes, with its stores.

  Args:
    model: the model.
    tokenizer: its vocabulary is the model's.
    serve: buckets, formats, lifetimes.
    store: folder or URL of the persistent store, or None for none. Window entries of running
      conversations are kept in host memory only together with it.
    weights: string that stands for the parameters in the store's keys; None digests them.
    clock: wall clock in seconds, for both lifetimes.
  """

  def __init__(
      self, model: Transformer, tokenizer: tok.Tokenizer, serve: ServeConfig | None = None, *,
      store: str | None = None, weights: str | None = None,
      clock: Callable[[], float] = time.time,
  ):  # fmt: skip
    self.model, self.tokenizer = model, tokenizer
    self.serve = serve or ServeConfig()
    self.storage = self.serve.cache or CacheFormats.of(model.compute)
    self.traffic, self.weights = Traffic(), Weights.of(model)
    classes = tok.token_classes(tokenizer) if model.config.engram_layer_ids else None
    pad = 0 if classes is None else int(classes[tokenizer.pad_id])
    self.reader = prefill.Reader(model, self.serve.buckets, classes, pad)
    self.classes = None if classes is None else jnp.asarray(classes)
    self.multiple = int(np.lcm.reduce(model.schedule.ratios))
    self.parts = state.parts(model.config, self.storage)
    self.store = Store(None, None)
    if store is not None:
      name = state.identity(model.config, self.storage, weights or model, model.compute, classes)
      persistent = PersistentStore(
          store, name, self.parts, block=self.serve.block,
          guarantee_hours=self.serve.guarantee_hours, budget_bytes=self.serve.budget_bytes,
          clock=clock,
      )  # fmt: skip
      session = SessionStore(
          name, ttl_minutes=self.serve.ttl_minutes, fraction=self.serve.host_fraction, clock=clock
      )
      self.store = Store(persistent, session)

  def capacity(self, tokens: int) -> int:
    """Tokens a cache is made for: four sizes an octave, so that few shapes are compiled."""
    step = max(256, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step

  def _resume(
      self, tokens: np.ndarray, cache: Cache, line: int
  ) -> tuple[replay.Plan, WindowState | None]:
    """Looks a prompt up, puts what is kept into its line and decides what runs (spec 17).

    Returns:
      The plan, and the window state that it continues, if it does.
    """
    n, w = len(tokens), self.model.config.sliding_window
    if self.store.persistent is None:
      return replay.cold(n, w), None
    found, rows = self.store.read(tokens, self.store.lookup(tokens))
    c, windows = found.hit.length, found.windows
    plan = None
    if windows is not None and c - windows.stop <= w:
      plan = replay.continued(n, windows.stop, w, windows.floor)
      if not state.reaches(windows, plan, w):
        plan = None
    if plan is not None:
      state.put_window(cache, line, windows, plan.encoder_start)
      self.store.count("continued")
    else:
      windows, plan = None, replay.replayed(n, c, w)
      if plan.arm == "D":
        self.store.count("replayed")
        self.store.count("replayed_tokens", plan.cached - plan.encoder_start)
      else:
        self.store.count("recomputed_short_hit" if c else "recomputed_miss")
    if plan.cached:
      kept = {name: rows[name][: plan.cached // part.ratio] for name, part in self.parts.items()}
      state.put_entries(cache, self.model.schedule, line, kept)
    cache.lengths[line] = plan.encoder_start
    return plan, windows

  def generate(
      self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, sampling: Sampling = _GREEDY,
      stop: Sequence[int] | None = None, on_token: Callable[[int, int], None] | None = None,
  ) -> Result:  # fmt: skip
    """Answers a batch of prompts of any lengths.

    Args:
      prompts: token ids; a turn of a conversation is the whole conversation up to it.
      max_new_tokens: a line ends there if no stop token comes.
      sampling: how tokens are drawn.
      stop: ids that end a line; None is the tokenizer's end token.
      on_token: called with (line, id) as tokens come.

    Raises:
      ValueError: no prompt, an empty one, ids outside the vocabulary, fewer than one new token, or
        more tokens than the model has positions for.
    """
    vocab, most = self.model.config.vocab_size, self.model.config.max_position_embeddings
    stop = (
        {self.tokenizer.eos_id}
        if stop is None
        else set(tok.checked_ids(sorted(stop), vocab).tolist())
    )
    if not prompts:
      raise ValueError("prompts is empty; give at least one")
    if max_new_tokens < 1:
      raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    texts = [tok.checked_ids(p, vocab).astype(np.int32) for p in prompts]
    if not all(len(t) for t in texts):
      raise ValueError("a prompt is empty; it must have at least 1 token")
    longest = max(map(len, texts))
    if longest + max_new_tokens > most:
      raise ValueError(
          f"the longest prompt has {longest} tokens, max_new_tokens is {max_new_tokens}; the model"
          f" has {most} positions"
      )
    began = time.perf_counter()
    cache = Cache.init(
        self.model.config, self.storage, batch=len(texts),
        capacity=self.capacity(longest + max_new_tokens), pad_class=self.reader.pad_class,
    )  # fmt: skip
    sizes = cache.bytes
    plans, continued = zip(*(self._resume(t, cache, line) for line, t in enumerate(texts)))
    windows = _Windows(self, plans, continued)
    cache, logits, _ = self.reader.prefill(cache, texts, plans, at_boundary=windows.look)
    windows.look(cache)
    lengths = np.array([len(t) for t in texts], np.int32)
    tokens = np.asarray(sample(logits, lengths, sampling))
    prefill_seconds = time.perf_counter() - began
    began, steps = time.perf_counter(), 0
    written: list[list[int]] = [[] for _ in texts]
    live = np.ones(len(texts), bool)
    while True:
      for line in np.flatnonzero(live):
        written[line].append(int(tokens[line]))
        if on_token is not None:
          on_token(int(line), int(tokens[line]))
        live[line] = tokens[line] not in stop and len(written[line]) < max_new_tokens
      if not live.any():
        break
      cache, logits = decode.step(self.weights, cache, tokens, live, self.classes)
      lengths = lengths + live
      tokens = np.asarray(sample(logits, lengths, sampling))
      steps += 1
      windows.stepped(cache)
    decode_seconds = time.perf_counter() - began
    windows.look(cache)
    self._keep(cache, texts, written, windows)
    self.traffic.read += sum(map(len, texts))
    self.traffic.written += sum(map(len, written))
    replies = [
        Reply(new, plan.arm, plan.cached, new[-1] in stop) for new, plan in zip(written, plans)
    ]
    return Result(replies, prefill_seconds, decode_seconds, steps, sizes)

  def prompt_logprobs(self, prompt: Sequence[int]) -> np.ndarray:
    """Log p(token i + 1 | tokens up to i) of a prompt, f32 [n − 1], nats.

    The full stack over every row (arm A), whatever the stores hold: a narrowed or resumed prefill
    has no logits of earlier rows (spec 6).

    Raises:
      ValueError: fewer than 2 tokens, ids outside the vocabulary, more tokens than positions.
    """
    config = self.model.config
    text = tok.checked_ids(prompt, config.vocab_size).astype(np.int32)
    if not 2 <= len(text) <= config.max_position_embeddings:
      raise ValueError(
          f"the prompt has {len(text)} tokens; log-probabilities need within"
          f" 2..{config.max_position_embeddings}"
      )
    cache = Cache.init(
        config, self.storage, batch=1, capacity=self.capacity(len(text)),
        pad_class=self.reader.pad_class,
    )  # fmt: skip
    plan = replay.exact(len(text))
    _, _, logits = self.reader.prefill(cache, [text], [plan], every=True)
    logp = np.asarray(jax.nn.log_softmax(logits[0][:-1]))
    return np.take_along_axis(logp, text[1:, None], axis=1)[:, 0]

  def _keep(self, cache, texts, written, windows) -> None:
    """Global entries to the persistent store, encoder windows to the session store."""
    if self.store.persistent is None:
      return
    cache = jax.device_get(cache)
    for line, (text, new) in enumerate(zip(texts, written)):
      read = np.concatenate([text, np.array(new[:-1], np.int32)])
      keep = len(read) - len(read) % self.multiple
      entries = state.take_entries(cache, self.model.schedule, line, keep)
      self.store.save(read[:keep], entries)
      kept = state.until(windows.states[line], keep)
      if kept is not None:
        before = windows.found[line]
        self.store.put(read[:keep], kept, replaces=None if before is None else read[:before])


class _Windows:
  """Encoder windows of the newest 2W positions of every line, gathered from rings of W.

  A ring forgets position p when p + W is written, so it is looked at every W steps.
  """

  def __init__(
      self, engine: Engine, plans: Sequence[replay.Plan], continued: Sequence[WindowState | None]
  ):
    self.active = engine.store.session is not None
    self.window = engine.model.config.sliding_window
    self.most = 2 * self.window + engine.multiple
    self.floors = [plan.encoder_floor for plan in plans]
    self.found = [None if w is None else w.stop for w in continued]
    self.states = [state.until(w, plan.encoder_start) for w, plan in zip(continued, plans)]
    self._steps = 0

  def look(self, cache: Cache) -> None:
    if not self.active:
      return
    host = jax.device_get((cache.encoder_window, cache.lengths))
    cache = dataclasses.replace(cache, encoder_window=host[0], lengths=host[1])
    for line, floor in enumerate(self.floors):
      new, old = state.take_window(cache, line, floor), self.states[line]
      if new.stop > floor:
        self.states[line] = new if old is None else state.joined(old, new, self.most)

  def stepped(self, cache: Cache) -> None:
    self._steps += 1
    if self._steps % self.window == 0:
      self.look(cache)
