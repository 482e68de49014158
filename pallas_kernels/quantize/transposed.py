"""Stored words transposed, with entries along lanes: what the unpack kernels of FP4 rows share.

The words of an entry then are rows of registers, and the channels of a word go to neighbouring rows
by a strided store: a lane costs one transposition of its words and one of its values. Values are
pairs, two rows of the result in an int32, as bf16 rows 2i and 2i + 1 lie in a TPU's memory.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import decode, lanes
from pallas_kernels.quantize.formats import E2M1
from pallas_kernels.quantize.lanes import LANES, SUBLANES

NIBBLES = 8  # Of a word.
# Rows from one word to the next, or one word's values to the next's: a store whose stride is a
# multiple of eight meets the same bank of the memory again and again.
PADDED = NIBBLES + 1
VALUES = PADDED * LANES // NIBBLES  # Rows for the values of 128 channels.


def square(words):
  """Words [n, 128] transposed, [128, 128] of which n lanes mean something."""
  missing = LANES - words.shape[0]
  if missing:
    words = jnp.concatenate([words, jnp.zeros((missing, LANES), words.dtype)])
  return words.T


def entry_words(rows):
  """Words [8, 128] of entry 8 · (16s + k) + e, at row s and lane 8k + e, to row e, lane 16s + k."""
  l, s = lanes.lane(), lanes.sublane()
  x = lanes.gather(rows, (l & 15) << 3 | l >> 4)
  for j in range(3):
    row, lane = 1 << j, 16 << j
    up = pltpu.roll(pltpu.roll(x, SUBLANES - row, 0), lane, 1)
    down = pltpu.roll(pltpu.roll(x, row, 0), LANES - lane, 1)
    in_row, in_lane = s >> j & 1, l >> 4 + j & 1
    x = jnp.where(in_row == in_lane, x, jnp.where(in_row < in_lane, up, down))
  return x


def by_integers(words, scales, values, packed: bool):
  """Pairs [128 lanes, 128 channels] of entries a and b.

  Args:
    words: for each eight words of 128 channels those of a and of b, int32 [8, 128].
    scales: for each of them what `decode.both_scales` makes of the rows.
    values: scratch, int32 [VALUES, 128].
    packed: two values are computed in a word.
  """
  for i, (both, scale) in enumerate(zip(words, scales)):
    first = PADDED * SUBLANES * i
    for n, pair in enumerate(decode.row_pairs(*both, scale, E2M1, packed)):
      values[pl.ds(first + n, SUBLANES, stride=PADDED), :] = pair
  rows = [values[pl.ds(PADDED * w, NIBBLES), :] for w in range(LANES // NIBBLES)]
  return jnp.concatenate(rows).T


def by_casts(words, scales):
  """The same, as [64, 128] of the even lanes and of the odd ones.

  Args:
    words: of 128 channels of a and of b, int32 [16, 128].
    scales: of either, [1, 128] rows of pairs of equal bf16, one for every 16 channels.
  """
  both = []
  for some, rows in zip(words, scales):
    values = pltpu.bitcast(some, jnp.float4_e2m1fn).astype(jnp.bfloat16)
    scaled = []
    for g, row in enumerate(rows):
      scale = pltpu.bitcast(jnp.broadcast_to(row, (SUBLANES, LANES)), jnp.bfloat16)
      scaled.append(values[16 * g : 16 * (g + 1)] * scale)
    both.append(pltpu.bitcast(jnp.concatenate(scaled).T, jnp.int32))
  return lanes.halves(*both)
