"""Rotary embedding with the two released tables (spec 3): plain in window layers, else YaRN."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from deepseek_jax.config import ModelConfig
from pallas_kernels import dispatch


class Rotation(NamedTuple):
  """cos and sin of position · frequency, one column a channel pair.

  `wide` is what `_rotate_by_product` multiplies, made once for all layers; None: made when needed.
  """

  cos: Float[Array, "B T R2"]
  sin: Float[Array, "B T R2"]
  wide: tuple[Float[Array, "B T H"], Float[Array, "B T H"]] | None = None

  def widened(self, width: int) -> "Rotation":
    """With `wide` for heads of up to `width` channels, where it is of use."""
    if dispatch.platform() != "tpu":
      return self
    front = ((0, 0), (0, 0), (width - 2 * self.cos.shape[-1], 0))
    cos = jnp.pad(jnp.repeat(self.cos, 2, axis=-1), front, constant_values=1.0)
    sin = jnp.pad(jnp.repeat(self.sin, 2, axis=-1), front)
    # A barrier: XLA would make them again in every layer.
    return self._replace(wide=jax.lax.optimization_barrier((cos, sin)))


def frequencies(config: ModelConfig, ratio: int) -> np.ndarray:
  """f32 [R/2] angle per position of each channel pair, for layers of compression `ratio`.

  Ratio 0 uses `rope_theta` alone. Others use `compress_rope_theta` with YaRN: pairs below `low`
  keep their frequency, above `high` it is divided by the factor, with a ramp between. There is no
  magnitude factor.
  """
  width = config.qk_rope_head_dim
  theta = config.compress_rope_theta if ratio else config.rope_theta
  # The power in f64, then f32: an f32 power is off by one ulp in some pairs, 0.03 rad at 1M.
  exponent = (np.arange(0, width, 2, dtype=np.float32) / np.float32(width)).astype(np.float64)
  plain = np.float32(1.0) / (theta**exponent).astype(np.float32)
  if ratio == 0:
    return plain
  yarn = config.rope_scaling

  def correction(rotations: float) -> float:
    span = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
    return width * math.log(span) / (2 * math.log(theta))

  low = max(math.floor(correction(float(yarn.beta_fast))), 0)
  high = min(math.ceil(correction(float(yarn.beta_slow))), width - 1)
  ramp = (np.arange(width // 2, dtype=np.float32) - low) / max(high - low, 1e-3)
  ramp = np.clip(ramp, 0, 1).astype(np.float32)
  return (plain / np.float32(yarn.factor) * ramp + plain * (1 - ramp)).astype(np.float32)


def rotation(positions: Int[Array, "B T"], freqs: np.ndarray) -> Rotation:
  """The table rows at `positions`. The angle is an f32 product, as released."""
  angle = positions.astype(jnp.float32)[..., None] * freqs
  return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(
    x: Float[Array, "B T ... H"], table: Rotation, *, inverse: bool = False
) -> Float[Array, "B T ... H"]:
  """Rotates the last R channels of x as adjacent pairs, in f32; `inverse` turns back."""
  if dispatch.platform() == "tpu":
    return _rotate_by_product(x, table, inverse)
  width = 2 * table.cos.shape[-1]
  shape = table.cos.shape[:2] + (1,) * (x.ndim - 3) + (width // 2,)
  cos, sin = table.cos.reshape(shape), table.sin.reshape(shape)
  if inverse:
    sin = -sin
  pairs = x[..., -width:].astype(jnp.float32).reshape(*x.shape[:-1], width // 2, 2)
  even, odd = pairs[..., 0], pairs[..., 1]
  turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
  turned = turned.reshape(*x.shape[:-1], width).astype(x.dtype)
  return jnp.concatenate([x[..., :-width], turned], axis=-1)


def _rotate_by_product(
    x: Float[Array, "B T ... H"], table: Rotation, inverse: bool
) -> Float[Array, "B T ... H"]:
  """`rotate` as x · cos + x' · sin over all channels; x' swaps pairs, as a product with signs.

  A TPU lays out an axis of pairs anew, several copies a rotation. The product is exact: a sum of
  one channel and zeros. Over the last 128 channels alone it multiplies less and costs slices: 86
  kernels in a Reuse layer of a prefill chunk instead of 78. A NaN or an infinity reaches all
  rotated channels of its row.
  """
  width, h = 2 * table.cos.shape[-1], x.shape[-1]
  swap = np.zeros((h, h), np.float32)
  even, sign = np.arange(h - width, h, 2), -1 if inverse else 1
  swap[even + 1, even], swap[even, even + 1] = -sign, sign
  other = jnp.einsum(
      "...i,io->...o", x, jnp.asarray(swap, x.dtype), precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
  )  # fmt: skip
  if table.wide is None or h > table.wide[0].shape[-1]:
    table = table.widened(h)
  shape = (*table.cos.shape[:2], *(1,) * (x.ndim - 3), h)
  cos, sin = (a[..., -h:].reshape(shape) for a in table.wide)
  return (x.astype(jnp.float32) * cos + other * sin).astype(x.dtype)
