"""Buried facts: long beginnings, and questions about them after their end.

Ids are of disjoint ranges, so a model learns the task and nothing else; what is no fact is filler
drawn at random. A fact is `FACT key value`, its question `ASK key`: global entries answer it from
anywhere.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from deepseek_jax.eval.resume import Prompts
from deepseek_jax.fields import require
from deepseek_jax.train.conversations import Example

PAD, FACT, ASK = range(3)
FILLERS, KEYS, VALUES = (5, 32), (32, 80), (80, 128)
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
    farthest: facts begin so many tokens before the end at most; 0 is the whole beginning.
  """

  length: int
  facts: int
  aligned: bool = True
  farthest: int = 0

  def __post_init__(self):
    require(0 < self.facts <= KEYS[1] - KEYS[0], "facts", self.facts, "1 to 48")
    room = self.farthest or self.length
    require(
        4 * self.facts <= room <= self.length, "facts", self.facts,
        f"at most a quarter of the {room} tokens that facts may stand in",
    )  # fmt: skip


class Beginning(NamedTuple):
  """A document before any question.

  Attributes:
    tokens: [length].
    places, keys, values: of every fact in order of place.
  """

  tokens: np.ndarray
  places: np.ndarray
  keys: np.ndarray
  values: np.ndarray


def beginning(rng: np.random.Generator, task: Task) -> Beginning:
  """A document of the task."""
  tokens = rng.integers(*FILLERS, task.length).astype(np.int32)
  first = task.length - (task.farthest or task.length)
  # In steps of two tokens; a fact takes two steps. `FACT` stands before the key.
  first += (first + task.aligned) % 2
  steps = (task.length - first) // 2 - 2 * task.facts
  starts = np.sort(rng.integers(0, steps + 1, task.facts)) + 2 * np.arange(task.facts)
  places = first + 2 * starts
  keys = rng.permutation(np.arange(*KEYS))[: task.facts].astype(np.int32)
  values = rng.integers(*VALUES, task.facts).astype(np.int32)
  tokens[places], tokens[places + 1], tokens[places + 2] = FACT, keys, values
  return Beginning(tokens, places, keys, values)


def question(rng: np.random.Generator, key: int, distance: int) -> np.ndarray:
  """A question for a fact, whose last token stands `distance` >= 2 tokens after the beginning."""
  filler = rng.integers(*FILLERS, distance - 2)
  return np.concatenate([filler, [ASK, key]]).astype(np.int32)


def conversation(
    rng: np.random.Generator, task: Task, questions: int, distances: tuple[int, int]
) -> Example:
  """A beginning and questions about it, each a turn of one token.

  Args:
    rng: of the document.
    task: what is in it.
    questions: turns.
    distances: least and most tokens of a question, filler before it included.
  """
  start = beginning(rng, task)
  parts, losses = [start.tokens], [np.zeros(task.length, bool)]
  for _ in range(questions):
    distance = int(rng.integers(distances[0], distances[1] + 1))
    fact = int(rng.integers(task.facts))
    ask = question(rng, start.keys[fact], distance)
    parts += [ask, start.values[fact : fact + 1]]
    losses += [np.zeros(len(ask), bool), np.ones(1, bool)]
  return Example(np.concatenate(parts), np.concatenate(losses))


def prompts(
    rng: np.random.Generator, task: Task, count: int, distance: int, questions: int = 8
) -> Prompts:
  """Prompts about facts at evenly spaced ranks.

  Args:
    rng: of the documents.
    task: of the beginnings.
    count: of prompts, rounded up to whole beginnings.
    distance: of the key after the beginning.
    questions: prompts of a beginning.
  """
  asked = np.linspace(0, task.facts - 1, questions).round().astype(int)
  starts = [beginning(rng, task) for _ in range(-(-count // questions))]
  rests = [[question(rng, key, distance) for key in one.keys[asked]] for one in starts]
  return Prompts(
      np.stack([one.tokens for one in starts]),
      np.array(rests),
      np.stack([one.values[asked] for one in starts]),
      np.stack([task.length - one.places[asked] for one in starts]),
  )
