"""Grouped product in jnp: decode the weights, multiply every row with its group's matrix."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.layout import Fp4, Fp8, unpack_fp4, unpack_fp8
from pallas_kernels.quantize import reference as formats


def decode(weights, outputs: int, inputs: int, dtype):
  """Weights [E, N, K]; bfloat16 holds every released one exactly."""
  if isinstance(weights, Fp4):
    return formats.dequantize_rows(*unpack_fp4(weights, outputs, inputs), 32, dtype)
  if isinstance(weights, Fp8):
    return formats.dequantize_tiles(*unpack_fp8(weights, outputs, inputs), 32, dtype)
  return weights


def grouped_matmul(x, weights, group_sizes, outputs: int):
  """See `op.grouped_matmul`."""
  return ragged(x, jnp.swapaxes(decode(weights, outputs, x.shape[1], x.dtype), 1, 2), group_sizes)


def ragged(x, matrices, group_sizes):
  """Rows of x times the matrix [K, N] of their group; exactly 0 behind the last group."""
  exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  out = lax.ragged_dot(
      x, matrices, group_sizes, precision=exact, preferred_element_type=jnp.float32
  )
  inside = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
  return jnp.where(inside[:, None], out, 0).astype(x.dtype)
