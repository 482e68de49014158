"""Channels of queries and outputs, natural or in the order of `layout.CHANNELS`: 4 planes.

The keys' planes are 8, half as wide. All arrays here are words, of one f32 or of two bf16 rows.
"""

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_attention.keys import HALF, LANES, lanes

WIDTH = 512


def _transposed(planes):
  """Blocks of 16 lanes of 4 planes, in both halves: block j of plane m is block m of plane j."""
  planes = list(planes)
  lane = lanes(planes[0].shape)
  for bit in (1, 2):
    by = 16 * bit
    lower = (lane & by) == 0
    for j in (j for j in range(4) if not j & bit):
      a, b = planes[j], planes[j | bit]
      planes[j] = jnp.where(lower, a, pltpu.roll(b, by, 1))
      planes[j | bit] = jnp.where(lower, pltpu.roll(a, LANES - by, 1), b)
  return planes


def _planes(bits):
  return [bits[:, m * LANES : (m + 1) * LANES] for m in range(4)]


def to_channels(bits):
  """Words [·, 512] in the order of `layout.CHANNELS`.

  Within a plane channels with equal remainders by 8 come together, 16 lanes; then blocks of 16
  lanes change places between planes.
  """
  lane = lanes((bits.shape[0], LANES))
  source = (lane & 15) << 3 | lane >> 4
  planes = [jnp.take_along_axis(plane, source, axis=1) for plane in _planes(bits)]
  return jnp.concatenate(_transposed(planes), axis=1)


def from_channels(bits):
  """Undoes `to_channels`."""
  lane = lanes((bits.shape[0], LANES))
  source = (lane & 7) << 4 | lane >> 3
  planes = [jnp.take_along_axis(plane, source, axis=1) for plane in _transposed(_planes(bits))]
  return jnp.concatenate(planes, axis=1)


def spread_queries(bits):
  """Bits of [N, 512] as those of [q | 0] over [0 | q], [2N, 1024]."""
  lower = lanes((bits.shape[0], LANES)) < HALF
  e, f = [None] * 8, [None] * 8
  for m in range(4):
    plane = bits[:, m * LANES : (m + 1) * LANES]
    left, right = jnp.where(lower, plane, 0), jnp.where(lower, 0, plane)
    e[m], f[m] = left, pltpu.roll(left, HALF, 1)
    e[m + 4], f[m + 4] = pltpu.roll(right, HALF, 1), right
  return jnp.concatenate([jnp.concatenate(x, axis=1) for x in (e, f)], axis=0)


def added_pairs(pairs, n: int):
  """Values of pairs [2N, 1024] as [N, 512], E and F added."""
  lower = lanes((n, LANES)) < HALF
  e = lambda m: pairs[:n, m * LANES : (m + 1) * LANES]
  f = lambda m: pairs[n:, m * LANES : (m + 1) * LANES]
  planes = []
  for m in range(4):
    straight = jnp.where(lower, e(m), f(m + 4))
    rotated = pltpu.roll(jnp.where(lower, e(m + 4), f(m)), HALF, 1)
    planes.append(straight + rotated)
  return jnp.concatenate(planes, axis=1)
