"""Laws of prompts and rewards: answers are right, groups are centred, longer costs more."""

import re

import numpy as np
import pytest

from deepseek_jax.config import RolloutConfig
from deepseek_jax.serve.generate import user_turn
from deepseek_jax.tokenizer import ByteTokenizer
from deepseek_jax.train import tasks
from deepseek_jax.train.conversations import encode_conversation
from tests.train.talks import conversation

BYTES = ByteTokenizer()


def rng(seed):
  return np.random.Generator(np.random.PCG64(seed))


def grpo(**how):
  return RolloutConfig(objective="grpo", prompts="arithmetic", **{"group": 4} | how)


class TestAnswersAreRight:

  @pytest.mark.parametrize("seed", range(50))
  def test_a_sum(self, seed):
    (text,), answer = tasks.arithmetic(rng(seed))
    a, b = map(int, re.fullmatch(r"(\d+)\+(\d+)=", text).groups())
    assert answer == str(a + b)
    assert max(a, b) < 50

  @pytest.mark.parametrize("seed", range(50))
  def test_a_fact_is_given_once_in_the_turn_before(self, seed):
    (facts, question), answer = tasks.retrieval(rng(seed))
    told = [fact.split("=") for fact in facts.split(" ")]
    assert len({name for name, _ in told}) == len(told) == 8
    assert [value for name, value in told if name == question.removesuffix("?")] == [answer]

  def test_every_fact_is_asked_for(self):
    asked = set()
    for seed in range(100):
      (facts, question), _ = tasks.retrieval(rng(seed))
      asked.add(facts.index(question[0]) // 5)
    assert asked == set(range(8))


class TestPrompts:

  def test_a_prompt_is_a_conversation_as_trained_on_up_to_its_last_response(self):
    prompt = tasks.task_prompt(BYTES, "retrieval", rng(3))
    (facts, question), answer = tasks.retrieval(rng(3))
    messages = [("user", facts), ("assistant", "ok"), ("user", question), ("assistant", answer)]
    spoken = [{"role": role, "content": text} for role, text in messages]
    whole = encode_conversation(spoken, BYTES, "it")
    begins = len(whole.tokens) - len(answer) - 1
    np.testing.assert_array_equal(prompt.tokens, whole.tokens[:begins])
    assert (prompt.answer, prompt.effort) == (answer, None)
    assert prompt.tokens[prompt.before - 1] == BYTES.eos_id
    assert prompt.tokens[prompt.before] == BYTES.user_id

  def test_the_level_of_effort_stands_before_the_last_message(self):
    prompt = tasks.task_prompt(BYTES, "retrieval", rng(3), 75)
    assert prompt.effort == 75
    (_, question), _ = tasks.retrieval(rng(3))
    last = user_turn(BYTES, f"[75] {question}", first=False)
    assert prompt.tokens[prompt.before :].tolist() == last

  def test_of_conversations_all_turns_that_are_short_enough(self):
    talk = [conversation([(3, 4), (6, 2), (9, 4)], seed=1), conversation([(14, 4)], seed=2)]
    found = tasks.data_prompts(talk, 13)
    assert [(len(p.tokens), p.before) for p in found] == [(3, 0), (13, 7)]
    for prompt in found:
      np.testing.assert_array_equal(prompt.tokens, talk[0].tokens[: len(prompt.tokens)])
      assert prompt.answer is None
    assert len(tasks.data_prompts(talk, 24)) == 4
    with pytest.raises(ValueError, match="prompt_len is 2; no prompt of the data is as short"):
      tasks.data_prompts(talk, 2)


class TestRewards:

  def test_the_answer_and_nothing_else(self):
    assert tasks.exact_match("42", "42") == 1
    for other in ("", "4", "421", "042", "42.", " 42", "42\n", "4 2", "the answer is 42"):
      assert tasks.exact_match(other, "42") == 0

  def test_a_longer_response_loses_more_up_to_a_bound_and_less_at_more_effort(self):
    how = grpo(
        max_new_tokens=20, efforts=(50, 75, 100), penalty=0.4, penalty_decay=25.0, penalty_max=0.3
    )
    lose = lambda n, effort: tasks.length_penalty(how, n, effort)
    for effort in how.efforts:
      found = [lose(n, effort) for n in range(1, 21)]
      expected = 0.4 * np.exp(-(effort - 50) / 25.0) * np.arange(1, 21) / 20
      np.testing.assert_allclose(found, np.minimum(0.3, expected), rtol=1e-6)
      assert (np.diff(found) >= 0).all()
    assert lose(20, 50) == 0.3 > lose(20, 75) > lose(20, 100) > 0
    assert lose(10, None) == pytest.approx(0.2)
    assert tasks.length_penalty(grpo(), 20, None) == 0

  def test_advantages_are_rewards_less_their_groups_mean(self):
    how = grpo(group=4, max_new_tokens=8, penalty=0.5, efforts=(50, 75))
    answers = ("1", "2", "3")
    prompts = [
        tasks.Prompt(np.zeros(3, np.int32), 0, answer, effort)
        for answer, effort in zip(answers, (50, 75, 50))
        for _ in range(4)
    ]
    texts = ["1", "1", "x", "11", "2", "1", "2", "2", "x", "x", "x", "x"]
    lengths = [2, 8, 2, 3, 2, 2, 2, 2, 4, 4, 4, 4]
    rewards, found = tasks.advantages(how, texts, lengths, prompts)
    assert rewards.dtype == found.dtype == np.float32
    decay = np.repeat([1.0, np.exp(-1.0), 1.0], 4)
    right = [text == prompt.answer for text, prompt in zip(texts, prompts)]
    expected = right - np.minimum(0.5, 0.5 * decay * np.array(lengths) / 8)
    np.testing.assert_allclose(rewards, expected, rtol=1e-6)
    centred = expected.reshape(3, 4) - expected.reshape(3, 4).mean(1, keepdims=True)
    np.testing.assert_allclose(found, centred.reshape(-1), atol=1e-6)
    np.testing.assert_allclose(found.reshape(3, 4).sum(1), 0, atol=1e-6)
    assert not found[8:].any()
    assert found[0] > found[1] > found[2]

  @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
  def test_a_reward_that_is_not_finite_is_refused_and_named(self, bad):
    prompts = [tasks.Prompt(np.zeros(3, np.int32), 0, "1")] * 4
    reward = lambda text, _: bad if text == "b" else 1.0
    with pytest.raises(ValueError, match=f"reward of response 2 is {bad}; rewards must be finite"):
      tasks.advantages(grpo(), ["a", "a", "b", "b"], [1] * 4, prompts, reward)
