"""Rotations as the kernels multiply them."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

LANES = 128


def rotation(
    cos: Float[Array, "S R2"], sin: Float[Array, "S R2"], *, inverse: bool = False
) -> tuple[Float[Array, "S 128"], Float[Array, "S 128"]]:
  """Cos and sin of the last 128 channels of a head, the sign of each channel in the sine.

  y_c = x_c · cos_c + x_{c ^ 1} · sin_c; channels before the last 2·R2 stay as they are.
  """
  sign = np.array([1.0, -1.0] if inverse else [-1.0, 1.0], np.float32)
  wide = lambda a: jnp.repeat(a, 2, axis=-1)
  front = ((0, 0), (LANES - 2 * cos.shape[-1], 0))
  cos = jnp.pad(wide(cos), front, constant_values=1.0)
  return cos, jnp.pad(wide(sin) * np.tile(sign, sin.shape[-1]), front)
