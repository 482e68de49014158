"""Laws of the experiment's documents: an independent reader of the tokens gives every answer."""

import numpy as np
import pytest

from deepseek_jax.eval.retrieval import (
    ASK,
    FACT,
    GET,
    SET,
    VALUES,
    VOCABULARY,
    Task,
    beginning,
    conversation,
    question,
)

TASKS = (
    Task(64, 4), Task(64, 4, aligned=False), Task(96, 5, nearest=10, farthest=60),
    Task(48, gaps=(2, 30)), Task(128, 8, gaps=(5, 40)),
)  # fmt: skip


def answers(tokens):
  """Place and value of every answer, read from left to right."""
  facts, register, found, i = {}, None, {}, 0
  while i < len(tokens):
    if tokens[i] == FACT:
      facts[tokens[i + 1]] = tokens[i + 2]
      i += 2
    elif tokens[i] == SET:
      register = tokens[i + 1]
      i += 1
    elif tokens[i] == ASK:
      found[i + 2] = facts[tokens[i + 1]]
      i += 2
    elif tokens[i] == GET:
      found[i + 1] = register
      i += 1
    i += 1
  return found


@pytest.mark.parametrize("task", TASKS)
def test_every_question_has_the_answer_that_stands_in_the_document(task):
  rng = np.random.default_rng(0)
  for _ in range(30):
    example = conversation(rng, task, 5, (2, 20))
    expected = answers(example.tokens)
    assert expected == {i: example.tokens[i] for i in np.flatnonzero(example.loss)}
    assert len(expected) == 5
    assert example.tokens.max() < VOCABULARY
    assert all(VALUES[0] <= value < VALUES[1] for value in expected.values())


@pytest.mark.parametrize("task", TASKS)
def test_facts_stand_where_the_task_says(task):
  rng = np.random.default_rng(1)
  seen = set()
  for _ in range(200):
    one = beginning(rng, task)
    assert len(one.tokens) == task.length
    assert len(set(one.keys)) == task.facts
    assert ((one.places + 1) % 2 == (0 if task.aligned else 1)).all()
    assert (np.diff(one.places) >= 4).all()
    before_end = task.length - one.places
    assert (before_end <= (task.farthest or task.length)).all()
    assert (before_end - 3 >= task.nearest).all()
    seen.update(one.places)
  reach = (task.farthest or task.length) - task.nearest
  assert len(seen) >= min(task.facts, 1) * 0.8 * (reach / 2 - 2)


def test_the_newest_register_and_its_place():
  rng, task = np.random.default_rng(2), Task(64, gaps=(3, 40))
  distances = set()
  for _ in range(300):
    one = beginning(rng, task)
    places = np.flatnonzero(one.tokens == SET)
    assert one.set_at == places[-1]
    assert one.register == one.tokens[places[-1] + 1]
    distances.add(task.length - one.set_at)
  assert distances == set(range(3, 41))


@pytest.mark.parametrize("distance", [2, 3, 9])
def test_a_question_ends_at_its_distance(distance):
  rng = np.random.default_rng(3)
  ask, get = question(rng, 40, distance), question(rng, None, distance)
  assert len(ask) == len(get) == distance
  assert list(ask[-2:]) == [ASK, 40]
  assert get[-1] == GET


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(facts=0), "facts is 0; it must be at least 1 without registers"),
        (dict(facts=49), "0 to 48"),
        (dict(facts=17), "at most a quarter of the 64 tokens"),
        (dict(facts=4, farthest=12), "at most a quarter of the 12 tokens"),
        (dict(gaps=(1, 4)), "gaps is"),
        (dict(gaps=(4, 64)), "2 to 63"),
    ],
)
def test_tasks_that_cannot_be_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Task(64, **changes)
