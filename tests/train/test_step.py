"""Laws of the step: accumulation is one batch, frozen is untouched, biases move against load."""

import dataclasses
import functools
import hashlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax.checkpoint.training import names_of
from deepseek_jax.config import ComputeConfig, Config, ModelConfig, TrainConfig
from deepseek_jax.nn.rows import Rows
from deepseek_jax.schedule import Schedule
from deepseek_jax.train import step
from deepseek_jax.train.data import Batch

T, V, PAD = 32, 40, 2

MODEL = ModelConfig(
    vocab_size=V, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=3,
    num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=16,
    o_groups=1, n_routed_experts=4, num_experts_per_tok=2, sliding_window=8,
    compress_ratios=(0, 0, 1), kv_source_layer_ids=(2,), index_source_layer_ids=(2,),
    index_n_heads=2, index_head_dim=32, index_topk=4, hc_mult=2, hc_sinkhorn_iters=2,
    max_position_embeddings=64,
)  # fmt: skip
TRAIN = TrainConfig(
    steps=10, batch_size=2, seq_len=T, accumulation=4, learning_rate=1e-2, schedule="constant",
    warmup_steps=0, index_loss="sparse",
)  # fmt: skip


def experiment(**train):
  return Config(model=MODEL, train=dataclasses.replace(TRAIN, **train))


def make_batch(seed=0, empty=(), micro=8, rows=1):
  """Random packed rows with unequal counts; the micro-batches `empty` are padding."""
  rng = np.random.default_rng(seed)
  segments = np.zeros((micro, rows, T), np.int32)
  for g, b in np.ndindex(micro, rows):
    if g not in empty:
      length = rng.integers(8, T + 1)
      segments[g, b, :length] = 1 + (np.arange(length) >= rng.integers(2, length))
  valid = segments > 0
  tokens = np.where(valid, rng.integers(3, V, segments.shape), PAD).astype(np.int32)
  weights = (valid & (rng.random(segments.shape) < rng.random((micro, 1, 1)))).astype(np.float32)
  targets = np.where(valid, rng.integers(3, V, segments.shape), PAD).astype(np.int32)
  return Batch(tokens, Rows.of_segments(segments), None, targets, weights)


def reshaped(batch, micro):
  return jax.tree.map(lambda a: a.reshape(micro, -1, *a.shape[2:]), batch)


def digest(tree):
  leaves = jax.tree.leaves(tree)
  return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in leaves)).hexdigest()


@functools.cache
def graph():
  return step.abstract_model(experiment())[0]


@functools.cache
def fresh_state(**train):
  return step.init_state(experiment(**train))


def fresh(**train):
  """A state of its own: a step donates what it gets."""
  return jax.tree.map(jnp.copy, fresh_state(**train))


@functools.cache
def gradient(**train):
  return jax.jit(step.make_gradient(graph(), experiment(**train)))


@functools.cache
def compiled_step(**train):
  return step.make_step(graph(), experiment(**train))


@pytest.mark.slow
@pytest.mark.parametrize("micro", [8, 4, 2])
def test_accumulation_equals_one_batch_with_unequal_counts_and_an_empty_micro_batch(micro):
  batch = make_batch(empty=(3,))
  params = fresh_state().params
  whole, parts = gradient()(params, reshaped(batch, 1)), gradient()(params, reshaped(batch, micro))
  norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(whole.grads)))
  assert norm > 0.1
  off = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), whole.grads, parts.grads)
  assert np.sqrt(sum(jax.tree.leaves(off))) / norm < 2e-6
  chex.assert_trees_all_close(parts.sums, whole.sums, rtol=2e-6)
  chex.assert_trees_all_equal(parts.counts, whole.counts)
  chex.assert_trees_all_equal(parts.load, whole.load)


@pytest.mark.slow
def test_the_loss_of_unequal_micro_batches_is_the_mean_over_tokens():
  """One token of loss 4 and three of loss 1 are 7/4, not the mean 2.5 of their means."""
  batch = make_batch()
  weights = np.zeros_like(batch.weights)
  weights[0, 0, 1], weights[1, 0, 1:4] = 1, 1
  batch = batch._replace(weights=weights)
  params = fresh_state().params
  alone = lambda g: batch._replace(weights=np.where(np.arange(8)[:, None, None] == g, weights, 0))
  parts = [gradient()(params, alone(g)) for g in (0, 1)]
  whole = gradient()(params, batch)
  first, second = (float(p.sums.nll) for p in parts)
  assert abs(first - second / 3) > 0.1
  _, metrics = compiled_step()(fresh(), batch)
  np.testing.assert_allclose(float(metrics.loss), (first + second) / 4, rtol=1e-6)
  np.testing.assert_allclose(float(whole.sums.nll), first + second, rtol=1e-6)
  head = lambda part: np.asarray(names_of(part.grads)["head.weight"])
  np.testing.assert_allclose(head(whole), (head(parts[0]) + 3 * head(parts[1])) / 4, atol=1e-6)


def test_a_step_of_padding_alone_is_finite_and_has_no_gradient():
  batch = make_batch(empty=range(8))
  found = gradient()(fresh_state().params, batch)
  assert all(not np.any(g) for g in jax.tree.leaves(found.grads))
  state, metrics = compiled_step()(fresh(), batch)
  assert all(np.isfinite(x) for x in metrics)
  assert (metrics.loss, metrics.targets, metrics.max_load) == (0, 0, 0)
  assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves(state.params))


def is_indexer(name):
  return ".indexer." in name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({"index_loss": "frozen"}, lambda name: not is_indexer(name)),
        ({"index_loss": "warmup"}, is_indexer),
    ],
    ids=["frozen", "warmup"],
)
def test_only_trained_parameters_move_and_decay_touches_no_other(changes, moves):
  before = names_of(jax.tree.map(np.array, fresh_state(**changes).params))
  state, metrics = compiled_step(**changes)(fresh(**changes), make_batch())
  after = names_of(state.params)
  moved = {name for name in before if not np.array_equal(before[name], after[name])}
  expected = {name for name in before if moves(name) and "bias_vl" not in name}
  assert moved == expected
  assert bool(metrics.index > 0) == (changes.get("index_loss") != "frozen")


def test_an_index_coefficient_of_zero_gives_zeros_not_nothing():
  changes = {"index_loss": "warmup", "index_loss_weight": 0.0}
  found = gradient(**changes)(fresh_state().params, make_batch())
  grads = names_of(found.grads)
  # What is frozen has no gradient at all; what is trained has one, of zeros.
  assert set(grads) == {name for name in names_of(fresh_state().params) if is_indexer(name)}
  assert not any(np.any(g) for g in grads.values())
  assert float(found.sums.index) > 0


def test_a_base_is_stored_only_where_something_is_frozen():
  config = dataclasses.replace(experiment(), compute=ComputeConfig(stored_base=True))
  config = dataclasses.replace(config, train=dataclasses.replace(TRAIN, frozen=()))
  with pytest.raises(ValueError, match="compute.stored_base is True; it must be False where no"):
    step.abstract_model(config)


def test_router_biases_move_against_the_load_of_their_own_layers():
  batch = make_batch()
  load = np.asarray(gradient()(fresh_state().params, batch).load)
  assert load.shape == (MODEL.num_hidden_layers, MODEL.n_routed_experts)
  assert len({tuple(row) for row in load}) == len(load)
  state, _ = compiled_step()(fresh(), batch)
  names = names_of(state.params)
  runs = range(len(Schedule.from_config(MODEL).runs))
  biases = np.concatenate([names[f"runs.{r}.ffn.gate.bias"] for r in runs])
  speed = np.float32(TRAIN.router_bias_speed)
  np.testing.assert_array_equal(biases, speed * np.sign(load.mean(-1, keepdims=True) - load))
  assert np.any(biases)
  assert not np.any(np.concatenate([names[f"runs.{r}.ffn.gate.bias_vl"] for r in runs]))


def test_ten_steps_twice_are_equal_bit_for_bit_and_traced_once():
  digests = []
  for _ in range(2):
    state, losses = fresh(), []
    for i in range(10):
      state, metrics = compiled_step()(state, make_batch(seed=i))
      losses.append(float(metrics.loss))
    digests.append((digest(state), losses))
  assert digests[0] == digests[1]
  assert int(state.step) == 10
  assert compiled_step()._cache_size() == 1


def test_repeating_one_batch_lowers_its_loss():
  state, losses = fresh(), []
  batch = make_batch()
  for _ in range(30):
    state, metrics = compiled_step()(state, batch)
    losses.append(float(metrics.loss))
  assert losses[-1] < 0.7 * losses[0]
  assert all(np.isfinite(losses))


def test_a_donated_state_is_refused_with_a_word():
  state = fresh()
  compiled_step()(state, make_batch())
  with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
    compiled_step()(state, make_batch())


def test_parameters_in_bfloat16_keep_their_dtype_and_an_f32_optimiser():
  compute = ComputeConfig(dtype="bfloat16", param_dtype="bfloat16")
  config = dataclasses.replace(experiment(), compute=compute)
  state = jax.eval_shape(lambda: step.init_state(config))
  train_step = step.make_step(step.abstract_model(config)[0], config)
  after, _ = jax.eval_shape(train_step, state, make_batch())
  assert after == state
  assert names_of(after.params)["embed.weight"].dtype == jnp.bfloat16
  floats = [a for a in jax.tree.leaves(after.opt_state) if jnp.issubdtype(a.dtype, jnp.floating)]
  assert {a.dtype for a in floats} == {jnp.dtype("float32")}


def test_evaluation_is_the_loss_of_the_step():
  batch = make_batch()
  params = fresh_state().params
  flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), batch)
  nll, targets = step.make_eval(graph(), experiment())(params, flat)
  found = gradient()(params, batch)
  np.testing.assert_allclose(float(nll), float(found.sums.nll), rtol=1e-6)
  assert float(targets) == float(found.counts.targets)
  assert isinstance(params, nnx.State)
