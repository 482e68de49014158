"""Visits: every row gets its own result, whatever the loads, and gradients go the same way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from deepseek_jax.config import MeshConfig
from deepseek_jax.nn import exchange
from deepseek_jax.sharding import AXES, EXPERTS, make_mesh

ROWS, WIDTH = 40, 3


def host(weights, payload, valid):
  x, at = payload
  return jnp.where(valid[:, None], jnp.sin(x) * weights[jnp.where(valid, at, 0)][:, None], jnp.nan)


def on_mesh(sizes, axes, weights, x, at, destination):
  mesh = make_mesh(MeshConfig(*sizes))

  def local(weights, x, at, destination):
    return exchange.visit(host, weights, (x, at), destination, axes)

  return jax.shard_map(
      local, mesh=mesh, in_specs=(P(axes), P(AXES), P(AXES), P(AXES)), out_specs=P(AXES),
      check_vma=False,
  )(weights, x, at, destination)  # fmt: skip


def direct(devices, weights, x, at, destination):
  """The same from one table of all devices."""
  table = weights.reshape(devices, -1)
  there = destination < devices
  factor = table[jnp.where(there, destination, 0), at]
  x = jnp.repeat(x, destination.shape[0] // x.shape[0], axis=0)
  return jnp.where(there[:, None], jnp.sin(x) * factor[:, None], 0.0)


LOADS = {
    "even": lambda rng, n: np.arange(n) % 8,
    "random": lambda rng, n: rng.integers(0, 8, n),
    "all to one": lambda rng, n: np.full(n, 5),
    "nowhere": lambda rng, n: np.full(n, 8),
    "few": lambda rng, n: np.where(rng.random(n) < 0.05, rng.integers(0, 8, n), 8),
    "skewed": lambda rng, n: np.minimum((rng.random(n) ** 4 * 10).astype(int), 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("sizes", "axes"), [((1, 1, 2, 4), EXPERTS), ((2, 2, 1, 2), AXES)])
def test_results_and_gradients_are_those_of_a_direct_look_up(load, sizes, axes):
  rng = np.random.default_rng(len(load))
  n = 8 * ROWS
  weights = jnp.asarray(rng.normal(size=8 * 4), jnp.float32)
  x = jnp.asarray(rng.normal(size=(n // 2, WIDTH)), jnp.float32)
  at = jnp.asarray(rng.integers(0, 4, n), jnp.int32)
  destination = jnp.asarray(LOADS[load](rng, n), jnp.int32)
  pull = jnp.asarray(rng.normal(size=(n, WIDTH)), jnp.float32)

  def both(fn):
    loss = lambda weights, x: jnp.sum(fn(weights, x, at, destination) * pull)
    return jax.jit(lambda w, x: (fn(w, x, at, destination), jax.grad(loss, (0, 1))(w, x)))(
        weights, x
    )

  found = both(functools.partial(on_mesh, sizes, axes))
  expected = both(functools.partial(direct, 8))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-6), found, expected)


def test_a_round_has_room_for_half_as_much_again_and_never_for_more_than_there_is():
  assert exchange.room(24576, 128) == 288
  assert exchange.room(6, 128) == 6
  assert exchange.room(1000, 1) == 1000
