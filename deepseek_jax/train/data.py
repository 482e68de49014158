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

from deepseek_jax import sharding
from deepseek_jax import tokenizer as tok
from deepseek_jax.nn.rows import DecoderRows, Reads, Rows
from deepseek_jax.nn.transformer import Routes
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.turns import Views

# Rows that first-fit packing keeps open. More fill the rows better and cost a longer search.
OPEN_ROWS = 32


class Policy(NamedTuple):
  """What a rollout remembers of its responses.

  Attributes:
    logprobs: of the targets, under the policy that wrote them, in nats; 0 without a target.
    advantages: of the responses.
    routes: experts that the rows visited.
  """

  logprobs: Float32[np.ndarray, "*B D"]
  advantages: Float32[np.ndarray, "*B D"]
  routes: Routes


class Batch(NamedTuple):
  """Packed documents (spec section 11 for the windows). Padding has segment 0 and weight 0.

  Attributes:
    tokens: ids; the pad id at padding.
    rows: positions and segments; documents of a row are numbered from 1.
    ngrams: Engram windows of each document alone; None for a model without Engram.
    targets: next token of the same document, the pad id where there is none; of the rows that the
      decoder runs.
    weights: 1 where the target carries loss, else 0.
    decoder: rows that the decoder runs; None for all of the encoder's.
    policy: of a rollout.
  """

  tokens: Int32[np.ndarray, "*B T"]
  rows: Rows
  ngrams: Int32[np.ndarray, "*B T order"] | None
  targets: Int32[np.ndarray, "*B D"]
  weights: Float32[np.ndarray, "*B D"]
  decoder: DecoderRows | None = None
  policy: Policy | None = None


def batch_specs(batch: Batch, leading: int = 0) -> Batch:
  """PartitionSpecs of a batch, `leading` axes before the lines; experts lead with layers too."""
  specs = jax.tree.map(lambda _: sharding.batch_spec(leading), batch)
  if batch.policy is None:
    return specs
  routes = jax.tree.map(lambda _: sharding.batch_spec(leading + 1), batch.policy.routes)
  return specs._replace(policy=specs.policy._replace(routes=routes))


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


# What the counts of an example are of, and the field that bounds them.
_TOKENS = (("tokens", "seq_len"),)
_ROWS = ("rows of the encoder", "seq_len"), ("rows of the decoder", "replay.decoder_len")


def pack(
    lengths: Sequence[int] | Sequence[tuple[int, ...]], capacity: int | tuple[int, ...],
    order: Sequence[int],
) -> list[list[int]]:  # fmt: skip
  """First-fit of the examples `order`, one after the other, into rows of at most `capacity` tokens.

  Args:
    lengths: of the examples, or a tuple each of what has to fit at one time: tokens and rows of the
      decoder.
    capacity: of a row, likewise.
    order: example indices.

  Returns:
    Example indices of each row, in the order in which rows were opened.

  Raises:
    ValueError: an example without tokens or with more than fit.
  """
  whole = capacity if isinstance(capacity, tuple) else (capacity,)
  rows: list[list[int]] = []
  room: dict[int, tuple[int, ...]] = {}  # Of the open rows, oldest first.
  for i in order:
    counts = lengths[i] if isinstance(lengths[i], tuple) else (lengths[i],)
    check_fits(i, counts, whole)
    fits = lambda left, counts=counts: all(a <= b for a, b in zip(counts, left))
    row = next((row for row, left in room.items() if fits(left)), None)
    if row is None:
      if len(room) == OPEN_ROWS:
        del room[next(iter(room))]
      row = len(rows)
      rows.append([])
      room[row] = whole
    rows[row].append(i)
    room[row] = tuple(b - a for a, b in zip(counts, room[row]))
  return rows


def check_fits(i: int, counts: tuple[int, ...], capacity: tuple[int, ...]) -> None:
  """Raises a ValueError that names example i if it is empty or too long for a row."""
  names = _TOKENS if len(capacity) == 1 else _ROWS
  for count, most, (what, field) in zip(counts, capacity, names):
    if not 0 < count <= most:
      raise ValueError(f"example {i}: {count} {what}, allowed are 1 to {most} ({field})")


def _blank(shape: tuple[int, int], reads: bool) -> Rows:
  zeros = lambda dtype=np.int32: np.zeros(shape, dtype)
  more = Reads(*(zeros() for _ in Reads._fields)) if reads else None
  return Rows(zeros(), zeros(), zeros(), zeros(bool), more)


class _Line:
  """One line of a batch as examples fill it."""

  def __init__(self, rows: Rows, number: int):
    self.rows = jax.tree.map(lambda a: a[number], rows)  # views
    self.used = self.segments = 0

  def put(self, new: Rows, segments: int, start: int) -> slice:
    """Appends an example whose encoder rows stand behind `start` others in `segments` segments."""
    own = slice(self.used, self.used + len(new.positions))
    for mine, theirs in zip(self.rows[:4], new[:4]):
      mine[own] = theirs
    self.rows.segments[own] += self.segments
    if self.rows.reads is not None:
      mine, theirs = self.rows.reads, new.reads
      mine.own[own] = theirs.own + segments
      mine.base[own] = np.where(theirs.base > 0, theirs.base + segments, 0)
      mine.until[own], mine.first[own] = theirs.until, theirs.first + start
    self.used = own.stop
    self.segments += int(new.segments.max())
    return own


def collate(
    views: Views,
    packed: Sequence[Sequence[int]],
    seq_len: int,
    pad_id: int,
    classes: Int32[np.ndarray, " V"] | None = None,
    ngram_order: int = 0,
    *,
    epochs: Sequence[int] | None = None,
) -> Batch:
  """Batch [len(packed), seq_len] of packed example indices; an empty row is all padding.

  Args:
    views: rows of the examples.
    packed: example indices of each row, as from `pack`.
    seq_len: tokens of a row.
    pad_id: token at padding.
    classes: Engram classes of the vocabulary (`tokenizer.token_classes`), for `ngram_order` > 0.
    ngram_order: columns of `Batch.ngrams`; 0 for a model without Engram.
    epochs: of each row, for what is drawn; 0 if not given.
  """
  replay, lines = views.replay, len(packed)
  shape = below = lines, seq_len
  rows, decoder = _blank(shape, reads=bool(replay and replay.encoder)), None
  if replay is not None:
    below = lines, replay.decoder_len
    decoder = DecoderRows(np.zeros(below, np.int32), _blank(below, reads=True))
  tokens, targets = np.full(shape, pad_id, np.int32), np.full(below, pad_id, np.int32)
  weights = np.zeros(below, np.float32)
  ngrams = None
  if ngram_order:
    ngrams = np.full((*shape, ngram_order), classes[pad_id], np.int32)
    ngrams[..., 0] = -1
  for row, ids in enumerate(packed):
    line = _Line(rows, row)
    under = None if decoder is None else _Line(decoder.rows, row)
    for i in ids:
      example, one = views.examples[i], views.lines(i, epochs[row] if epochs else 0)
      before = line.segments, line.used
      own = mine = line.put(one.rows, *before)
      if decoder is not None:
        mine = under.put(one.decoder.rows, *before)
        decoder.source[row, mine] = one.decoder.source + own.start
      tokens[row, own] = example.tokens[one.source]
      targets[row, mine] = np.where(one.targets < 0, pad_id, one.targets)
      weights[row, mine] = one.weights
      if ngrams is not None:
        found = tok.ngrams(tok.classes_of(example.tokens, classes), classes[pad_id], ngram_order)
        ngrams[row, own] = found[one.source]
  return Batch(tokens, rows, ngrams, targets, weights, decoder)


class Pipeline(grain.IterDataset):
  """Endless `PackedBatch`es [accumulation, batch_size, seq_len] of examples packed anew each epoch.

  Rows depend on (views, epoch) alone; every example is in one row of each epoch. A batch
  takes the next rows, across epoch borders. Every host builds the same batches.
  """

  def __init__(
      self,
      views: Views,
      tokenizer: tok.Tokenizer,
      *,
      seq_len: int,
      batch_size: int,
      accumulation: int = 1,
      ngram_order: int = 0,
  ):
    """Checks the examples and packs the first epoch.

    Args:
      views: rows of at least one example, of at most `seq_len` tokens.
      tokenizer: gives vocabulary, pad id and Engram classes.
      seq_len: tokens of a row.
      batch_size: rows of a micro-batch.
      accumulation: micro-batches of a batch.
      ngram_order: columns of `Batch.ngrams`; 0 for a model without Engram.

    Raises:
      ValueError: a size below its minimum, or an unfit example, named by its index.
    """
    super().__init__()
    examples, seed = views.examples, views.seed
    sizes = {"examples": (len(examples), 1), "batch_size": (batch_size, 1), "seed": (seed, 0)}
    sizes |= {"accumulation": (accumulation, 1), "ngram_order": (ngram_order, 0)}
    for name, (value, least) in sizes.items():
      if value < least:
        raise ValueError(f"{name}: {value}, expected {least} or more")
    replay = "" if views.replay is None else f" {views.replay} {views.window} {views.multiple}"
    kind = f"{seq_len} {seed}{replay}"
    digest = hashlib.sha256(kind.encode())
    capacity = (seq_len,) if views.replay is None else (seq_len, views.replay.decoder_len)
    for i, example in enumerate(examples):
      try:
        tok.checked_ids(example.tokens, tokenizer.vocab_size)
      except ValueError as error:
        raise ValueError(f"example {i}: {error}") from error
      check_fits(i, views.most(i), capacity)
      digest.update(example.tokens.tobytes() + example.loss.tobytes())
    self._data = digest.hexdigest()[:16]
    self._shape = (accumulation, batch_size, seq_len)
    classes = tok.token_classes(tokenizer) if ngram_order else None
    self._collate = functools.partial(
        collate,
        views,
        seq_len=seq_len,
        pad_id=tokenizer.pad_id,
        classes=classes,
        ngram_order=ngram_order,
    )

    def packed(epoch: int) -> list[list[int]]:
      counts = [views.counts(i, epoch) for i in range(len(examples))]
      return pack(counts, capacity, _shuffled(len(counts), seed, epoch))

    # A batch can span two epochs.
    self.epoch = functools.lru_cache(maxsize=2)(packed)
    self._starts = [0, len(self.epoch(0))]  # First row of each epoch seen so far.

  def _row(self, row: int) -> tuple[int, list[int]]:
    while row >= self._starts[-1]:
      self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1)))
    epoch = bisect.bisect_right(self._starts, row) - 1
    return epoch, self.epoch(epoch)[row - self._starts[epoch]]

  def batch_at(self, row: int) -> PackedBatch:
    """The batch that begins at `row`, counted from the first row of epoch 0."""
    accumulation, batch_size, _ = self._shape
    epochs, packed = zip(*(self._row(row + i) for i in range(accumulation * batch_size)))
    split_rows = lambda x: x.reshape(*self._shape[:2], *x.shape[1:])
    batch = jax.tree.map(split_rows, self._collate(packed=packed, epochs=epochs))
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
