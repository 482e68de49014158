"""Laws of the loss of a target: next token, distillation, GRPO."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.config import RolloutConfig
from deepseek_jax.nn.rows import Rows
from deepseek_jax.train import loss
from deepseek_jax.train.data import Batch, Policy

B, T, V = 2, 7, 11
# Its hidden states are logits.
MODEL = types.SimpleNamespace(logits=lambda hidden: hidden)
DISTILL = RolloutConfig(objective="distill", teacher="teacher")
# Of a ratio against the policy that wrote, below, inside and above of [0.8, 1.2].
RATIOS = np.array([0.3, 0.79, 0.9, 1.0, 1.1, 1.21, 3.0])


def grpo(**how):
  return RolloutConfig(objective="grpo", prompts="arithmetic", group=2, **how)


def draw(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def make_batch(logits, how, advantages):
  """Targets whose ratios are `RATIOS`, and weights that leave some out."""
  targets = np.random.default_rng(1).integers(0, V, (B, T)).astype(np.int32)
  logp = log_softmax(logits.astype(np.float64) / how.temperature)
  picked = np.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
  old = (picked - np.log(RATIOS)).astype(np.float32)
  weights = np.ones((B, T), np.float32)
  weights[1, 3] = 0
  spread = np.broadcast_to(np.array(advantages, np.float32)[:, None], (B, T))
  rows = Rows.of_segments(np.ones((B, T), np.int32))
  return Batch(targets, rows, None, targets, weights, policy=Policy(old, spread, None)), picked


@functools.partial(jax.jit, static_argnames=("how", "chunk"))
def run(logits, batch, how, theirs, chunk):
  teacher = None if theirs is None else loss.Teacher(MODEL, theirs)
  value = lambda x: loss.token_losses(MODEL, x, batch, how, teacher, chunk=chunk)
  return jax.value_and_grad(value)(logits)


def value_and_grad(logits, batch, how, theirs=None, chunk=3):
  value, grad = run(logits, batch, how, theirs, chunk)
  return float(value), np.asarray(grad)


@pytest.fixture(params=[1.0, 0.7])
def how(request):
  return grpo(temperature=request.param, clip=0.2)


class TestGRPO:

  @pytest.mark.parametrize("chunk", [3, 16])
  def test_the_smaller_of_the_ratio_and_the_clipped_one_times_the_advantage(self, how, chunk):
    logits = draw(0, B, T, V)
    batch, _ = make_batch(logits, how, [2.0, -0.5])
    gains = np.array([2.0, -0.5])[:, None] * np.stack([RATIOS, np.clip(RATIOS, 0.8, 1.2)])[:, None]
    expected = -(gains.min(0) * batch.weights).sum()
    found, _ = value_and_grad(logits, batch, how, chunk=chunk)
    np.testing.assert_allclose(found, expected, rtol=1e-5)

  def test_a_ratio_that_has_gone_far_enough_the_better_way_has_no_gradient(self, how):
    logits = draw(0, B, T, V)
    batch, _ = make_batch(logits, how, [2.0, -0.5])
    _, grad = value_and_grad(logits, batch, how)
    moves = np.abs(grad).max(-1) > 1e-4
    np.testing.assert_array_equal(moves[0], RATIOS < 1.2)
    np.testing.assert_array_equal(moves[1], (RATIOS > 0.8) & (batch.weights[1] > 0))
    assert not grad[~moves].any()

  def test_a_step_along_the_gradient_makes_a_good_response_likelier_and_a_bad_one_not(self, how):
    logits = draw(0, B, T, V)
    batch, before = make_batch(logits, how, [2.0, -0.5])
    _, grad = value_and_grad(logits, batch, how)
    logp = log_softmax((logits - 0.01 * grad) / how.temperature)
    change = np.take_along_axis(logp, batch.targets[..., None], axis=-1)[..., 0] - before
    assert (change[0][RATIOS < 1.2] > 1e-5).all()
    assert (change[1][(RATIOS > 0.8) & (batch.weights[1] > 0)] < -1e-5).all()

  def test_on_the_policy_that_wrote_the_gradient_is_that_of_advantage_times_log_p(self, how):
    logits = draw(0, B, T, V)
    batch, picked = make_batch(logits, how, [2.0, -0.5])
    batch = batch._replace(policy=batch.policy._replace(logprobs=picked.astype(np.float32)))
    probabilities = np.exp(log_softmax(logits.astype(np.float64) / how.temperature))
    hot = np.eye(V)[batch.targets]
    scale = (batch.weights * batch.policy.advantages)[..., None] / how.temperature
    _, grad = value_and_grad(logits, batch, how)
    np.testing.assert_allclose(grad, -scale * (hot - probabilities), atol=1e-5)

  def test_equal_rewards_teach_nothing(self, how):
    logits = draw(0, B, T, V)
    batch, _ = make_batch(logits, how, [0.0, 0.0])
    value, grad = value_and_grad(logits, batch, how)
    assert value == 0
    assert not grad.any()


class TestDistillation:

  def found(self, logits, theirs):
    batch, _ = make_batch(logits, DISTILL, [0.0, 0.0])
    return batch, *value_and_grad(logits, batch, DISTILL, theirs)

  def test_the_divergence_from_the_teacher_over_the_whole_vocabulary(self):
    logits, theirs = draw(0, B, T, V), draw(1, B, T, V)
    batch, value, grad = self.found(logits, theirs)
    ours, other = (log_softmax(x.astype(np.float64)) for x in (logits, theirs))
    kl = np.sum(np.exp(ours) * (ours - other), axis=-1)
    assert (kl > 0).all()
    np.testing.assert_allclose(value, (batch.weights * kl).sum(), rtol=1e-5)
    expected = np.exp(ours) * (ours - other - kl[..., None]) * batch.weights[..., None]
    np.testing.assert_allclose(grad, expected, atol=1e-6)

  def test_a_student_like_its_teacher_has_nothing_to_learn(self):
    logits = draw(0, B, T, V)
    for shift in (0.0, 3.0):  # logits that differ by a constant are the same distribution
      _, value, grad = self.found(logits, logits + np.float32(shift))
      np.testing.assert_allclose(value, 0, atol=1e-5)
      np.testing.assert_allclose(grad, 0, atol=1e-5)

  def test_the_teacher_has_no_gradient(self):
    logits, theirs = draw(0, B, T, V), draw(1, B, T, V)
    batch, _ = make_batch(logits, DISTILL, [0.0, 0.0])

    def value(head, hidden):
      teacher = loss.Teacher(types.SimpleNamespace(logits=lambda x: x * head), hidden)
      return loss.token_losses(MODEL, jnp.asarray(logits), batch, DISTILL, teacher, chunk=3)

    grads = jax.jit(jax.grad(value, (0, 1)))(jnp.ones(()), jnp.asarray(theirs))
    assert not any(g.any() for g in grads)


def test_without_an_objective_the_loss_is_that_of_the_next_token():
  logits = draw(0, B, T, V)
  batch, picked = make_batch(logits, grpo(), [2.0, -0.5])
  expected, gradient = value_and_grad(logits, batch._replace(policy=None), None)
  np.testing.assert_allclose(expected, -(batch.weights * picked).sum(), rtol=1e-5)
  found, grad = value_and_grad(logits, batch, None)
  assert found == expected
  np.testing.assert_array_equal(grad, gradient)
