"""Router, experts and load: released values, dropless routing, and padding that visits nobody."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.nn import experts
from deepseek_jax.nn.layers import rms_norm
from deepseek_jax.nn.moe import Bank, Gate, MoE, SharedExpert, balance


def make(cls, config, filled, weights):
  return filled(lambda: cls((), config, rngs=nnx.Rngs(0), dtype=np.float32), weights)


def by_id(ids, *values):
  """Routing in order of the expert ids: the order of a choice has no meaning."""
  order = np.argsort(ids, axis=-1)
  return [np.take_along_axis(np.asarray(a), order, axis=-1) for a in (ids, *values)]


@pytest.mark.parametrize("case", ["nobias", "bias"])
def test_released_routing(golden, golden_config, filled, case):
  ops = golden("ops")
  bias = ops["gate/bias"] * (case == "bias")
  weights = {"weight": ops["gate/weight"], "bias": bias, "bias_vl": np.full(8, np.nan)}
  routing = jax.jit(make(Gate, golden_config, filled, weights))(ops["gate/x"][None])
  ours = by_id(routing.ids[0], routing.weights[0])
  theirs = by_id(ops[f"gate/indices_{case}"], ops[f"gate/weights_{case}"])
  np.testing.assert_array_equal(ours[0], theirs[0])
  np.testing.assert_allclose(ours[1], theirs[1], atol=1e-6, rtol=0)


def test_the_bias_changes_the_choice_and_never_a_weight(golden):
  ops = golden("ops")
  changed = [set(a) != set(b) for a, b in zip(ops["gate/indices_bias"], ops["gate/indices_nobias"])]
  assert sum(changed) == 11


@pytest.mark.parametrize(("limit", "tolerance"), [(10, 3e-5), (1, 2e-6), (0, 2e-6)])
def test_released_expert(golden, golden_config, filled, limit, tolerance):
  """Alone as the shared expert, and routed with a weight that is applied before w2."""
  ops = golden("ops")
  weights = {k.removeprefix("expert/w/"): v for k, v in ops.items() if k.startswith("expert/w/")}
  config = dataclasses.replace(golden_config, swiglu_limit=float(limit))
  x = ops[f"expert/x_lim{limit}"]
  shared = jax.jit(make(SharedExpert, config, filled, weights))
  close = functools.partial(np.testing.assert_allclose, atol=tolerance, rtol=0)
  close(shared(x[None])[0], ops[f"expert/out_noweight_lim{limit}"])
  bank = experts.ExpertWeights(*(jnp.asarray(weights[f"w{i}.weight"])[None] for i in (1, 2, 3)))
  routed = jax.jit(experts.expert_sum, static_argnums=(0, 1))(
      float(limit), 8, x, ops["expert/route_weight"], jnp.zeros((16, 1), jnp.int32), bank
  )
  close(routed, ops[f"expert/out_lim{limit}"])


def test_released_layer(golden, golden_config, filled):
  ops = golden("ops")
  named = {k.removeprefix("moe/w/"): v for k, v in ops.items() if k.startswith("moe/w/")}
  weights = {k: v for k, v in named.items() if not k.startswith("experts.")}
  weights["gate.bias_vl"] = np.full(8, np.nan)
  for i in (1, 2, 3):
    stack = [named[f"experts.{e}.w{i}.weight"] for e in range(8)]
    weights[f"experts.w{i}.weight"] = np.stack(stack)
  moe = make(MoE, golden_config, filled, weights)
  out, load, _ = jax.jit(moe)(ops["moe/x"], jnp.ones((1, 6), bool))
  np.testing.assert_allclose(out, ops["moe/out"], atol=2e-6, rtol=0)
  assert load.load.sum() == 6 * 3


E, D, F, LIMIT = 5, 12, 8, 1.0


def dense(x, weights, ids, w):
  """Every expert on every row, then the chosen ones: the formula, without grouping."""
  g, u = jnp.einsum("rd,efd->ref", x, w.w1), jnp.einsum("rd,efd->ref", x, w.w3)
  h = jax.nn.silu(jnp.minimum(g, LIMIT)) * jnp.clip(u, -LIMIT, LIMIT)
  y = jnp.einsum("ref,edf->red", h, w.w2)
  share = jnp.zeros((x.shape[0], E + 1)).at[jnp.arange(x.shape[0])[:, None], ids].add(weights)
  return jnp.einsum("re,red->rd", share[:, :E], y)


ROWS = 37
RANDOM = np.random.default_rng(0).random((ROWS, E)).argsort(-1)[:, :2]
ASSIGNMENTS = {
    "random": RANDOM,
    "all to one expert": np.stack([np.full(ROWS, 3), np.full(ROWS, 1)], -1),
    "an expert without rows": np.random.default_rng(1).random((ROWS, E - 1)).argsort(-1)[:, :2],
    "a third is padding": np.where(np.arange(ROWS)[:, None] % 3 == 0, E, RANDOM),
    "padding alone": np.full((ROWS, 2), E),
}


@pytest.fixture(scope="module")
def both_ways():
  def run(fn, x, weights, ids, w):
    out, pull = jax.vjp(lambda x, weights, w: fn(x, weights, ids, w), x, weights, w)
    return out, pull(jnp.cos(out))

  ours = [functools.partial(experts.expert_sum, LIMIT, b) for b in (8, 16)]
  ours.append(functools.partial(experts.grouped_sum, LIMIT))
  return [jax.jit(functools.partial(run, fn)) for fn in (dense, *ours)]


@pytest.mark.parametrize("case", ASSIGNMENTS)
def test_no_assignment_is_dropped_and_gradients_are_those_of_the_formula(both_ways, case):
  rng = np.random.default_rng(3)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  w = experts.ExpertWeights(draw(E, F, D), draw(E, D, F), draw(E, F, D))
  args = draw(ROWS, D), draw(ROWS, 2), jnp.asarray(ASSIGNMENTS[case], jnp.int32), w
  expected = both_ways[0](*args)
  for grouped in both_ways[1:]:
    for a, b in zip(jax.tree.leaves(grouped(*args)), jax.tree.leaves(expected)):
      np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()), rtol=0)


def test_load_counts_valid_assignments_wherever_the_padding_is(golden_config, filled):
  """Six rows with two pads, three experts a row; also as many rows as experts."""
  rng = np.random.default_rng(0)
  gate = make(
      Gate, golden_config, filled,
      {"weight": rng.standard_normal((8, 40)), "bias": np.zeros(8), "bias_vl": np.zeros(8)},
  )  # fmt: skip

  @jax.jit
  def run(x, valid):
    return balance(gate(x), valid)

  rows = rng.standard_normal((8, 40)).astype(np.float32)
  alone = run(rows[None, :4], jnp.ones((1, 4), bool))
  chosen = np.asarray(jax.jit(gate)(rows[None, :4]).ids)
  np.testing.assert_array_equal(alone.load, np.bincount(chosen.reshape(-1), minlength=8))
  for pads in (2, 4):
    for _ in range(4):
      valid = rng.permutation(np.arange(4 + pads) < 4)
      x = np.zeros((1, 4 + pads, 40), np.float32)
      x[0, valid], x[0, ~valid] = rows[:4], rows[4 : 4 + pads]
      padded = run(x, jnp.asarray(valid)[None])
      np.testing.assert_array_equal(padded.load, alone.load)
      np.testing.assert_allclose(padded.loss, alone.loss, rtol=1e-6)


def test_balance_is_one_a_token_when_every_expert_gets_its_share(golden_config, filled):
  """Σ_e f_e P_e is 1 for a uniform router and E/k for one that sends all to the same experts."""
  zeros = {"weight": np.zeros((8, 40)), "bias": np.zeros(8), "bias_vl": np.zeros(8)}
  routing = make(Gate, golden_config, filled, zeros)(jnp.ones((1, 8, 40)))
  uniform = routing._replace(ids=jnp.arange(24, dtype=jnp.int32).reshape(1, 8, 3) % 8)
  np.testing.assert_allclose(balance(uniform, jnp.ones((1, 8), bool)).loss, 8.0, rtol=1e-6)
  peaked = routing._replace(affinities=jnp.where(jnp.arange(8) < 3, routing.affinities, 0.0))
  np.testing.assert_allclose(balance(peaked, jnp.ones((1, 8), bool)).loss, 8 * 8 / 3, rtol=1e-6)


def test_padding_reaches_no_expert_and_balance_trains_the_router_alone(golden_config, filled):
  """What a pad row holds changes no other row, no load and no gradient."""
  rng = np.random.default_rng(0)
  graph, state = nnx.split(
      nnx.eval_shape(lambda: MoE((), golden_config, rngs=nnx.Rngs(0), dtype=np.float32))
  )
  moe = nnx.merge(
      graph, jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype), state)
  )
  valid = jnp.array([[True, True, False, True, False, True]])

  @jax.jit
  def run(moe, x):
    def total(moe):
      out, load, _ = moe(x, valid)
      return jnp.sum(jnp.where(valid[..., None], jnp.sin(out), 0.0)), load.load

    return jax.value_and_grad(total, has_aux=True)(moe), jax.grad(lambda m: m(x, valid)[1].loss)(
        moe
    )

  x = rng.standard_normal((1, 6, 40)).astype(np.float32)
  routed = np.asarray(jax.jit(lambda x: moe(x, valid)[0] - moe.shared_experts(x))(x))
  np.testing.assert_array_equal(np.any(routed != 0, axis=-1), valid)
  other = np.where(np.asarray(valid)[..., None], x, 1e3).astype(np.float32)
  first, second = run(moe, x), run(moe, other)
  for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
    np.testing.assert_array_equal(a, b)
  by_balance = nnx.to_flat_state(nnx.state(first[1]))
  moved = {".".join(map(str, path)) for path, g in by_balance if np.any(g[...])}
  assert moved == {"gate.weight"}


def test_weights_read_in_the_stack_of_a_run(golden_config):
  """Router and experts of layer 1 of 2 by kernels; padding visits no expert."""
  config = dataclasses.replace(golden_config, hidden_size=128, moe_intermediate_size=128)
  moe = MoE((2,), config, rngs=nnx.Rngs(0), dtype=np.float32)
  moe.gate.bias[...] = jax.random.normal(jax.random.key(1), moe.gate.bias.shape)
  norm = 1 + 0.1 * jax.random.normal(jax.random.key(2), (2, 128))
  u = jax.random.normal(jax.random.key(3), (2, 64, 128))
  valid = np.arange(64)[None] < np.array([64, 50])[:, None]
  one = jax.tree.map(lambda a: a[1], moe)
  expected = one(rms_norm(u, norm[1], 1e-20), jnp.asarray(valid))[0]
  bank = Bank(
      norm[:, None], moe.gate.weight[...], moe.gate.bias[...][..., None],
      moe.experts.weights(np.float32), jnp.int32(1),
  )  # fmt: skip
  with pltpu.force_tpu_interpret_mode():
    own = one.in_place(u, jnp.asarray(valid), bank, 1e-20)
  np.testing.assert_allclose(own, expected, atol=2e-5 * np.abs(expected).max())
