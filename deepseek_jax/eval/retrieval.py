"""Buried facts: a long beginning with pairs of key and value, and questions for some of them.

Ids are of disjoint ranges, so a model learns the task and nothing else. A fact is `FACT key value`,
a question `ASK key`, whose next token is the answer; all other tokens are filler drawn at random.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from deepseek_jax.fields import require
from deepseek_jax.train.conversations import Example

PAD, FACT, ASK = 0, 1, 2
FILLERS, KEYS, VALUES = (4, 32), (32, 80), (80, 128)
VOCABULARY = VALUES[1]


@dataclasses.dataclass(frozen=True)
class Task:
  """How documents are made.

  Attributes:
    length: tokens of a beginning.
    facts: pairs in it, of different keys.
    aligned: keys stand at even positions, so that a group of two holds key and value and the
      compressor alone can bind them. Without, they stand at odd ones: only a window reaches from
      the value to its key.
    nearest, farthest: facts begin so many tokens before the end at least and at most; 0 is the
      whole beginning.
  """

  length: int
  facts: int
  aligned: bool = True
  nearest: int = 0
  farthest: int = 0

  def __post_init__(self):
    require(1 <= self.facts <= KEYS[1] - KEYS[0], "facts", self.facts, "1 to 48")
    room = (self.farthest or self.length) - self.nearest
    require(
        0 <= self.nearest and 4 * self.facts <= room <= self.length, "facts", self.facts,
        f"at most a quarter of the {room} tokens that facts may stand in",
    )  # fmt: skip


class Beginning(NamedTuple):
  """Tokens [length], and place, key and value of every fact in order of place."""

  tokens: np.ndarray
  places: np.ndarray
  keys: np.ndarray
  values: np.ndarray


def beginning(rng: np.random.Generator, task: Task) -> Beginning:
  """A document before any question."""
  tokens = rng.integers(*FILLERS, task.length).astype(np.int32)
  first = task.length - (task.farthest or task.length)
  # In steps of two tokens; a fact takes two steps. `FACT` stands before the key.
  odd = 1 if task.aligned else 0
  first += (first + odd) % 2
  steps = (task.length - task.nearest - first) // 2 - 2 * task.facts
  starts = np.sort(rng.integers(0, steps + 1, task.facts)) + 2 * np.arange(task.facts)
  places = first + 2 * starts
  keys = rng.permutation(np.arange(*KEYS))[: task.facts].astype(np.int32)
  values = rng.integers(*VALUES, task.facts).astype(np.int32)
  tokens[places], tokens[places + 1], tokens[places + 2] = FACT, keys, values
  return Beginning(tokens, places, keys, values)


def question(rng: np.random.Generator, key: int, distance: int) -> np.ndarray:
  """A question whose last token stands `distance` tokens after the beginning, at least 2."""
  filler = rng.integers(*FILLERS, distance - 2)
  return np.concatenate([filler, [ASK, key]]).astype(np.int32)


def conversation(
    rng: np.random.Generator, task: Task, questions: int, distances: tuple[int, int]
) -> Example:
  """A beginning and questions for its facts, each a turn of one token.

  Args:
    rng: of the document.
    task: what is buried.
    questions: turns.
    distances: least and most tokens of a question, filler before it included.
  """
  start = beginning(rng, task)
  parts, losses = [start.tokens], [np.zeros(task.length, bool)]
  for fact in rng.integers(task.facts, size=questions):
    ask = question(rng, start.keys[fact], int(rng.integers(distances[0], distances[1] + 1)))
    parts += [ask, start.values[fact : fact + 1]]
    losses += [np.zeros(len(ask), bool), np.ones(1, bool)]
  return Example(np.concatenate(parts), np.concatenate(losses))
