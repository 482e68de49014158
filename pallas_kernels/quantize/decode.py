"""Words of codes and scale bytes to bf16, for the unpack kernels.

A small float becomes a bf16 (two rows a word) or an f32 by moving its bits under an exponent that
makes subnormals normal numbers `x`, off by a constant c: min(x, 2x - c) is the value of both kinds.
"""

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import current_chip
from pallas_kernels.quantize import lanes
from pallas_kernels.quantize.formats import E2M1, Element

# How values are computed: one a word, two a word, or by casts of the chip.
FLOAT32, BFLOAT16, FLOAT4 = "float32", "bfloat16", "float4"


def arithmetic() -> str:
  """The fastest on the chip that is compiled for."""
  chip = current_chip()
  if chip.float4_casts:
    return FLOAT4
  return BFLOAT16 if chip.bf16_vectors else FLOAT32


# Of an element moved under a bf16 exponent: bits of its magnitude, exponent put under it, c.
_PLACED = {"e2m1": (0x01C0, 0x3F00, 1.0), "e4m3": (0x07F0, 0x3C00, 2.0**-6)}
_E4M3_NAN = 480.0  # what its bits are without it


def _twice(pattern: int) -> int:
  return lanes.signed(pattern << 16 | pattern)


def _floats(words, element: Element, left: int, packed: bool):
  """Elements at bits `left` lower than their place in a bf16, as floats without their sign.

  `words` holds one for each half (`packed`), or one in the high half.
  """
  mask, exponent, offset = _PLACED[element.name]
  if packed:
    x = pltpu.bitcast((lanes.shift(words, left) & _twice(mask)) + _twice(exponent), jnp.bfloat16)
  else:
    x = lanes.as_f32((lanes.shift(words, left) & (mask << 16)) + (exponent << 16))
  value = jnp.minimum(x, x + x - jnp.asarray(offset, x.dtype))
  if element != E2M1:
    value = jnp.where(x == jnp.asarray(_E4M3_NAN, x.dtype), jnp.asarray(jnp.nan, x.dtype), value)
  return value


def scale_bits(byte, kind: str):
  """bf16 bits, in the high half, of scale bytes."""
  if kind == "e8m0":
    # The byte 0, 2^-127, is below the normal numbers and never stored: it reads as 0.
    return byte << 23 | jnp.where(byte == 0xFF, 1 << 22, 0)
  bits = ((byte & 0x7F) << 20) + (0x3C00 << 16)
  x = lanes.as_f32(bits)
  value = lanes.as_int(jnp.minimum(x, x + x - 2.0**-6)) | (byte & 0x80) << 24
  return jnp.where(byte & 0x7F == 0x7F, 0x7FC0 << 16, value)


def twice(bits):
  """Pairs of equal bf16 of bf16 bits in the high half."""
  return lanes.shift(bits, -16) | bits & lanes.signed(0xFFFF0000)


def both_scales(a, b, packed: bool) -> tuple:
  """Scales of rows a and b as `row_pairs` takes them, from bf16 bits in the high halves."""
  return (lanes.shift(a, -16) | b,) if packed else (a, b)


def row_pairs(a, b, scales: tuple, element: Element, packed: bool) -> list:
  """Registers of bf16 pairs, one for each channel of a word: rows `a` low, rows `b` high."""
  bits = element.bits
  low, high = lanes.halves(a, b)
  top = 10 if element != E2M1 else 8  # highest bit of a magnitude that has been placed
  found = []
  for n in range(32 // bits):
    at = n % (16 // bits) * bits
    half = low if n < 16 // bits else high
    sign = lanes.shift(half, 16 - bits - at) & _twice(0x8000)
    left = top - (bits - 2) - at
    if packed:
      scale = pltpu.bitcast(scales[0], jnp.bfloat16)
      value = pltpu.bitcast(_floats(half, element, left, True) * scale, jnp.int32)
    else:
      # The element's own place in the word, moved to the high half.
      place = left + at + 16 - n * bits
      both = [
          _floats(words, element, place, False) * lanes.as_f32(scale)
          for words, scale in zip((a, b), scales)
      ]
      value = lanes.bf16_pair(*both)
    found.append(value ^ sign)
  return found
