"""Hyper-connections against released values, by hand, and under large logits and cotangents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.nn import hyper_connections as hc

LIMIT = 5e-7  # a missing round, swapped axes or a lost eps show above this and nowhere else


@functools.partial(jax.jit, static_argnames="streams")
def mixing(z, scale, base, streams):
  return hc.mixing(z, scale, base, streams=streams, iterations=20, eps=1e-6)


def equal(ours, theirs, limit=LIMIT):
  np.testing.assert_allclose(ours, theirs, atol=limit, rtol=0)


@pytest.mark.parametrize(("case", "streams"), [("1", 4), ("20", 4), ("60", 4), ("mult2", 2)])
def test_coefficients_at_every_logit_scale(golden, case, streams):
  ops = golden("ops")
  base = ops["hc/base_mult2" if case == "mult2" else "hc/base"]
  c = mixing(ops[f"hc/mixes_{case}"][None], ops["hc/scale"], base, streams)
  equal(c.pre[0], ops[f"hc/pre_{case}"])
  equal(c.post[0], ops[f"hc/post_{case}"])
  equal(c.mix[0], ops[f"hc/comb_{case}"])


def test_one_site(golden):
  ops = golden("ops")
  site = jax.jit(functools.partial(hc.coefficients, iterations=20, eps=1e-6, norm_eps=1e-20))
  c = site(ops["hc/X"], ops["hc/fn"], ops["hc/scale"], ops["hc/base"])
  equal(c.pre, ops["hc/X_pre"])
  equal(c.post, ops["hc/X_post"])
  equal(c.mix, ops["hc/X_comb"])
  equal(jax.jit(hc.collapse)(ops["hc/X"], ops["hc/pre_in"]), ops["hc/collapse"], 1e-6)
  given = hc.Coefficients(*(jnp.asarray(ops[f"hc/X_{k}"]) for k in ("pre", "post", "comb")))
  equal(jax.jit(hc.expand)(ops["hc/y"], ops["hc/X"], given), ops["hc/expand"], 2e-6)


def test_an_asymmetric_mix_sums_over_its_first_index():
  """Stream k receives mix[j, k] of stream j; worked out by hand on streams 1, 10, 100, 1000."""
  mix = jnp.array([[0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0.25, 0, 0.75], [1, 0, 0, 0]], jnp.float32)
  x = jnp.array([1.0, 10, 100, 1000])[None, None, :, None]
  c = hc.Coefficients(
      pre=jnp.zeros((1, 1, 4)), post=jnp.array([[[0.0, 1, 2, 0.5]]]), mix=mix[None, None]
  )
  out = jax.jit(hc.expand)(jnp.full((1, 1, 1), 2.0), x, c)
  np.testing.assert_array_equal(out[0, 0, :, 0], [1000.5, 0.5 + 25 + 2, 10 + 4, 75 + 1])


def test_coefficient_ranges():
  """Collapse in (eps, 1 + eps); post in (0, 2) without eps; at logit 0 all are at the middle."""
  z = jnp.concatenate(
      [jnp.zeros((1, 1, 24)), 40 * jnp.ones((1, 1, 24)), -40 * jnp.ones((1, 1, 24))], 1
  )
  c = mixing(z, jnp.ones(3), jnp.zeros(24), 4)
  equal(c.pre[0, :, 0], [0.5 + 1e-6, 1 + 1e-6, 1e-6], 1e-7)
  equal(c.post[0, :, 0], [1, 2, 0], 1e-7)
  equal(c.mix[0, 0], np.full((4, 4), 0.25), 2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_stay_finite_under_large_logits_and_cotangents(dtype):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((1, 64, 4, 8)), dtype)
  y = jnp.asarray(rng.standard_normal((1, 64, 8)), dtype)
  fn = jnp.asarray(rng.standard_normal((24, 32)) * 32**-0.5, jnp.float32)

  @jax.jit
  def run(x, y, fn, base):
    def site(x, y, fn, base):
      c = hc.coefficients(x, fn, jnp.ones(3), base, iterations=20, eps=1e-6, norm_eps=1e-20)
      return hc.expand(y, x, c), hc.collapse(x, c.pre), c

    out, pull = jax.vjp(site, x, y, fn, base)
    return out[2], pull(jax.tree.map(lambda a: jnp.full_like(a, 1e6), out))

  for scale in (1.0, 20.0, 60.0, 200.0):
    c, gradients = run(x, y, fn * scale, jnp.zeros(24))
    assert all(a.dtype == jnp.float32 for a in c)
    np.testing.assert_allclose(c.mix.sum(-2), np.ones((1, 64, 4)), atol=1e-5)  # columns come last
    if scale == 1:
      np.testing.assert_allclose(c.mix.sum(-1), np.ones((1, 64, 4)), atol=1e-5)
    for gradient in gradients:
      assert np.isfinite(np.asarray(gradient, np.float32)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_hand_written_gradients_are_those_of_the_formula(dtype):
  rng = np.random.default_rng(1)
  draw = lambda *shape, dtype=jnp.float32: jnp.asarray(rng.standard_normal(shape), dtype)
  x, y = draw(2, 3, 4, 8, dtype=dtype), draw(2, 3, 8, dtype=dtype)
  pre, post, mix = draw(2, 3, 4), draw(2, 3, 4), draw(2, 3, 4, 4)
  wx, wy = draw(2, 3, 4, 8), draw(2, 3, 8)

  def ours(x, y, pre, post, mix):
    out = hc.expand(y, x, hc.Coefficients(pre, post, mix))
    total = jnp.sum(out.astype(jnp.float32) * wx)
    return total + jnp.sum(hc.collapse(x, pre).astype(jnp.float32) * wy)

  def formula(x, y, pre, post, mix):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    out = jnp.einsum("btk,btd->btkd", post, y) + jnp.einsum("btjk,btjd->btkd", mix, x)
    return jnp.sum(out * wx) + jnp.sum(jnp.einsum("btk,btkd->btd", pre, x) * wy)

  args = (x, y, pre, post, mix)
  limit = dict(rtol=1e-5, atol=1e-5) if dtype == jnp.float32 else dict(rtol=0.02, atol=0.05)
  for a, b in zip(*(jax.jit(jax.grad(f, argnums=range(5)))(*args) for f in (ours, formula))):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), **limit)
