"""Selected slots as the gather and the decoding need them: integers of one request in vectors.

Entry k of the first half of the K slots is E of pair k, entry K/2 + k is F; the first K/4 pairs go
to rows X, the others to rows Y. A row of slots comes as its four quarters [8, 128], twice: X and Y
of E, X and Y of F, −1 for absent slots.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_attention import layout

LANES = layout.LANES
_HALF = 64


def padded(slots):
  """Slots [B, K] as [B, 512]: quarters of 128 lanes."""
  b, k = slots.shape
  if k == 4 * LANES:
    return slots
  quarters, after = slots.reshape(b, 4, k // 4), ((0, 0), (0, 0), (0, LANES - k // 4))
  return jnp.pad(quarters, after, constant_values=-1).reshape(b, 4 * LANES)


def quarters(row):
  """A row [1, 512] as [8, 128]."""
  return jnp.concatenate([row[:, i * LANES : (i + 1) * LANES] for i in range(4)] * 2, axis=0)


def first_rows(slots, rows: int):
  """First of the two rows that hold each entry, in a table of `rows`."""
  at = jnp.maximum(slots, 0)
  place = at & (layout.PERIOD - 1)
  row = (at >> 4) * 9 + ((place * layout.WORDS) >> 7)
  # The second row of the last entry of a period can lie outside of the table, and is not needed.
  return jnp.minimum(row - _last(place), rows - 2)


def _last(place):
  return jnp.where(place == layout.PERIOD - 1, 1, 0)


def facts(slots):
  """A word for every row of X and Y [8, 128], of E in row 0 and of F in row 2.

  Low half X, high half Y: bits 0 to 7 which of its eighths the rotation does not move, 8 to 10 lane
  of the scales, 11 and 12 rows, 13 present.
  """
  place = jnp.maximum(slots, 0) & (layout.PERIOD - 1)
  offset, back = (place * layout.WORDS) & 127, _last(place)
  late, block = offset >> 6, (offset & (_HALF - 1)) >> 3
  below = jnp.where(late == 1, (1 << block) - 1, (0xFF << (block + 1)) & 0xFF)
  in_f = (jax.lax.broadcasted_iota(jnp.int32, slots.shape, 0) & 2) != 0
  both = (late | back) | back << 1
  other = pltpu.roll(both, 2, 0)
  half = jnp.where(
      in_f,
      0xFF - below | (both >> 1) << 11 | (other >> 1) << 12,
      below | (both & 1) << 11 | (other & 1) << 12,
  )
  half = half | block << 8 | jnp.where(slots >= 0, 1 << 13, 0)
  return half | pltpu.roll(half, 7, 0) << 16


def masks(slots, quarter: int, interleaved: bool):
  """Which columns of the scores are there: [8, K/2] in whole lanes, of E in row 0, of F in row 2.

  Rows of X and Y alternate if two fill a word.
  """
  out = []
  for first in range(0, 2 * quarter, LANES):
    column = first + jax.lax.broadcasted_iota(jnp.int32, slots.shape, 1)
    in_y = column & 1 if interleaved else jnp.where(column >= quarter, 1, 0)
    lane = column >> 1 if interleaved else column - in_y * quarter
    found = jnp.take_along_axis(slots, lane & (LANES - 1), axis=1)
    out.append(jnp.where(in_y == 1, pltpu.roll(found, 7, 0), found))
  return jnp.concatenate(out, axis=1)


def columns(row, window: int, interleaved: bool):
  """Slots of a ring [·, 128] in the order of the scores."""
  if not interleaved:
    return row
  lane = jax.lax.broadcasted_iota(jnp.int32, row.shape, 1)
  source = (lane & 1) * (window // 2) + (lane >> 1)
  return jnp.take_along_axis(row, source & (LANES - 1), axis=1)


def in_scales(row, rows: int):
  """Slots of a ring [rows, 128] where their scale words are: 32 slots of 4 words a row."""
  at = lambda axis: jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), axis)
  return jnp.take_along_axis(row, (32 * at(0) + (at(1) >> 2)) & (LANES - 1), axis=1)
