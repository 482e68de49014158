"""Hyper-connections: released values through the op, kernel against reference, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.hyper_connections import kernel, kernel_few, op, reference

INTERPRETER = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
HOW = dict(iterations=20, eps=1e-6, norm_eps=1e-20)
# Largest difference, in units of the largest value of the reference, of values and of gradients.
# In bf16 the kernel collapses streams before they are rounded, and rounds the gradient of x' once
# more.
BUDGET = {jnp.float32: (2e-5, 2e-5), jnp.bfloat16: (8e-3, 1.2e-2)}


enter = jax.jit(functools.partial(op.enter, **HOW))
update = jax.jit(functools.partial(op.update, **HOW))


def problem(tokens, d=128, m=4, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape, dtype=jnp.float32: jnp.asarray(rng.standard_normal(shape), dtype)
  z = (2 + m) * m
  scale, base = draw(3), draw(z)
  c = reference.mixing(draw(1, tokens, z), scale, base, streams=m, iterations=20, eps=1e-6)
  x, y = draw(1, tokens, m * d, dtype=dtype), draw(1, tokens, d, dtype=dtype)
  return x, y, c, draw(z, m * d) * (m * d) ** -0.5, scale, base


def run(function, arguments, implementation, how=HOW):
  """Values and the gradient of every argument."""
  forward = functools.partial(function, **how, implementation=implementation)

  def both(*arguments):
    out, pull = jax.vjp(forward, *arguments)
    rng = np.random.default_rng(1)
    return out, pull(
        jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype), out)
    )

  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    return jax.tree.map(np.asarray, jax.jit(both)(*arguments))


def assert_equal(function, arguments, how=HOW):
  ours, theirs = (run(function, arguments, name, how) for name in ("pallas", "reference"))
  budget = BUDGET[arguments[0].dtype.type]
  for part, limit in zip(range(2), budget):
    for a, b in zip(jax.tree.leaves(ours[part]), jax.tree.leaves(theirs[part]), strict=True):
      assert a.dtype == b.dtype
      a, b = np.float32(a), np.float32(b)
      np.testing.assert_allclose(a, b, atol=limit * max(1, np.abs(b).max()), rtol=0)


def test_released_values(golden):
  """One whole site; a round too few, rows before columns or a lost eps show at 5e-7 only."""
  ops = {name: jnp.asarray(a) for name, a in golden("ops").items() if name.startswith("hc/")}
  x = ops["hc/X"].reshape(1, 5, 160)
  pre, post, mix = (ops[f"hc/X_{name}"].reshape(1, 5, -1) for name in ("pre", "post", "comb"))
  flat = jnp.concatenate([ops["hc/pre_in"], post, mix], -1)
  u, c = enter(x, flat, ops["hc/fn"], ops["hc/scale"], ops["hc/base"])
  np.testing.assert_allclose(u, ops["hc/collapse"], atol=1e-6, rtol=0)
  np.testing.assert_allclose(c, np.concatenate([pre, post, mix], -1), atol=5e-7, rtol=0)
  out, *_ = update(x, ops["hc/y"], flat, ops["hc/fn"], ops["hc/scale"], ops["hc/base"])
  np.testing.assert_allclose(out, ops["hc/expand"].reshape(out.shape), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("case", "m"), [("1", 4), ("20", 4), ("60", 4), ("mult2", 2)])
def test_released_coefficients_at_every_logit_scale(golden, case, m):
  """Streams of one 1 in a channel of its own: with 256 channels 1 / rms is 16, nothing rounds."""
  ops = golden("ops")
  z = ops[f"hc/mixes_{case}"]
  tokens = z.shape[0]
  base = ops["hc/base_mult2" if case == "mult2" else "hc/base"]
  x = np.zeros((1, tokens, 256), np.float32)
  x[0, np.arange(tokens), np.arange(tokens)] = 1
  fn = np.zeros((z.shape[1], 256), np.float32)
  fn[:, :tokens] = z.T / 16
  c = np.zeros((1, tokens, z.shape[1]), np.float32)
  _, found = enter(x, c, fn, ops["hc/scale"], base)
  expected = [ops[f"hc/{name}_{case}"].reshape(tokens, -1) for name in ("pre", "post", "comb")]
  np.testing.assert_allclose(found[0], np.concatenate(expected, 1), atol=5e-7, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        dict(tokens=21),
        dict(tokens=24, d=256, dtype=jnp.bfloat16),
        dict(tokens=16, m=2),
        dict(tokens=150),
    ],
    ids=["ragged", "bfloat16", "two_streams", "two_blocks"],
)
def test_value_and_gradient(sizes):
  assert_equal(op.update, problem(**sizes))


def test_kernel_of_one_block():
  """Values alone; after three Sinkhorn rounds a fourth or a missing one still shows."""
  arguments, how = problem(16, m=2), HOW | dict(iterations=3)
  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    ours = jax.jit(functools.partial(op.update, **how, implementation="pallas"))(*arguments)
  for a, b in zip(ours, jax.jit(functools.partial(op.update, **how))(*arguments)):
    np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_entering(dtype):
  x, _, c, *site = problem(40, dtype=dtype)
  assert_equal(op.enter, (x, c, *site))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(tokens=21, dtype=jnp.bfloat16), dict(tokens=150, m=2)])
def test_leaving(sizes):
  assert_equal(op.leave, problem(**sizes)[:3], {})


@pytest.mark.slow
@pytest.mark.parametrize("straight", [0, 40])
def test_chunks_agree(monkeypatch, straight):
  """What one chunk leaves to the next must be there, in a loop and in straight code."""
  monkeypatch.setattr(kernel_few, "STRAIGHT", straight)
  monkeypatch.setattr(kernel_few, "width_of", lambda s: 128)
  assert_equal(op.update, problem(16, d=384, m=2, dtype=jnp.bfloat16))


@pytest.mark.slow
def test_blocks_and_cores_agree(monkeypatch):
  """Coefficients of a block are finished while the next is mixed: every block must get its own."""
  monkeypatch.setattr(kernel, "block_of", lambda tokens, dtype: 16)
  assert_equal(op.update, problem(64, m=2))


def test_a_token_is_alone():
  """The gradient of one token's outputs with respect to the other tokens is zero."""
  x, y, c, *site = problem(6)

  def at(x, y, c):
    return sum(jnp.sum(a[0, 2]) for a in update(x, y, c, *site))

  for gradient in jax.jit(jax.grad(at, argnums=(0, 1, 2)))(x, y, c):
    assert not np.delete(gradient[0], 2, axis=0).any()
    assert np.asarray(gradient[0, 2]).any()


def test_bad_input():
  x, y, c, fn, scale, base = problem(4)
  update = functools.partial(op.update, **HOW)
  with pytest.raises(ValueError, match="x has dtype float16"):
    update(x.astype(jnp.float16), y, c, fn, scale, base)
  with pytest.raises(ValueError, match=r"y is float32\[1, 4, 64\].*must be float32\[1, 4, 128\]"):
    update(x, y[..., :64], c, fn, scale, base)
  with pytest.raises(ValueError, match=r"fn is bfloat16\[24, 512\].*must be float32\[24, 512\]"):
    update(x, y, c, fn.astype(jnp.bfloat16), scale, base)
  with pytest.raises(ValueError, match="iterations=0"):
    op.update(x, y, c, fn, scale, base, **HOW | dict(iterations=0))
  with pytest.raises(ValueError, match="implementation='pallas' on cpu"):
    update(x, y, c, fn, scale, base, implementation="pallas")
  with (
      pltpu.force_tpu_interpret_mode(INTERPRETER),
      pytest.raises(ValueError, match="4 streams of 96 channels: the kernel takes 2 or 4 streams"),
  ):
    update(*problem(4, d=96), implementation="pallas")
