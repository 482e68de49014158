"""Reading prompts: the encoder over all rows, the decoder over the last W (report 2.2; spec 6).

Two compiled programs read rows in chunks of fixed lengths: `encode` runs the encoder and writes the
decoder's global entries; `extend` runs both stacks. A cold prefill encodes all but the last W rows
and extends by those. Which rows run is the plan's choice (`serve/replay.py`), not this module's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from deepseek_jax import tokenizer as tok
from deepseek_jax.cache import Cache
from deepseek_jax.nn.attention import Pass
from deepseek_jax.nn.block import LayerOut
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve.replay import Plan
from deepseek_jax.serve.weights import Weights, whole

_PLAIN = Pass()


def advance(
    cache: Cache, rows: Rows, ngrams: Int[Array, "B T n"] | None, floors: Int[Array, "B 2"] | None
) -> Cache:
  """Lengths, Engram history and floors after `rows`; lines without live rows keep theirs."""
  live = rows.segments > 0
  count = jnp.sum(live, axis=1)
  some = count > 0
  end = jnp.max(jnp.where(live, rows.positions, -1), axis=1) + 1
  history = cache.history
  if ngrams is not None and history.shape[1]:
    at = jnp.maximum(count - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(ngrams, at, axis=1)[:, 0, : history.shape[1]]
    history = jnp.where(some[:, None], newest, history)
  return dataclasses.replace(
      cache,
      lengths=jnp.where(some, end, cache.lengths).astype(jnp.int32),
      history=history.astype(jnp.int32),
      floors=cache.floors if floors is None else jnp.where(some[:, None], floors, cache.floors),
  )


def require_alive(cache: Cache) -> None:
  """Raises ValueError for a cache whose arrays an earlier call was given to reuse."""
  if isinstance(cache.lengths, jax.Array) and cache.lengths.is_deleted():
    raise ValueError(
        "the cache was donated to an earlier call and is deleted; use the cache that it returned"
    )


@functools.partial(jax.jit, donate_argnames="cache")
def encode(
    model: Transformer | Weights, cache: Cache, tokens: Int[Array, "B T"], rows: Rows,
    ngrams: Int[Array, "B T n"] | None,
) -> Cache:  # fmt: skip
  """The encoder over rows; the decoder's global entries of them are written too."""
  cache = whole(model).encode(tokens, rows, ngrams, cache).cache
  return advance(cache, rows, ngrams, None)


class Extended(NamedTuple):
  """Cache and final hidden state after rows, and what the layers of each stack report."""

  cache: Cache
  hidden: Float[Array, "B T D"]
  encoder: tuple[LayerOut, ...]
  decoder: tuple[LayerOut, ...]


def extend_rows(
    model: Transformer, cache: Cache, tokens: Int[Array, "B T"], rows: Rows,
    ngrams: Int[Array, "B T n"] | None, decoder_floors: Int[Array, "B T"], how: Pass = _PLAIN,
) -> Extended:  # fmt: skip
  """Both stacks over rows; the decoder sees them with floors of its own."""
  encoded = model.encode(tokens, rows, ngrams, cache, how=how)
  below = rows._replace(floors=decoder_floors)
  out = model.decode(encoded.stream, below, encoded.entries, ngrams, encoded.cache, how=how)
  floors = jnp.stack([rows.floors[:, 0], decoder_floors[:, 0]], axis=1)
  cache = advance(out.cache, rows, ngrams, floors)
  return Extended(cache, out.hidden, encoded.outs, out.outs)


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="every")
def extend(
    model: Transformer | Weights, cache: Cache, tokens: Int[Array, "B T"], rows: Rows,
    ngrams: Int[Array, "B T n"] | None, decoder_floors: Int[Array, "B T"], *, every: bool = False,
) -> tuple[Cache, Float[Array, "B V"] | Float[Array, "B T V"]]:  # fmt: skip
  """`extend_rows` with f32 logits of each line's last live row, or of every row."""
  model = whole(model)
  cache, hidden, *_ = extend_rows(model, cache, tokens, rows, ngrams, decoder_floors)
  if every:
    return cache, model.logits(hidden)
  last = jnp.maximum(jnp.sum(rows.segments > 0, axis=1) - 1, 0)
  hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
  return cache, model.logits(hidden)[:, 0]


def chunk_lengths(rows: int, buckets: Sequence[int]) -> list[int]:
  """Lengths of chunks that hold `rows` rows: the last bucket, then the smallest for the rest."""
  full, rest = divmod(rows, buckets[-1])
  return [buckets[-1]] * full + [next(b for b in buckets if b >= rest)] * (rest > 0)


class Chunk:
  """Rows [lo, lo + T) after each line's own start, padded on the right; NumPy, [B, T]."""

  def __init__(
      self, lines: Sequence[tuple[Rows, np.ndarray, np.ndarray | None] | None], lo: int, length: int
  ):
    batch = len(lines)
    self.tokens = np.zeros((batch, length), np.int32)
    blank = lambda dtype: np.zeros((batch, length), dtype)
    self.rows = Rows(blank(np.int32), blank(np.int32), blank(np.int32), blank(bool))
    shapes = [line[2].shape[1] for line in lines if line is not None and line[2] is not None]
    self.ngrams = np.zeros((batch, length, shapes[0]), np.int32) if shapes else None
    for number, line in enumerate(lines):
      if line is None:
        continue
      rows, tokens, ngrams = line
      count = min(length, max(0, len(tokens) - lo))
      own = slice(lo, lo + count)
      self.tokens[number, :count] = tokens[own]
      for target, source in zip(self.rows[:4], rows[:4]):
        target[number, :count] = source[own]
      if ngrams is not None:
        self.ngrams[number, :count] = ngrams[own]


@dataclasses.dataclass(frozen=True)
class Reader:
  """Prefill of a batch of prompts.

  Attributes:
    model: its parameters are arguments of the compiled programs.
    buckets: chunk lengths in tokens, ascending.
    classes: token class of every id, or None for a schedule without Engram.
    pad_class: class that stands before a text.
  """

  model: Transformer
  buckets: tuple[int, ...]
  classes: np.ndarray | None = None
  pad_class: int = 0

  def prefill(
      self, cache: Cache, prompts: Sequence[np.ndarray | None], plans: Sequence[Plan | None], *,
      every: bool = False, at_boundary: Callable[[Cache], None] | None = None,
  ) -> tuple[Cache, Array, list[np.ndarray]]:  # fmt: skip
    """Reads prompts by their plans.

    Args:
      cache: donated. Lines hold what their plans keep.
      prompts: token ids, whole; None leaves a line alone.
      plans: rows of each line.
      every: return f32 logits of all decoder rows too, [n, V] a line: prompt log-probabilities.
      at_boundary: called with the cache when the encoder-only rows are done.

    Returns:
      The cache; logits of every line's last row [B, V] (0 for lines left alone); logits of all
      decoder rows line by line, or an empty list.

    Raises:
      ValueError: an empty prompt, one longer than the cache, a token outside the vocabulary, a
        continued prefix that ends inside a group, a cache that was donated before.
    """
    require_alive(cache)
    weights = Weights.of(self.model)
    alone, both, floors = [], [], np.zeros(len(prompts), np.int32)
    for number, (prompt, plan) in enumerate(zip(prompts, plans, strict=True)):
      if plan is None:
        alone.append(None)
        both.append(None)
        continue
      line = self._line(prompt, plan, cache.capacity)
      cut = plan.decoder_start - plan.encoder_start
      for target, part in ((alone, slice(0, cut)), (both, slice(cut, None))):
        target.append(jax.tree.map(lambda a, part=part: a[part], line))
      floors[number] = plan.decoder_floor
    for chunk in self._chunks(alone):
      cache = encode(weights, cache, chunk.tokens, chunk.rows, chunk.ngrams)
    if at_boundary is not None:
      at_boundary(cache)
    vocab = self.model.config.vocab_size
    logits = jnp.zeros((len(prompts), vocab), jnp.float32)
    all_logits = [[np.zeros((0, vocab), np.float32)] for _ in prompts]
    window = self.model.config.sliding_window
    for chunk in self._chunks(both, extra=window):
      below = np.broadcast_to(floors[:, None], chunk.tokens.shape)
      cache, new = extend(
          weights, cache, chunk.tokens, chunk.rows, chunk.ngrams, below, every=every
      )
      live = chunk.rows.segments > 0
      if every:
        new = np.asarray(new)
        for number, own in enumerate(live):
          all_logits[number].append(new[number, own])
        new = np.stack([a[max(0, n - 1)] for a, n in zip(new, live.sum(1))])
      logits = jnp.where(live.any(1)[:, None], new, logits)
    return cache, logits, [np.concatenate(a) for a in all_logits] if every else []

  def _line(self, prompt, plan, capacity):
    """(rows, tokens, ngrams) from the plan's first encoder row on."""
    prompt = tok.checked_ids(prompt, self.model.config.vocab_size)
    if not len(prompt):
      raise ValueError("the prompt is empty; it must have at least 1 token")
    if len(prompt) > capacity:
      raise ValueError(f"the prompt has {len(prompt)} tokens; the cache holds {capacity}")
    if plan.length != len(prompt):
      raise ValueError(f"the plan is for {plan.length} tokens; the prompt has {len(prompt)}")
    start, ngrams = plan.encoder_start, None
    multiple = math.lcm(*self.model.schedule.ratios)
    if plan.arm == "C" and start == plan.cached and start % multiple:
      raise ValueError(
          f"cached is {plan.cached}; a prefix that is continued must be a multiple of {multiple}"
          " tokens: a half-filled group is not kept"
      )
    if self.classes is not None:
      order = self.model.config.engram_max_ngram_size
      known = tok.classes_of(prompt[max(0, start - order + 1) :], self.classes)
      past = min(start, order - 1)
      ngrams = tok.ngrams(known[past:], self.pad_class, order, known[:past])
    return plan.encoder_rows(), prompt[start:].astype(np.int32), ngrams

  def _chunks(self, lines, extra: int | None = None):
    longest = max((len(line[1]) for line in lines if line is not None), default=0)
    buckets = self.buckets if extra is None else tuple(sorted({*self.buckets, extra}))
    lo = 0
    for length in chunk_lengths(longest, buckets) if longest else ():
      yield Chunk(lines, lo, length)
      lo += length
