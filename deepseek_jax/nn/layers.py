"""The two layers that everything is made of. Weights are [out, in], as released.

Every parameter carries a leading axis `n`: a run of equal layers is one stacked module, which
`jax.lax.scan` slices. Inside a layer the axis is gone.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, dtype) -> nnx.Param:
  """A parameter drawn from N(0, std²)."""
  return nnx.Param((std * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype))


def constant(shape: tuple[int, ...], value: float, dtype=jnp.float32) -> nnx.Param:
  """A parameter that starts at `value` everywhere."""
  return nnx.Param(jnp.full(shape, value, dtype))


def dot(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
  """An einsum with products summed and returned in f32.

  XLA's CPU backend has no bf16 product with an f32 sum; there the operands are widened first, which
  gives the same products.
  """
  if a.dtype == jnp.float32:
    return jnp.einsum(spec, a, b)
  f32 = jnp.float32
  return jax.lax.platform_dependent(
      a, b,
      cpu=lambda a, b: jnp.einsum(spec, a.astype(f32), b.astype(f32)),
      default=lambda a, b: jnp.einsum(spec, a, b, preferred_element_type=f32),
  )  # fmt: skip


class Linear(nnx.Module):
  """y = W x, computed in the dtype of x; W is [out, in]."""

  def __init__(self, stack: tuple[int, ...], d_in: int, d_out: int, *, rngs: nnx.Rngs, dtype):
    self.weight = normal(rngs, (*stack, d_out, d_in), d_in**-0.5, dtype)

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... O"]:
    return jnp.einsum("...i,oi->...o", x, self.weight[...].astype(x.dtype))


class RMSNorm(nnx.Module):
  """w · x / rms(x) in f32, then the input's dtype (spec 3.1)."""

  def __init__(self, stack: tuple[int, ...], width: int, eps: float, *, dtype):
    self.weight = constant((*stack, width), 1.0, dtype)
    self.eps = eps

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    return rms_norm(x, self.weight[...], self.eps)


def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "... D"]:
  """RMSNorm of spec 3.1. eps is 1e-20: an all-zero row gives 0 · 1e10 = 0."""
  v = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
  return (weight.astype(jnp.float32) * (v * scale)).astype(x.dtype)
