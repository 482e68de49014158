"""The layers that everything is made of. Weights are [out, in], as released.

Every parameter carries a leading axis `n`: a run of equal layers is one stacked module, which
`jax.lax.scan` slices. Inside a layer the axis is gone.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from deepseek_jax.quantised import Quantised, is_quantised

# Names of small values that cost much to compute, which remat "layer" keeps: 2 D bytes a row and
# layer of a mixture, whose backward pass runs its experts again by itself; 4 K bytes a row of a
# selection.
KEPT = ("mixture", "selection")


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


def rows_of(
    table: Float[Array, "R H"] | Quantised, ids: Int[Array, "..."]
) -> Float[Array, "... H"]:
  """Rows of a table, the last one for ids past its end. Of a `Quantised` one, these alone decoded.

  bfloat16 holds every released value exactly.
  """
  if is_quantised(table):
    return table.take(ids, jnp.bfloat16)
  return table.at[ids].get(mode="clip")


def _in_dtype_of_first(args: tuple[Array, ...], **_: Any) -> tuple[Array, ...]:
  return tuple(a.astype(args[0].dtype) for a in args)


class Adapter(nnx.LoRA):
  """Flax's LoRA times a scale: scale · (x A) B with A [in, r] and B [r, out], in the dtype of x.

  Parameters are f32. B starts at zero, so that an adapter changes nothing before its first step.
  """

  def __init__(self, d_in: int, rank: int, d_out: int, scale: float, *, rngs: nnx.Rngs):
    super().__init__(d_in, rank, d_out, promote_dtype=_in_dtype_of_first, rngs=rngs)
    self.scale = scale

  def __call__(self, x: Float[Array, "... D"], **_: Any) -> Float[Array, "... O"]:
    return self.scale * super().__call__(x)

  def grouped(self, x: Float[Array, "... G D"]) -> Float[Array, "... G R"]:
    """As `Linear.grouped`: groups share A and have the columns of B that make their outputs."""
    _, a, b = _in_dtype_of_first((x, self.lora_a[...], self.lora_b[...]))
    b = b.reshape(b.shape[0], x.shape[-2], -1)
    return self.scale * jnp.einsum("...gk,kgr->...gr", x @ a, b)

  def delta(self, dtype, precision: Any = None) -> Float[Array, "... O D"]:
    """What the adapter adds to the weight; leading axes are layers and experts."""
    a, b = self.lora_a[...].astype(dtype), self.lora_b[...].astype(dtype)
    return self.scale * jnp.einsum("...ik,...ko->...oi", a, b, precision=precision)


class Linear(nnx.Module):
  """y = W x, computed in the dtype of x; W is [out, in].

  W may be `Quantised`: it is decoded where it multiplies, so that of a scanned run the values of
  one layer exist at a time. An adapter (`adapters.adapt`) adds to y.
  """

  lora: Adapter | None = None

  def __init__(self, stack: tuple[int, ...], d_in: int, d_out: int, *, rngs: nnx.Rngs, dtype):
    self.weight = normal(rngs, (*stack, d_out, d_in), d_in**-0.5, dtype)
    self.bank = len(stack) > 1  # of matrices, whose products are made elsewhere from `dense`

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... O"]:
    y = jnp.einsum("...i,oi->...o", x, self.values(x.dtype))
    return y if self.lora is None else y + self.lora(x)

  def grouped(self, x: Float[Array, "... G D"]) -> Float[Array, "... G R"]:
    """G products: the first R rows of W with the first group of inputs, and so on."""
    w = self.values(x.dtype).reshape(x.shape[-2], -1, x.shape[-1])
    y = jnp.einsum("...gi,gri->...gr", x, w)
    return y if self.lora is None else y + self.lora.grouped(x)

  def dense(self, dtype) -> Float[Array, "... O D"]:
    """W with its adapter added, for products that are made elsewhere."""
    w = self.values(dtype)
    return w if self.lora is None else w + self.lora.delta(dtype)

  @property
  def decoded(self) -> bool:
    """Whether W is decoded at each use."""
    return is_quantised(self.weight.get_value())

  def values(self, dtype) -> Float[Array, "... O D"]:
    """W without its adapter."""
    w = self.weight.get_value()
    return w.dequantise(dtype) if is_quantised(w) else w.astype(dtype)


def _linears(module: nnx.Module) -> list[Linear]:
  return [m for _, m in nnx.iter_modules(module) if isinstance(m, Linear)]


def plain(module: nnx.Module) -> bool:
  """Whether kernels may read every weight as it is: nothing to decode, no adapter to add."""
  return not any(m.decoded or m.lora is not None for m in _linears(module))


def remade(module: nnx.Module) -> bool:
  """Whether a pass makes weights anew: decodes them, or adds adapters to those of a bank."""
  return any(m.decoded or (m.bank and m.lora is not None) for m in _linears(module))


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
