"""Examples to packed batches, as a Grain data set whose whole state is a row number."""

import bisect
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jaxtyping import Float32, Int32

from deepseek_jax import tokenizer as tok
from deepseek_jax.nn.rows import Rows
from deepseek_jax.train.conversations import Example

# Rows that first-fit packing keeps open. More fill the rows better and cost a longer search.
OPEN_ROWS = 32


class Batch(NamedTuple):
  """Packed documents (spec section 11 for the windows). Padding has segment 0 and weight 0.

  Attributes:
    tokens: ids; the pad id at padding.
    rows: positions and segments; documents of a row are numbered from 1.
    ngrams: Engram windows of each document alone; None for a model without Engram.
    targets: next token of the same document, the pad id where there is none.
    weights: 1 where the target carries loss, else 0.
  """

  tokens: Int32[np.ndarray, "*B T"]
  rows: Rows
  ngrams: Int32[np.ndarray, "*B T order"] | None
  targets: Int32[np.ndarray, "*B T"]
  weights: Float32[np.ndarray, "*B T"]


class PackedBatch(NamedTuple):
  """A batch and the indices of the examples in it, row after row."""

  batch: Batch
  example_ids: list[int]


def _shuffled(n: int, seed: int, epoch: int = 0) -> list[int]:
  # NumPy promises the raw stream for all its versions, but not that of Generator.permutation.
  return np.argsort(np.random.PCG64([seed, epoch]).random_raw(n), kind="stable").tolist()


def split(
    examples: Sequence[Example], eval_fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
  """Training and evaluation examples, each in the given order; equal examples stay together.

  Raises:
    ValueError: one side would be empty.
  """
  keys = [example.tokens.tobytes() for example in examples]
  distinct = list(dict.fromkeys(keys))
  n = round(eval_fraction * len(distinct))
  if not 0 < n < len(distinct):
    raise ValueError(
        f"eval_fraction {eval_fraction} of {len(distinct)} distinct examples leaves one side empty"
    )
  held_out = {distinct[i] for i in _shuffled(len(distinct), seed)[:n]}
  sides: tuple[list[Example], list[Example]] = ([], [])
  for key, example in zip(keys, examples):
    sides[key in held_out].append(example)
  return sides


def pack(lengths: Sequence[int], seq_len: int, order: Sequence[int]) -> list[list[int]]:
  """First-fit of the examples `order`, one after the other, into rows of at most `seq_len` tokens.

  Returns:
    Example indices of each row, in the order in which rows were opened.

  Raises:
    ValueError: an example without tokens or with more than `seq_len`.
  """
  rows: list[list[int]] = []
  room: dict[int, int] = {}  # Of the open rows, oldest first.
  for i in order:
    if not 0 < lengths[i] <= seq_len:
      raise ValueError(f"example {i}: {lengths[i]} tokens, allowed are 1 to {seq_len} (seq_len)")
    row = next((row for row, left in room.items() if left >= lengths[i]), None)
    if row is None:
      if len(room) == OPEN_ROWS:
        del room[next(iter(room))]
      row = len(rows)
      rows.append([])
      room[row] = seq_len
    rows[row].append(i)
    room[row] -= lengths[i]
  return rows


def collate(
    examples: Sequence[Example],
    packed: Sequence[Sequence[int]],
    seq_len: int,
    pad_id: int,
    classes: Int32[np.ndarray, " V"] | None = None,
    ngram_order: int = 0,
) -> Batch:
  """Batch [len(packed), seq_len] of packed example indices; an empty row is all padding.

  Args:
    examples: what the indices mean.
    packed: example indices of each row, as from `pack`.
    seq_len: tokens of a row.
    pad_id: token at padding.
    classes: Engram classes of the vocabulary (`tokenizer.token_classes`), for `ngram_order` > 0.
    ngram_order: columns of `Batch.ngrams`; 0 for a model without Engram.
  """
  shape = (len(packed), seq_len)
  segments = np.zeros(shape, np.int32)
  tokens, targets = np.full(shape, pad_id, np.int32), np.full(shape, pad_id, np.int32)
  weights = np.zeros(shape, np.float32)
  ngrams = None
  if ngram_order:
    ngrams = np.full((*shape, ngram_order), classes[pad_id], np.int32)
    ngrams[..., 0] = -1
  for row, ids in enumerate(packed):
    start = 0
    for segment, i in enumerate(ids, 1):
      example = examples[i]
      end = start + len(example.tokens)
      tokens[row, start:end] = example.tokens
      segments[row, start:end] = segment
      targets[row, start : end - 1] = example.tokens[1:]
      weights[row, start : end - 1] = example.loss[1:]
      if ngrams is not None:
        own = tok.classes_of(example.tokens, classes)
        ngrams[row, start:end] = tok.ngrams(own, classes[pad_id], ngram_order)
      start = end
  return Batch(tokens, Rows.of_segments(segments), ngrams, targets, weights)


class Pipeline(grain.IterDataset):
  """Endless `PackedBatch`es [accumulation, batch_size, seq_len] of examples packed anew each epoch.

  Rows depend on (examples, seed, epoch) alone; every example is in one row of each epoch. A batch
  takes the next rows, across epoch borders. Every host builds the same batches.
  """

  def __init__(
      self,
      examples: Sequence[Example],
      tokenizer: tok.Tokenizer,
      *,
      seq_len: int,
      batch_size: int,
      accumulation: int = 1,
      seed: int = 0,
      ngram_order: int = 0,
  ):
    """Checks the examples and packs the first epoch.

    Args:
      examples: at least one, of at most `seq_len` tokens.
      tokenizer: gives vocabulary, pad id and Engram classes.
      seq_len: tokens of a row.
      batch_size: rows of a micro-batch.
      accumulation: micro-batches of a batch.
      seed: of the shuffle, 0 or more.
      ngram_order: columns of `Batch.ngrams`; 0 for a model without Engram.

    Raises:
      ValueError: a size below its minimum, or an unfit example, named by its index.
    """
    super().__init__()
    sizes = {"examples": (len(examples), 1), "batch_size": (batch_size, 1), "seed": (seed, 0)}
    sizes |= {"accumulation": (accumulation, 1), "ngram_order": (ngram_order, 0)}
    for name, (value, least) in sizes.items():
      if value < least:
        raise ValueError(f"{name}: {value}, expected {least} or more")
    digest = hashlib.sha256(f"{seq_len} {seed}".encode())
    for i, example in enumerate(examples):
      try:
        tok.checked_ids(example.tokens, tokenizer.vocab_size)
      except ValueError as error:
        raise ValueError(f"example {i}: {error}") from error
      digest.update(example.tokens.tobytes() + example.loss.tobytes())
    self._data = digest.hexdigest()[:16]
    self._shape = (accumulation, batch_size, seq_len)
    classes = tok.token_classes(tokenizer) if ngram_order else None
    self._collate = functools.partial(
        collate,
        examples,
        seq_len=seq_len,
        pad_id=tokenizer.pad_id,
        classes=classes,
        ngram_order=ngram_order,
    )
    lengths = [len(example.tokens) for example in examples]
    # A batch can span two epochs.
    self.epoch = functools.lru_cache(maxsize=2)(
        lambda epoch: pack(lengths, seq_len, _shuffled(len(lengths), seed, epoch))
    )
    self._starts = [0, len(self.epoch(0))]  # First row of each epoch seen so far.

  def _row(self, row: int) -> list[int]:
    while row >= self._starts[-1]:
      self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1)))
    epoch = bisect.bisect_right(self._starts, row) - 1
    return self.epoch(epoch)[row - self._starts[epoch]]

  def batch_at(self, row: int) -> PackedBatch:
    """The batch that begins at `row`, counted from the first row of epoch 0."""
    accumulation, batch_size, _ = self._shape
    packed = [self._row(row + i) for i in range(accumulation * batch_size)]
    split_rows = lambda x: x.reshape(*self._shape[:2], *x.shape[1:])
    batch = jax.tree.map(split_rows, self._collate(packed=packed))
    return PackedBatch(batch, [i for ids in packed for i in ids])

  def __iter__(self) -> "BatchIterator":
    return BatchIterator(self, self._data, self._shape[0] * self._shape[1])


class BatchIterator(grain.DatasetIterator):
  """Batches of a `Pipeline`. Its state is the next row, so it outlives another batch size."""

  def __init__(self, pipeline: Pipeline, data: str, stride: int):
    super().__init__()
    self._pipeline, self._data, self._stride = pipeline, data, stride
    self._row = 0

  def __next__(self) -> PackedBatch:
    batch = self._pipeline.batch_at(self._row)
    self._row += self._stride
    return batch

  def get_state(self) -> dict[str, Any]:
    """JSON-able: `row`, the next row, and `data`, a digest of examples, seq_len and seed."""
    return {"row": self._row, "data": self._data}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from `state`; a ValueError if it comes from other examples, seq_len or seed."""
    if state["data"] != self._data:
      raise ValueError(
          f"iterator state: data {state['data']} is not {self._data} of this pipeline; it must have"
          " the same examples, seq_len and seed"
      )
    self._row = int(state["row"])
