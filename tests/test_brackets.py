"""Laws of bracket texts: an independent reader of the tokens gives every answer."""

import numpy as np
import pytest

from deepseek_jax.eval.brackets import CLOSE, FILLERS, KINDS, OPENERS, Task, conversation, prompts

TASKS = (
    Task(64), Task(32, depth=1), Task(96, depth=6, filler=(0.0, 0.0)),
    Task(48, filler=(0.9, 0.9)),
)  # fmt: skip


def answers(tokens):
  """Value of every answer by place, and places of what is open at the end."""
  stack, found, i = [], {}, 0
  while i < len(tokens):
    if OPENERS[0] <= tokens[i] < OPENERS[1]:
      stack.append(i)
    elif tokens[i] == CLOSE:
      found[i + 1] = tokens[stack.pop()] - OPENERS[0] + KINDS[0]
      i += 1
    else:
      assert FILLERS[0] <= tokens[i] < FILLERS[1]
    i += 1
  return found, stack


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_of_the_newest_open_bracket(task):
  rng = np.random.default_rng(0)
  for _ in range(30):
    example = conversation(rng, task, 5, (1, 12))
    found, _ = answers(example.tokens)
    assert all(example.tokens[i] == value for i, value in found.items())
    at = np.flatnonzero(example.loss)
    assert len(at) == 5
    assert set(at) <= set(found)
    assert at[0] > task.length
    assert at[-1] == len(example.tokens) - 1


@pytest.mark.parametrize("task", TASKS)
def test_without_questions_every_answer_counts(task):
  rng, deepest = np.random.default_rng(1), 0
  for _ in range(30):
    example = conversation(rng, task, 0, (1, 1))
    assert len(example.tokens) == task.length
    found, stack = answers(example.tokens)
    assert list(found) == list(np.flatnonzero(example.loss))
    deepest = max(deepest, len(stack))
  assert deepest == task.depth or task.filler == (0.9, 0.9)


@pytest.mark.parametrize("span", [(1, 8), (8, 16), (16, 65)])
@pytest.mark.parametrize("distance", [1, 2, 9])
def test_prompts_ask_for_a_bracket_of_their_span(span, distance):
  task = Task(64, filler=(0.7, 0.7))
  found = prompts(np.random.default_rng(2), task, 20, distance, span)
  assert found.beginnings.shape == (20, 64)
  assert found.rests.shape == (20, 1, distance)
  for start, rest, answer, own in zip(*found):
    assert rest[0, -1] == CLOSE
    text = np.concatenate([start, rest[0], answer])
    read, _ = answers(text)
    assert read[64 + distance] == answer[0]
    _, stack = answers(text[:-2])
    assert 64 - stack[-1] == own[0]
    assert span[0] <= own[0] < span[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(length=3), "length is 3; it must be at least 4"),
        (dict(depth=0), "depth is 0; it must be at least 1"),
        (dict(filler=(0.5, 0.4)), "filler is"),
        (dict(filler=(0.5, 1.0)), "below 1"),
    ],
)
def test_tasks_that_cannot_be_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Task(**{"length": 64} | changes)
