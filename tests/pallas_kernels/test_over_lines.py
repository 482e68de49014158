"""Kernels on a mesh: each device runs its own lines, values and gradients are those of one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.hyper_connections import op as hyper_connections
from pallas_kernels.sparse_attention import op as sparse_attention
from pallas_kernels.window_attention import op as window_attention

MESHES = {
    "4": ((4,), ("data",)),
    "2x2": ((2, 2), ("data", "fsdp")),
    "2x2 lines": ((2, 2), ("fsdp", "expert")),
    "8": ((2, 2, 2), ("data", "fsdp", "seq")),
}


def mesh_of(name):
  shape, axes = MESHES[name]
  return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))


@jax.custom_vjp
def product(x, w):
  return jnp.sin(x) @ w


def product_backward(saved, d):
  x, w = saved
  return jnp.cos(x) * (d @ w.T), jnp.einsum("btk,btz->kz", jnp.sin(x), d)


product.defvjp(lambda x, w: (product(x, w), (x, w)), product_backward)


@pytest.mark.parametrize("name", MESHES)
def test_gradients_of_shared_arguments_are_summed_once(name):
  rng = np.random.default_rng(0)
  x, w = rng.standard_normal((4, 6, 3)), rng.standard_normal((3, 5))
  x, w = x.astype(np.float32), w.astype(np.float32)

  def loss(x, w):
    return jnp.sum(dispatch.over_lines(product, x, w, shared={1}) ** 2)

  alone = jax.grad(loss, argnums=(0, 1))(x, w)
  mesh = mesh_of(name)
  with jax.set_mesh(mesh):
    together = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
  for a, b in zip(alone, together):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_lines_that_no_axis_divides_stay_together():
  x, w = np.ones((3, 2, 2), np.float32), np.eye(2, dtype=np.float32)
  with jax.set_mesh(mesh_of("2x2")):
    out = jax.jit(lambda x, w: dispatch.over_lines(product, x, w, shared={1}))(x, w)
  np.testing.assert_allclose(out, np.sin(x), rtol=1e-6)


def test_each_device_has_its_own_lines_alone():
  seen = []

  def fn(x):
    seen.append(x.shape)
    return x

  mesh = mesh_of("2x2")
  with jax.set_mesh(mesh):
    x = jax.device_put(np.zeros((8, 2), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    out = jax.jit(lambda x: dispatch.over_lines(fn, x))(x)
  assert seen == [(2, 2)]
  assert out.shape == (8, 2)


def window(x):
  """Window attention of 4 lines of 6 rows."""
  q, kv, sink = x["q"], x["kv"], x["sink"]
  b, t = q.shape[:2]
  place = jnp.broadcast_to(jnp.arange(t + 3, dtype=jnp.int32), (b, t + 3))
  rows = place[:, 3:]
  one = lambda a: jnp.ones_like(a)
  return window_attention.window_attention(
      q, kv, rows, 0 * rows, one(rows), place, one(place), sink, window=4, implementation="pallas"
  )


def update(x):
  how = dict(iterations=3, eps=1e-6, norm_eps=1e-6, implementation="pallas")
  fn, scale, base = x["fn"], jnp.ones(3), jnp.zeros(8)
  return jnp.concatenate(
      hyper_connections.update(x["x"], x["y"], x["c"], fn, scale, base, **how), -1
  )


def decode(x):
  """One row a line over packed entries of its own: integers have no gradient."""
  rng = np.random.default_rng(2)
  words = lambda *shape: jnp.asarray(rng.integers(0, 1 << 20, shape), jnp.int32)
  b = x["q"].shape[0]
  slots = jnp.asarray(rng.integers(-1, 16, (b, 32)), jnp.int32)
  return sparse_attention.sparse_attention_decode(
      jax.lax.stop_gradient(x["q"]), words(b, 9, 128), slots, words(b, 64, 128), words(b, 2, 128),
      jnp.ones((b, 64), jnp.int32), jax.lax.stop_gradient(x["sink"]), implementation="pallas",
  )  # fmt: skip


CASES = {
    decode: dict(q=(4, 16, 512), sink=(16,)),
    window: dict(q=(4, 6, 2, 8), kv=(4, 9, 8), sink=(2,)),
    update: dict(x=(4, 2, 256), y=(4, 2, 128), c=(4, 2, 8), fn=(8, 256)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_kernels_on_a_mesh(case):
  rng = np.random.default_rng(1)
  x = {k: 0.3 * rng.standard_normal(s).astype(np.float32) for k, s in CASES[case].items()}
  run = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(case(x))))
  with pltpu.force_tpu_interpret_mode():
    alone = jax.jit(run)(x)
    with jax.set_mesh(mesh_of("2x2")):
      together = jax.jit(run)(x)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), alone, together)
