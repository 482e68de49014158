"""Buried facts and registers: long beginnings, and questions about them after their end.

Ids are of disjoint ranges, so a model learns the task and nothing else; what is neither fact nor
register is filler drawn at random. A fact is `FACT key value`, its question `ASK key`: global
entries answer it from anywhere. A register is `SET value`, again and again; its question `GET` is
for the newest one, which windows carry along as they go, further than they reach.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from deepseek_jax.fields import require
from deepseek_jax.train.conversations import Example

PAD, FACT, ASK, SET, GET = range(5)
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
    nearest, farthest: facts begin so many tokens before the end at least and at most; 0 is the
      whole beginning.
    gaps: least and most tokens from one register to the next, and from the last one to the end.
      None: there are none.
  """

  length: int
  facts: int = 0
  aligned: bool = True
  nearest: int = 0
  farthest: int = 0
  gaps: tuple[int, int] | None = None

  def __post_init__(self):
    require(0 <= self.facts <= KEYS[1] - KEYS[0], "facts", self.facts, "0 to 48")
    require(self.facts > 0 or self.gaps is not None, "facts", 0, "at least 1 without registers")
    room = (self.farthest or self.length) - self.nearest
    require(
        0 <= self.nearest and 4 * self.facts <= room <= self.length, "facts", self.facts,
        f"at most a quarter of the {room} tokens that facts may stand in",
    )  # fmt: skip
    if self.gaps is not None:
      least, most = self.gaps
      require(2 <= least <= most < self.length, "gaps", self.gaps, f"2 to {self.length - 1}")


class Beginning(NamedTuple):
  """A document before any question.

  Attributes:
    tokens: [length].
    places, keys, values: of every fact in order of place.
    register: value of the newest register, −1 for none.
    set_at: its place.
  """

  tokens: np.ndarray
  places: np.ndarray
  keys: np.ndarray
  values: np.ndarray
  register: int
  set_at: int


def beginning(rng: np.random.Generator, task: Task) -> Beginning:
  """A document of the task; a register that would cut a fact is left out."""
  tokens = rng.integers(*FILLERS, task.length).astype(np.int32)
  first = task.length - (task.farthest or task.length)
  # In steps of two tokens; a fact takes two steps. `FACT` stands before the key.
  first += (first + task.aligned) % 2
  steps = (task.length - task.nearest - first) // 2 - 2 * task.facts
  starts = np.sort(rng.integers(0, steps + 1, task.facts)) + 2 * np.arange(task.facts)
  places = first + 2 * starts
  keys = rng.permutation(np.arange(*KEYS))[: task.facts].astype(np.int32)
  values = rng.integers(*VALUES, task.facts).astype(np.int32)
  tokens[places], tokens[places + 1], tokens[places + 2] = FACT, keys, values
  register, set_at = -1, -1
  if task.gaps is not None:
    taken = np.zeros(task.length + 2, bool)
    for i in range(3):
      taken[places + i] = True
    at = task.length
    while (at := at - int(rng.integers(task.gaps[0], task.gaps[1] + 1))) >= 0:
      if taken[at : at + 2].any():
        continue
      value = int(rng.integers(*VALUES))
      tokens[at], tokens[at + 1] = SET, value
      if register < 0:
        register, set_at = value, at
  return Beginning(tokens, places, keys, values, register, set_at)


def question(rng: np.random.Generator, key: int | None, distance: int) -> np.ndarray:
  """A question whose last token stands `distance` tokens after the beginning.

  Args:
    rng: of the filler.
    key: of a fact; None asks for the register.
    distance: at least 2 for a fact, 1 for the register.
  """
  ask = [GET] if key is None else [ASK, key]
  filler = rng.integers(*FILLERS, distance - len(ask))
  return np.concatenate([filler, ask]).astype(np.int32)


def conversation(
    rng: np.random.Generator, task: Task, questions: int, distances: tuple[int, int]
) -> Example:
  """A beginning and questions about it, each a turn of one token.

  Before every second question for the register, in the mean, its filler sets it anew.

  Args:
    rng: of the document.
    task: what is in it; with facts and registers, half of the questions are for each.
    questions: turns.
    distances: least and most tokens of a question, filler before it included.
  """
  start = beginning(rng, task)
  register = start.register
  parts, losses = [start.tokens], [np.zeros(task.length, bool)]
  for _ in range(questions):
    distance = int(rng.integers(distances[0], distances[1] + 1))
    if task.facts and (register < 0 or rng.integers(2)):
      fact = int(rng.integers(task.facts))
      ask, answer = question(rng, start.keys[fact], distance), start.values[fact]
    else:
      ask = question(rng, None, distance)
      if distance > 2 and rng.integers(2):
        at, register = int(rng.integers(distance - 2)), int(rng.integers(*VALUES))
        ask[at : at + 2] = SET, register
      answer = register
    parts += [ask, np.array([answer], np.int32)]
    losses += [np.zeros(len(ask), bool), np.ones(1, bool)]
  return Example(np.concatenate(parts), np.concatenate(losses))
