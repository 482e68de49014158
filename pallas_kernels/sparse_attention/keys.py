"""Packed rows in VMEM to keys, a few rows a step.

Rows X and Y are decoded together. bf16 keys of X and Y are the low and the high halves of words: as
bf16 rows they alternate.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
HALF = 64


def lanes(shape):
  """Number of each lane."""
  return jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _bf16(words):
  return pltpu.bitcast(words, jnp.bfloat16)


def _f32(words):
  return pltpu.bitcast(words, jnp.float32)


# Small floats become bf16 or f32 by moving their bits under an exponent that makes subnormals
# normal numbers `x`, off by a constant: min(x, 2x − constant) is the value of both kinds.


def _small_floats(magnitudes, step: int, constant: float, packed: bool):
  if packed:
    x = _bf16(magnitudes + np.int32(step * 0x10001))
    return jnp.minimum(x, x + x - jnp.bfloat16(constant))
  x = _f32(magnitudes + np.int32(step << 16))
  return jnp.minimum(x, x + x - jnp.float32(constant))


def _shift(x, by: int):
  if by == 0:
    return x
  return x << by if by > 0 else jax.lax.shift_right_logical(x, np.int32(-by))


def _mask(low: int, packed: bool):
  """`low` in the upper half of a word, and in the lower one too if it holds two values."""
  return np.uint32(low * 0x10001 if packed else low << 16).astype(np.int32)


def _plane(word, bit: int, bits: int, packed: bool):
  """E2M1 or E4M3 values in the `bits` bits from `bit` on of every half word (or word)."""
  mantissa, step, constant = (1, 0x3F00, 1.0) if bits == 4 else (3, 0x3C00, 2.0**-6)
  top = 7 - mantissa if packed else 23 - mantissa
  mask = ((1 << (bits - 1)) - 1) << (7 - mantissa)
  magnitudes = _shift(word, top - bit) & _mask(mask, packed)
  signs = _shift(word, (15 if packed else 31) - (bit + bits - 1)) & _mask(0x8000, packed)
  return _small_floats(magnitudes, step, constant, packed), signs


def _decode(x, y, bits: int, scale, packed: bool, dtype, write):
  """Calls write(n, bits of the values): plane n of the words in X and Y, a row of Y under one of X.

  f32 values of X and Y are written one after the other, bf16 values as the halves of a word.
  """
  per_word = 32 // bits
  if packed:
    low = (x & 0xFFFF) | (y << 16)
    high = _shift(x, -16) | (y & np.int32(-65536))
  for n in range(per_word):
    if packed:
      half = low if n < per_word // 2 else high
      value, signs = _plane(half, bits * (n % (per_word // 2)), bits, True)
      write(n, 0, pltpu.bitcast(value * scale, jnp.int32) ^ signs)
      continue
    both = []
    for word, s in zip((x, y), scale):
      value, signs = _plane(word, bits * n, bits, False)
      both.append(pltpu.bitcast(value * s, jnp.int32) ^ signs)
    if dtype == jnp.float32:
      write(n, 0, both[0])
      write(n, 1, both[1])
    else:  # exact: the values have at most 7 significant bits
      write(n, 0, _shift(both[0], -16) | (both[1] & np.int32(-65536)))


def _entry_scales(x, y, packed: bool):
  """E4M3 bytes of X and Y; the NaN of the format stays NaN."""
  fix = lambda s: jnp.where(s == 0x7F, 0x43C, s)
  x, y = fix(x), fix(y)
  if packed:
    return _small_floats(x << 4 | y << 20, 0x3C00, 2.0**-6, True)
  return tuple(_small_floats(s << 20, 0x3C00, 2.0**-6, False) for s in (x, y))


def _window_scales(x, y, packed: bool):
  """E8M0 bytes; 0 and 255 become 0 and infinity, whose product with the code 0 is NaN."""
  return _bf16(x << 7 | y << 23) if packed else (_f32(x << 23), _f32(y << 23))


def entry_steps(buffer, keys, facts, packed: bool, dtype):
  """Steps that decode gathered rows to keys, the bits of [K/2, 1024]; see `selection.facts`."""
  count = buffer.shape[1]
  quarter = count // 4
  upper = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0) >= HALF
  by_pair = jnp.where(upper, facts[2:3], facts[0:1]).T
  size = 8
  lane = lanes((size, LANES))
  word = lane & (HALF - 1)
  lower = lane < HALF
  block = word >> 3
  first = (lane & HALF) + block
  byte = ((word >> 1) & 3) << 3

  def step(at):
    fact = by_pair[at : at + size]
    words, scales = [], []
    for part in (0, 1):  # X and Y
      here = pl.ds(part * quarter + at, size)
      there = pl.ds(count // 2 + part * quarter + at, size)
      e, f = ([buffer[row, ds] for row in (0, 1)] for ds in (here, there))
      bit = lambda n, part=part: (fact & np.int32(1 << (n + 16 * part))) != 0
      mine = jnp.where(bit(11), jnp.where(lower, e[1], f[1]), jnp.where(lower, e[0], f[0]))
      other = jnp.where(bit(12), jnp.where(lower, f[1], e[1]), jnp.where(lower, f[0], e[0]))
      other = pltpu.roll(other, HALF, 1)
      unrotated = (fact >> (block + 16 * part)) & 1
      words.append(jnp.where(unrotated == 1, mine, other))
      source = first + ((fact >> (5 + 16 * part)) & 0x38)
      scale = jnp.take_along_axis(jnp.where(lower, mine, other), source, axis=1)
      present = (fact << (18 - 16 * part)) >> 31
      scales.append((scale >> byte) & 0xFF & present)
    scale = _entry_scales(*scales, packed)

    def write(n, part, value):
      row = part * quarter + at
      keys[row : row + size, n * LANES : (n + 1) * LANES] = value

    _decode(*words, 4, scale, packed, dtype, write)

  return [functools.partial(step, at) for at in range(0, quarter, size)]


def window_steps(window, keys, scale_words, packed: bool, dtype):
  """Steps that decode the ring to keys, the bits of [W, 512] in the order of `layout.CHANNELS`.

  Args:
    window: int32 [W, 128].
    keys: where they go.
    scale_words: int32 [W/32, 128], 0 for slots that are not keys.
    packed: see `kernel.Blocks`.
    dtype: of the keys.
  """
  half = window.shape[0] // 2
  size = 32
  shape = (size, LANES)
  lane = lanes(shape)
  word = lane & (HALF - 1)
  natural = 2 * word + (lane >> 6)
  slot = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  source = 4 * slot + (word >> 4)
  byte = ((word >> 2) & 3) << 3

  def step(at):
    words, scales = [], []
    for part in (0, 1):
      row = part * half + at
      words.append(jnp.take_along_axis(window[row : row + size], natural, axis=1))
      scale = jnp.broadcast_to(scale_words[row // size : row // size + 1], shape)
      scales.append((jnp.take_along_axis(scale, source, axis=1) >> byte) & 0xFF)
    scale = _window_scales(*scales, packed)

    def write(n, part, value):
      row = part * half + at
      keys[row : row + size, n * LANES : (n + 1) * LANES] = value

    _decode(*words, 8, scale, packed, dtype, write)

  return [functools.partial(step, at) for at in range(0, half, size)]
