"""The five serving arms on the same prompts: what a resumption costs (spec 17).

Prompts share beginnings, so a beginning is read once and its cache goes to all lines that go on.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Float32, Int

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve import prefill, replay
from deepseek_jax.serve.replay import Plan

ARMS = "ABCDE"


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
    prompts = np.concatenate([np.repeat(beginnings, q, axis=0), rests.reshape(p * q, s)], axis=1)
    start, tail = min(c, n - w), n - w
    whole = self._read(self._empty(p, n), beginnings, replay.exact(c))[0]
    before = Plan("B", start, 0, 0, 0, start, start)
    encoded = self._read(self._empty(p, n), beginnings[:, :start], before)[0]
    entries = dataclasses.replace(
        whole, **{name: getattr(self._empty(p, n), name) for name in ("encoder_window", "tails")}
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


class Difference(NamedTuple):
  """One arm against another on the same prompts.

  Attributes:
    gained, lost: prompts that it alone answers, and that only the other answers.
    p: of McNemar's exact test, two-sided.
    kl: mean KL(other ‖ arm) of the answer's distribution in nats, and its standard error.
    nll: mean difference of −log p(answer) in nats, and its standard error.
  """

  gained: int
  lost: int
  p: float
  kl: tuple[float, float]
  nll: tuple[float, float]


def accuracy(right: np.ndarray) -> tuple[float, float, float]:
  """Share of right answers with its 95 % Wilson interval."""
  found = scipy.stats.binomtest(int(right.sum()), right.size)
  interval = found.proportion_ci(method="wilson")
  return float(right.mean()), float(interval.low), float(interval.high)


def _mean(values: np.ndarray) -> tuple[float, float]:
  return float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size))


def difference(
    other: Float32[np.ndarray, "n V"],
    arm: Float32[np.ndarray, "n V"],
    answers: Int[np.ndarray, " n"],
) -> Difference:
  """Of logits for the same answers.

  Args:
    other: logits of the reference arm.
    arm: logits of the arm.
    answers: right ids.
  """
  base, own = (np.asarray(jax.nn.log_softmax(x.astype(np.float64))) for x in (other, arm))
  right = [x.argmax(-1) == answers for x in (base, own)]
  gained, lost = int((right[1] & ~right[0]).sum()), int((right[0] & ~right[1]).sum())
  p = scipy.stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
  at = np.arange(len(answers)), answers
  kl = np.sum(np.exp(base) * (base - own), axis=-1)
  return Difference(gained, lost, float(p), _mean(kl), _mean(base[at] - own[at]))
