"""Laws of the experiment's documents: an independent reader of the tokens gives every answer."""

import numpy as np
import pytest

from deepseek_jax.eval.retrieval import (
    ASK,
    FACT,
    VALUES,
    VOCABULARY,
    Task,
    beginning,
    conversation,
    prompts,
    question,
)

TASKS = (Task(64, 4), Task(64, 4, aligned=False), Task(96, 5, farthest=60))


def answers(tokens):
  """Place and value of every answer, read from left to right."""
  facts, found, i = {}, {}, 0
  while i < len(tokens):
    if tokens[i] == FACT:
      facts[tokens[i + 1]] = tokens[i + 2]
      i += 2
    elif tokens[i] == ASK:
      found[i + 2] = facts[tokens[i + 1]]
      i += 2
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
    assert (task.length - one.places <= (task.farthest or task.length)).all()
    seen.update(one.places)
  assert len(seen) >= 0.8 * ((task.farthest or task.length) / 2 - 2)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_asked_for_facts_at_their_spans(task):
  found = prompts(np.random.default_rng(2), task, 10, 5, questions=4)
  assert found.beginnings.shape == (3, task.length)
  assert found.rests.shape == (3, 4, 5)
  for p, start in enumerate(found.beginnings):
    for q, rest in enumerate(found.rests[p]):
      place = task.length - found.spans[p, q]
      answer = found.answers[p, q]
      assert list(start[place : place + 3]) == [FACT, rest[-1], answer]
      assert answers(np.array([*start, *rest, answer]))[task.length + 5] == answer


@pytest.mark.parametrize("distance", [2, 3, 9])
def test_a_question_ends_at_its_distance(distance):
  rng = np.random.default_rng(3)
  ask = question(rng, 40, distance)
  assert len(ask) == distance
  assert list(ask[-2:]) == [ASK, 40]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(facts=0), "facts is 0; it must be 1 to 48"),
        (dict(facts=49), "1 to 48"),
        (dict(facts=17), "at most a quarter of the 64 tokens"),
        (dict(facts=4, farthest=12), "at most a quarter of the 12 tokens"),
        (dict(facts=4, farthest=65), "at most a quarter of the 65 tokens"),
    ],
)
def test_tasks_that_cannot_be_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Task(64, **changes)
