"""RMSNorm against the released values."""

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.nn.layers import rms_norm

EPS = 1e-20


def test_bf16_rms_norm_gives_the_released_bits(golden):
  ops = golden("ops")
  x, w = (ops[f"rms/{name}_bits"].view(jnp.bfloat16) for name in ("x", "w"))
  y = jax.jit(rms_norm, static_argnums=2)(x, w, EPS)
  np.testing.assert_array_equal(np.asarray(y).view(np.uint16), ops["rms/y_bits"])


def test_f32_rms_norm_of_rows_from_zero_to_huge(golden):
  ops = golden("ops")
  y = np.asarray(jax.jit(rms_norm, static_argnums=2)(ops["rms/x"], ops["rms/w"], EPS))
  np.testing.assert_allclose(y, ops["rms/y_f32"], rtol=1e-6, atol=0)
  zero = (ops["rms/x"] == 0).all(-1)
  assert zero.any()
  assert not y[zero].any()
