"""The five serving arms on the same prompts: what a resumption costs (spec 17).

Prompts share beginnings, so a beginning is read once and its cache goes to all lines that go on.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Bool, Float32, Int

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve import prefill, replay
from deepseek_jax.serve.replay import Plan

ARMS = "ABCDE"
# An approximation and what it stands for: the decoder's replay, and the encoder's.
PAIRS = ("A", "B"), ("C", "D")


class Prompts(NamedTuple):
  """Held-out prompts: Q of every one of P beginnings.

  Attributes:
    beginnings: what is cached.
    rests: tokens after the boundary; the answer comes next.
    answers: right ids.
    spans: tokens from where the answer's source stands to the boundary.
  """

  beginnings: Int[np.ndarray, "P c"]
  rests: Int[np.ndarray, "P Q s"]
  answers: Int[np.ndarray, "P Q"]
  spans: Int[np.ndarray, "P Q"]


def _repeated(cache: Cache, times: int) -> Cache:
  """Every line `times` over; a table of rings leads with layers."""
  along = lambda axis: lambda a: jnp.repeat(jnp.asarray(a), times, axis=axis)
  rings = jax.tree.map(along(1), (cache.encoder_window, cache.decoder_window))
  rest = dataclasses.replace(cache, encoder_window=None, decoder_window=None)
  rest = jax.tree.map(along(0), rest)
  return dataclasses.replace(rest, encoder_window=rings[0], decoder_window=rings[1])


class Arms:
  """Answers of one model by every arm.

  Args:
    model: as it serves.
    classes: Engram class of every token id; None for a model without Engram.
    pad_class: class that stands before a text.
  """

  def __init__(
      self, model: Transformer, classes: np.ndarray | None = None, pad_class: int = 0
  ):  # fmt: skip
    self.model, self.window = model, model.config.sliding_window
    w, schedule = self.window, model.schedule
    self._layers = len(schedule.encoder), len(schedule.decoder)
    self._multiple = int(np.lcm.reduce(schedule.ratios))
    self._reader = prefill.Reader(model, (w, 4 * w, 16 * w), classes, pad_class)

  def logits(
      self, beginnings: Int[np.ndarray, "P c"], rests: Int[np.ndarray, "P Q s"], arms: str = ARMS
  ) -> dict[str, Float32[np.ndarray, "P Q V"]]:
    """f32 logits after the last token of every prompt; all rests of a beginning share its cache.

    Args:
      beginnings: what was cached when a rest came.
      rests: tokens after the boundary.
      arms: which of them to run.

    Raises:
      ValueError: a boundary inside of a group, or not more than W tokens in: such hits are
        recomputed whole.
    """
    (p, c), (_, q, s), w = beginnings.shape, rests.shape, self.window
    if c % self._multiple or c <= w:
      raise ValueError(
          f"beginnings have {c} tokens; a hit has a multiple of {self._multiple} and more than {w}"
      )
    n = c + s
    room = -(-n // 64) * 64  # One program for questions of several lengths.
    prompts = np.concatenate([np.repeat(beginnings, q, axis=0), rests.reshape(p * q, s)], axis=1)
    start, tail = min(c, n - w), n - w
    whole = self._read(self._empty(p, room), beginnings, replay.exact(c))[0]
    before = Plan("B", start, 0, 0, 0, start, start)
    encoded = self._read(self._empty(p, room), beginnings[:, :start], before)[0]
    entries = dataclasses.replace(
        whole, **{name: getattr(self._empty(p, room), name) for name in ("encoder_window", "tails")}
    )
    windows = dataclasses.replace(
        whole, encoder_window=encoded.encoder_window, tails=encoded.tails, lengths=encoded.lengths
    )
    runs = {
        "A": (whole, Plan("A", n, c, c, 0, c, 0)),
        "B": (encoded, Plan("B", n, start, start, 0, tail, tail)),
        "C": (windows, replay.continued(n, c, w)),
        "D": (entries, replay.replayed(n, c, w)),
        "E": (entries, replay.exact_replay(n, c, w, *self._layers)),
    }
    found = {}
    for arm in arms:
      cache, plan = runs[arm]
      # Programs donate their cache.
      _, logits = self._read(_repeated(cache, q), prompts, plan)
      found[arm] = np.asarray(logits).reshape(p, q, -1)
    return found

  def _empty(self, lines: int, tokens: int) -> Cache:
    storage = CacheFormats.of(self.model.compute)
    return Cache.init(
        self.model.config, storage, batch=lines, capacity=tokens,
        pad_class=self._reader.pad_class,
    )  # fmt: skip

  def _read(self, cache: Cache, prompts: np.ndarray, plan: Plan) -> tuple[Cache, jax.Array]:
    cache, logits, _ = self._reader.prefill(cache, list(prompts), [plan] * len(prompts))
    return cache, logits


class Answers(NamedTuple):
  """What the arms made of n prompts; the first axis runs over `ARMS` or over `PAIRS`.

  Attributes:
    right: [5, n] whether the likeliest token is the answer.
    nll: [5, n] −log p(answer) in nats.
    kl: [2, n] KL(other ‖ arm) of the answer's distribution in nats.
    noise: [2, n] largest difference of a logit: A from E, B from C.
    spans: [n] of `Prompts`.
  """

  right: Bool[np.ndarray, "5 n"]
  nll: Float32[np.ndarray, "5 n"]
  kl: Float32[np.ndarray, "2 n"]
  noise: Float32[np.ndarray, "2 n"]
  spans: Int[np.ndarray, " n"]


def answered(logits: Mapping[str, Float32[np.ndarray, "P Q V"]], prompts: Prompts) -> Answers:
  """Of what `Arms.logits` found."""
  logits = {arm: logits[arm].reshape(-1, logits[arm].shape[-1]) for arm in ARMS}
  answers = prompts.answers.reshape(-1)
  log_p = {
      arm: np.asarray(jax.nn.log_softmax(value.astype(np.float64))) for arm, value in logits.items()
  }
  at = np.arange(len(answers)), answers
  return Answers(
      np.stack([logits[arm].argmax(-1) == answers for arm in ARMS]),
      np.stack([-log_p[arm][at] for arm in ARMS]).astype(np.float32),
      np.stack([
          np.sum(np.exp(log_p[a]) * (log_p[a] - log_p[b]), axis=-1) for a, b in PAIRS
      ]).astype(np.float32),
      np.stack([np.abs(logits[a] - logits[b]).max(axis=-1) for a, b in ("AE", "BC")]),
      prompts.spans.reshape(-1),
  )  # fmt: skip


class Flips(NamedTuple):
  """Prompts that only one of two answers right, and p of McNemar's exact test, two-sided."""

  gained: int
  lost: int
  p: float


def flips(other: Bool[np.ndarray, " n"], own: Bool[np.ndarray, " n"]) -> Flips:
  """What changes from one set of answers to another of the same prompts."""
  gained, lost = int((own & ~other).sum()), int((other & ~own).sum())
  p = scipy.stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
  return Flips(gained, lost, float(p))


def accuracy(right: Bool[np.ndarray, " n"]) -> tuple[float, float, float]:
  """Share of right answers with its 95 % Wilson interval."""
  found = scipy.stats.binomtest(int(right.sum()), right.size)
  interval = found.proportion_ci(method="wilson")
  return float(right.mean()), float(interval.low), float(interval.high)


def mean(values: Float32[np.ndarray, " n"]) -> tuple[float, float]:
  """Mean and its standard error."""
  values = values.astype(np.float64)
  return float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size))
