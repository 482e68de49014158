"""The index loss trains indexers alone; its teacher is the attention that the layer computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax.nn.attention import Context
from deepseek_jax.nn.block import index_divergence
from deepseek_jax.nn.compressor import visible
from deepseek_jax.nn.indexer import index_scores
from deepseek_jax.nn.joint_attention import Part, joint_attention, window_mask
from deepseek_jax.nn.rope import rotate

SEGMENTS = [[1] * 9 + [2] * 6 + [0]]


def names(state):
  return {
      ".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)
  }


@pytest.fixture(scope="module")
def gradients(tiny):
  """Of the index loss, of the outputs beside it, and of the outputs without it."""

  @tiny.compiled
  def run(model, inputs):
    def both(model):
      out = model(*inputs, index_loss=True)
      return out.index_loss, jnp.sum(jnp.sin(out.hidden))

    values, pull = jax.vjp(both, model)
    one, zero = jnp.ones(()), jnp.zeros(())
    return values, pull((one, zero))[0], pull((zero, one))[0]

  model, inputs = tiny.model(tiny.short), tiny.inputs(SEGMENTS, config=tiny.short)
  values, index, output = run(model, inputs)
  return values, names(nnx.state(index)), names(nnx.state(output))


def test_it_reaches_every_indexer_parameter_and_nothing_else(gradients):
  (loss, _), index, _ = gradients
  assert loss > 0
  moved = {name for name, g in index.items() if g.any()}
  indexers = {name for name in index if ".indexer." in name}
  assert len(indexers) == 4 + 2
  assert moved == indexers


def test_the_outputs_reach_no_indexer(gradients):
  _, _, output = gradients
  frozen = {name for name, g in output.items() if not g.any()}
  assert frozen == {
      n for n in output if ".indexer." in n or ".gate.bias" in n or n == "head.weight"
  }


def test_divergence_by_hand():
  """Absent slots and rows without mass add nothing; the teacher is renormalised and detached."""
  mass = jnp.array([[[0.3, 0.1, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [2.0, 0.0, 1.0, 1.0]]])
  scores = jnp.array([[[1.0, 2.0, -jnp.inf, -jnp.inf], [-jnp.inf] * 4, [0.0, 0.5, -1.0, 1.0]]])
  expected = 0.0
  for p, s in (([0.75, 0.25], [1.0, 2.0]), ([0.5, 0.0, 0.25, 0.25], [0.0, 0.5, -1.0, 1.0])):
    log_q = np.array(s) - np.log(np.sum(np.exp(s)))
    expected += sum(a * (np.log(a) - b) for a, b in zip(p, log_q) if a)
  value, (by_mass, by_scores) = jax.value_and_grad(index_divergence, argnums=(0, 1))(mass, scores)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  assert not np.asarray(by_mass).any()
  assert np.isfinite(by_scores).all()
  assert not np.asarray(by_scores)[0, 1].any()


def test_it_is_zero_where_scores_are_log_probabilities():
  mass = jax.nn.softmax(jnp.array([[[0.3, 1.0, -2.0]]]))
  np.testing.assert_allclose(index_divergence(mass, jnp.log(mass) + 5), 0, atol=1e-6)


def test_the_warm_up_teacher_is_dense_attention(tiny):
  """One Full layer taking every visible entry: KL from its whole attention, worked out apart."""
  config = dataclasses.replace(
      tiny.short, num_hidden_layers=1, compress_ratios=(1,), index_source_layer_ids=(0,),
      candidate_source_layer_id=None, index_topk=2,
  )  # fmt: skip
  model, inputs = tiny.model(config), tiny.inputs(SEGMENTS, config=config)

  @tiny.compiled
  def by_hand(model):
    rows = jax.tree.map(jnp.asarray, inputs.rows)
    ctx, stream = Context.of(rows, config), model.start(jnp.asarray(inputs.tokens))
    block = jax.tree.map(lambda a: a[0], model.runs[0])
    attn, x = block.attn, block.attn_norm(stream.u)
    entries, c_q, table = block.publish(stream, ctx)[0], attn.query_latent(x), ctx.tables[1]
    q = rotate(attn.wq_b(c_q).reshape(1, 16, config.num_attention_heads, config.head_dim), table)
    every = visible(rows, entries.last, entries.segments)
    near = window_mask(rows, rows.positions, rows.segments, config.sliding_window)
    parts = Part(attn.window_kv(x, table), near), Part(entries.kv, every)
    mass = joint_attention(q, parts, attn.attn_sink[...])[2]
    return mass, index_scores(attn.indexer.queries(c_q, x, table), entries.index_keys), every

  loss = tiny.run(model, inputs, index_loss=True, select_all=True).index_loss
  mass, scores, every = (np.asarray(a, np.float64) for a in by_hand(model))
  expected = 0.0
  for p, s, seen in zip(mass[0], scores[0], every[0] > 0):
    if seen.any():
      p, s = p[seen] / p[seen].sum(), s[seen]
      expected += np.sum(p * (np.log(p) - s + np.log(np.sum(np.exp(s)))))
  assert expected > 0.1
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
