"""Prompts for rollouts: of conversations, or of tasks whose answers can be checked."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from deepseek_jax.config import RolloutConfig
from deepseek_jax.serve.generate import user_turn
from deepseek_jax.tokenizer import Tokenizer
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.turns import turns_of


class Prompt(NamedTuple):
  """What is to be answered.

  Attributes:
    tokens: of the conversation up to where the response begins.
    before: where the turn before ended; 0 for the first.
    answer: what is right, or None where nothing is.
    effort: level b that the prompt asks for, or None.
  """

  tokens: np.ndarray
  before: int
  answer: str | None
  effort: int | None = None


_FACTS = 8


def retrieval(rng: np.random.Generator) -> tuple[list[str], str]:
  """Facts in one turn, the question for one of them in the next."""
  names = rng.permutation(26)[:_FACTS]
  values = rng.integers(10, 100, _FACTS)
  facts = " ".join(f"{chr(97 + n)}={v}" for n, v in zip(names, values))
  asked = int(rng.integers(_FACTS))
  return [facts, f"{chr(97 + names[asked])}?"], str(values[asked])


def arithmetic(rng: np.random.Generator) -> tuple[list[str], str]:
  """A sum of two numbers below 50."""
  a, b = rng.integers(0, 50, 2)
  return [f"{a}+{b}="], str(a + b)


_TASKS = dict(retrieval=retrieval, arithmetic=arithmetic)
# What the assistant said in the turns before the one that is asked for.
_SEEN = "ok"


def task_prompt(
    tokenizer: Tokenizer, task: str, rng: np.random.Generator, effort: int | None = None
) -> Prompt:
  """One prompt of a task; a level of effort stands before its last message."""
  texts, answer = _TASKS[task](rng)
  if effort is not None:
    texts[-1] = f"[{effort}] {texts[-1]}"
  tokens, before = [], 0
  for i, text in enumerate(texts):
    tokens += user_turn(tokenizer, text, first=not i)
    if i + 1 < len(texts):
      tokens += [*tokenizer.encode(_SEEN), tokenizer.eos_id]
      before = len(tokens)
  return Prompt(np.array(tokens, np.int32), before, answer, effort)


def data_prompts(examples: Sequence[Example], prompt_len: int) -> list[Prompt]:
  """All turns of conversations whose prompts are short enough.

  Raises:
    ValueError: there is none.
  """
  found = []
  for example in examples:
    before = 0
    for turn in turns_of(example):
      if 0 < turn.prompt <= prompt_len:
        found.append(Prompt(example.tokens[: turn.prompt], before, None))
      before = turn.end
  if not found:
    raise ValueError(f"train.rollout.prompt_len is {prompt_len}; no prompt of the data is as short")
  return found


def exact_match(response: str, answer: str) -> float:
  """1 for the answer and nothing else."""
  return float(response == answer)


def length_penalty(rollout: RolloutConfig, length: int, effort: int | None) -> float:
  """What a response of `length` tokens loses: the less, the more effort was asked for (spec 14)."""
  k = rollout.penalty
  if effort is not None:
    k *= np.exp(-(effort - min(rollout.efforts)) / rollout.penalty_decay)
  return float(min(rollout.penalty_max, k * length / rollout.max_new_tokens))


def advantages(
    rollout: RolloutConfig, responses: Sequence[str], lengths: Sequence[int],
    prompts: Sequence[Prompt], reward: Callable[[str, str], float] = exact_match,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
  """Rewards, and by how much each exceeds the mean of its group; groups are consecutive.

  Raises:
    ValueError: a reward that is not finite.
  """
  rewards = np.array([
      reward(text, prompt.answer) - length_penalty(rollout, n, prompt.effort)
      for text, n, prompt in zip(responses, lengths, prompts, strict=True)
  ])  # fmt: skip
  if not np.isfinite(rewards).all():
    i = int(np.flatnonzero(~np.isfinite(rewards))[0])
    raise ValueError(f"the reward of response {i} is {rewards[i]}; rewards must be finite")
  grouped = rewards.reshape(-1, rollout.group)
  centred = grouped - grouped.mean(axis=1, keepdims=True)
  return rewards.astype(np.float32), centred.reshape(-1).astype(np.float32)
