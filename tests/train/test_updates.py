"""Newton–Schulz and the row and column balance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from deepseek_jax.train import updates

# Compiles in less than half the time; the arrays are too small to notice the slower code.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def rms(x, axis=None):
  return np.sqrt(np.mean(np.square(x), axis=axis))


def test_newton_schulz_equals_optax_matrix_by_matrix():
  x = jax.random.normal(jax.random.key(3), (2, 3, 7, 5))
  ours = quick_jit(updates.orthogonalize)(x)
  theirs = optax.contrib.scale_by_muon(
      ns_coeffs=updates.NEWTON_SCHULZ, ns_steps=10, beta=0.0, nesterov=False
  )
  with jax.numpy_dtype_promotion("standard"):
    single = quick_jit(lambda matrix: theirs.update(matrix, theirs.init(matrix))[0])
    for i in np.ndindex(2, 3):
      np.testing.assert_allclose(ours[i], single(x[i]), atol=2e-5)


def test_balance_equalises_rows_and_columns():
  x = np.random.default_rng(7).normal(size=(2, 60, 16))
  x *= np.exp(np.random.default_rng(8).normal(size=(2, 60, 1)))
  x *= np.exp(np.random.default_rng(9).normal(size=(2, 1, 16)))
  y = updates.balance(jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(rms(y, -1), 1.0, rtol=1e-5)
  np.testing.assert_allclose(rms(y, -2), 1.0, rtol=1e-3)
  assert np.all(np.sign(y) == np.sign(x))
  ratio = np.log(np.asarray(y) / x)
  cross = ratio - ratio.mean(-1, keepdims=True) - ratio.mean(-2, keepdims=True)
  np.testing.assert_allclose(cross, -ratio.mean((-2, -1), keepdims=True) + 0 * cross, atol=1e-5)


def test_balance_masks_rows_far_below_the_mean():
  x = np.ones((5, 4), np.float32)
  x[0] = 0.0
  x[1] = 2e-4
  x[2] = 2e-3
  y = updates.balance(jnp.asarray([x, 1e6 * x]))
  np.testing.assert_array_equal(y[:, :2], 0.0)
  np.testing.assert_allclose(y[:, 2:], 1.0, rtol=1e-5)
