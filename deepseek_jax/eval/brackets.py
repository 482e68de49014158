"""Brackets: texts in which only what was carried along tells what comes next.

Brackets of sixteen kinds open between filler; `CLOSE` asks for the kind of the newest one that is
still open, and closes it. No entry of an opener says whether it has been closed since, so the
answer takes the depth at every token: a sum over all before it, which windows hand on from row to
row. A resumption that forgets what windows carried forgets the depth.
"""

import dataclasses

import numpy as np

from deepseek_jax.eval.resume import Prompts
from deepseek_jax.fields import require
from deepseek_jax.train.conversations import Example

CLOSE = 1  # 0 is padding, as of `retrieval`.
FILLERS, OPENERS, KINDS = (2, 32), (32, 48), (48, 64)


@dataclasses.dataclass(frozen=True)
class Task:
  """How documents are made.

  Attributes:
    length: tokens of a beginning.
    depth: brackets that are open at once, at most.
    filler: least and most share of filler; drawn for every document.
  """

  length: int
  depth: int = 4
  filler: tuple[float, float] = (0.3, 0.8)

  def __post_init__(self):
    require(self.length >= 4, "length", self.length, "at least 4")
    require(self.depth >= 1, "depth", self.depth, "at least 1")
    least, most = self.filler
    require(0 <= least <= most < 1, "filler", self.filler, "rising, from 0 to below 1")


class _Text:
  """A document as it is written; `open` has kind and place of every open bracket."""

  def __init__(self, rng: np.random.Generator, task: Task):
    self.rng, self.task = rng, task
    self.filler = rng.uniform(*task.filler)
    self.tokens: list[int] = []
    self.answers: list[int] = []
    self.open: list[tuple[int, int]] = []

  def begin(self) -> None:
    kind = int(self.rng.integers(OPENERS[1] - OPENERS[0]))
    self.open.append((kind, len(self.tokens)))
    self.tokens.append(OPENERS[0] + kind)

  def close(self) -> None:
    kind, _ = self.open.pop()
    self.answers.append(len(self.tokens) + 1)
    self.tokens += [CLOSE, KINDS[0] + kind]

  def write(self, count: int) -> None:
    """So many tokens more; a `CLOSE` and its answer stay together."""
    end = len(self.tokens) + count
    while (room := end - len(self.tokens)) > 0:
      full = len(self.open) == self.task.depth
      if self.rng.random() >= self.filler:
        closes = bool(self.open) and (full or self.rng.integers(2))
        if closes and room >= 2:
          self.close()
          continue
        if not closes:
          self.begin()
          continue
      self.tokens.append(int(self.rng.integers(*FILLERS)))


def conversation(
    rng: np.random.Generator, task: Task, questions: int, distances: tuple[int, int]
) -> Example:
  """A beginning and the text that goes on, a turn of one token wherever a question asks.

  Args:
    rng: of the document.
    task: what is in it.
    questions: turns; with 0 every answer in the beginning counts instead.
    distances: least and most tokens of a question, its `CLOSE` included.
  """
  text = _Text(rng, task)
  text.write(task.length)
  counted = [] if questions else list(text.answers)
  for _ in range(questions):
    text.write(int(rng.integers(distances[0], distances[1] + 1)) - 1)
    if not text.open:
      text.begin()
    text.close()
    counted.append(text.answers[-1])
  tokens = np.array(text.tokens, np.int32)
  loss = np.zeros(len(tokens), bool)
  loss[counted] = True
  return Example(tokens, loss)


def prompts(
    rng: np.random.Generator, task: Task, count: int, distance: int, span: tuple[int, int]
) -> Prompts:
  """Prompts whose answer is a bracket that was opened in the beginning.

  Args:
    rng: of the documents.
    task: of the beginnings.
    count: of prompts, one of every beginning.
    distance: of the `CLOSE` after the beginning.
    span: tokens from the opener to the beginning's end: at least the first, less than the second.
  """
  found = []
  while len(found) < count:
    text = _Text(rng, task)
    text.write(task.length)
    text.write(distance - 1)
    if text.open:
      kind, place = text.open[-1]
      if span[0] <= task.length - place < span[1]:
        tokens = np.array([*text.tokens, CLOSE], np.int32)
        found.append((tokens, KINDS[0] + kind, task.length - place))
  tokens, answers, spans = (np.array(column) for column in zip(*found))
  n = task.length
  return Prompts(tokens[:, :n], tokens[:, None, n:], answers[:, None], spans[:, None])
