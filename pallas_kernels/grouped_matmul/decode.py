"""Packed words to matrices [inputs, outputs] inside the kernel; see `layout` for their bits."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul.layout import GROUP, LANES, UNIT

# An E2M1 magnitude at the lowest bits of an E5M2 is its value divided by this.
E5M2_UNIT = 2.0**14
_NAN = 0x7FC0
_SIGNED = 1 << 32


def _bits(pattern):
  return pattern - _SIGNED if pattern >> 31 else pattern


def _right(words, bits):
  return lax.shift_right_logical(words, jnp.full(words.shape, bits, jnp.int32))


def _shifted(words, left):
  return words << left if left > 0 else _right(words, -left)


def factors(scales_ref, out_ref, packed: bool):
  """Writes scales [R, n] of four bytes with the bits of their floats.

  Of bf16, twice a word (`packed`), or of f32; int32 [n / 128, K / 32, 128]. Byte 0 reads as 0.
  """
  rows = out_ref.shape[1] // 4
  words = scales_ref[:rows, :]
  for t in range(4):
    if packed:
      low = _shifted(words, 7 - 8 * t) & 0x7F80
      bits = jnp.where(low == 0x7F80, _NAN, low)
      bits |= bits << 16
    else:
      high = words << 23 - 8 * t if t < 3 else _right(words, 1)
      high &= 0x7F800000
      bits = jnp.where(high == 0x7F800000, _NAN << 16, high)
    for tile in range(out_ref.shape[0]):
      out_ref[tile, pl.ds(t * rows, rows), :] = bits[:, tile * LANES : (tile + 1) * LANES]


def inputs(piece: int, k: int, fp4: bool) -> list[slice]:
  """Numbers of the 256 inputs that a piece holds, as slices of them in its order."""
  if fp4:
    half = UNIT // 2
    return [slice(piece * half + h * k // 2, (piece + 1) * half + h * k // 2) for h in (0, 1)]
  return [slice(piece * UNIT, (piece + 1) * UNIT)]


def elements(words_ref, lanes, number: int, k: int):
  """The FP4 piece as E5M2, two arrays [128, lanes], without scales and divided by E5M2_UNIT."""
  size = UNIT // 2
  words = words_ref[number * size // 4 : (number + 1) * size // 4, lanes]
  return _fp4(words, 0), _fp4(words, 1)


def factor_rows(ref, group: int, first, width: int):
  """Scales of a group of 32 inputs, f32 [8, width] in all sublanes, of factors not `packed`."""
  return lax.bitcast_convert_type(_everywhere(ref, group, first, width), jnp.float32)


def piece(words_ref, factors_ref, first, lanes, number: int, k: int, fp4: bool, packed: bool):
  """Matrix [256, lanes] of a piece, bf16 (`packed`) or f32.

  `first` is the number of its first 128 lanes.
  """
  decoded = []
  for i, part in enumerate(inputs(number, k, fp4)):
    size = part.stop - part.start
    words = words_ref[number * size // 4 : (number + 1) * size // 4, lanes]
    values = _fp4(words, i) if fp4 else pltpu.bitcast(words, jnp.float8_e4m3fn)
    for g in range(size // GROUP):
      group = values[g * GROUP : (g + 1) * GROUP]
      factor = _everywhere(factors_ref, part.start // GROUP + g, first, words.shape[1])
      decoded.append(_scaled(group, factor, packed))
  return jnp.concatenate(decoded, axis=0)


def _everywhere(ref, row: int, first, width: int):
  """Row [8, width] of ref [lanes / 128, rows, 128] in all sublanes, which a load does for free."""
  # The interpreter has no stride 0; a broadcast turns every register on the vector unit.
  one = lambda t: jnp.broadcast_to(ref[first + t, pl.ds(row, 1), :], (8, LANES))
  all_at_once = lambda t: ref[first + t, pl.ds(row, 8, stride=0), :]
  load = one if dispatch.interpreted() else all_at_once
  tiles = [load(t) for t in range(width // LANES)]
  return jnp.concatenate(tiles, axis=1)


def _fp4(words, half: int):
  """E5M2 [4 rows, n] of words [rows, n]: their first or their second half of the inputs."""
  if half == 0:
    return pltpu.bitcast(words & _bits(0x8E8E8E8E), jnp.float8_e5m2)
  magnitude, sign = _right(words, 3) & 0x0E0E0E0E, words << 7 & _bits(0x80808080)
  return pltpu.bitcast(magnitude | sign, jnp.float8_e5m2)


def _scaled(values, factor, packed):
  if packed:
    factor = pltpu.bitcast(jnp.concatenate([factor] * 2, axis=0), jnp.bfloat16)
    return values.astype(jnp.bfloat16) * factor
  factor = lax.bitcast_convert_type(jnp.concatenate([factor] * 4, axis=0), jnp.float32)
  return values.astype(jnp.float32) * factor
