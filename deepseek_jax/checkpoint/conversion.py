"""What both directions between released shards and training checkpoints share."""

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from deepseek_jax.checkpoint import training
from deepseek_jax.checkpoint.parts import Part
from deepseek_jax.config import Config
from deepseek_jax.nn.transformer import Transformer

# Of an array, decoded or not, that memory holds at one time; a chunk of a converted checkpoint.
BLOCK_BYTES = 32 << 20
# Called with the bytes that are finished and their total.
Progress = Callable[[int, int], None]


class Report(NamedTuple):
  """What a conversion did.

  Attributes:
    tensors: released tensors converted or copied.
    num_bytes: their size in released form.
    skipped: names of released tensors that the result has no place for, or that nothing holds.
    original: released checkpoint whose bytes untouched weights have kept, or None.
  """

  tensors: int
  num_bytes: int
  skipped: list[str]
  original: str | None = None


class Meter:
  """Adds up finished bytes for a `Progress`."""

  def __init__(self, progress: Progress, total: int):
    self._progress, self._total, self._done = progress, total, 0

  def add(self, count: int) -> None:
    self._done += count
    self._progress(self._done, self._total)


def abstract_model(config: Config) -> Transformer:
  """The model of an experiment, of shapes."""
  return nnx.eval_shape(lambda: Transformer(config.model, config.compute, rngs=nnx.Rngs(0)))


def arrays_of(planned: Any) -> dict[str, Part]:
  """The parts of a plan by the name of their array in a training checkpoint."""
  return training.names_of({"params": planned})


def num_bytes(part: Part) -> int:
  """Size of an array in memory."""
  return math.prod(part.shape) * part.dtype.itemsize


def fingerprint(*facts: Any) -> str:
  """Digest of JSON-able facts."""
  return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
