"""Stored rows to bf16: bits moved into place, one product, one exchange with the lanes.

A small float becomes a bf16 (two rows a word) or an f32 by moving its bits under an exponent that
makes subnormals normal numbers `x`, off by a constant c: min(x, 2x - c) is the value of both kinds.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import lanes, stored
from pallas_kernels.quantize.formats import E2M1, Element
from pallas_kernels.quantize.lanes import LANES, SUBLANES
from pallas_kernels.sparse_attention import layout

# Of an element moved under a bf16 exponent: bits of its magnitude, exponent put under it, c.
_PLACED = {"e2m1": (0x01C0, 0x3F00, 1.0), "e4m3": (0x07F0, 0x3C00, 2.0**-6)}
_E4M3_NAN = 480.0  # what its bits are without it


def _float_bits(words, element: Element, left: int, packed: bool):
  """Elements at bits `left` lower than their place in a bf16, as floats without their sign.

  `words` holds one for each half (`packed`), or one in the high half.
  """
  mask, exponent, offset = _PLACED[element.name]
  if packed:
    both = lambda pattern: lanes.signed(pattern << 16 | pattern)
    x = pltpu.bitcast((lanes.shift(words, left) & both(mask)) + both(exponent), jnp.bfloat16)
  else:
    x = lanes.as_f32((lanes.shift(words, left) & (mask << 16)) + (exponent << 16))
  value = jnp.minimum(x, x + x - jnp.asarray(offset, x.dtype))
  if element != E2M1:
    value = jnp.where(x == jnp.asarray(_E4M3_NAN, x.dtype), jnp.asarray(jnp.nan, x.dtype), value)
  return value


def _decode(a, b, scale_a, scale_b, element: Element, packed: bool):
  """Registers of bf16 pairs, one for each channel of a word: rows `a` low, rows `b` high.

  `scale_a` and `scale_b` are bf16 bits in the high half of int32 words.
  """
  bits = element.bits
  low, high = lanes.halves(a, b)
  sign_mask = lanes.signed(0x80008000)
  top = 10 if element != E2M1 else 8  # highest bit of a magnitude that has been placed
  if packed:
    scale = pltpu.bitcast(lanes.shift(scale_a, -16) | scale_b, jnp.bfloat16)
  found = []
  for n in range(32 // bits):
    at = n % (16 // bits) * bits
    half = low if n < 16 // bits else high
    sign = lanes.shift(half, 16 - bits - at) & sign_mask
    left = top - (bits - 2) - at
    if packed:
      value = pltpu.bitcast(_float_bits(half, element, left, True) * scale, jnp.int32)
    else:
      # The element's own place in the word, moved to the high half.
      place = left + at + 16 - n * bits
      one, two = (
          lanes.as_int(_float_bits(words, element, place, False) * lanes.as_f32(s))
          for words, s in ((a, scale_a), (b, scale_b))
      )
      value = lanes.shift(one, -16) | (two & lanes.signed(0xFFFF0000))
    found.append(value ^ sign)
  return found


def _scale_bits(words, byte, kind: str):
  """bf16 bits, in the high half, of scale bytes: byte number `byte` (per lane) of `words`."""
  byte = lanes.shift_right(words, byte << 3) & 0xFF
  if kind == "e8m0":
    # The byte 0, 2^-127, is below the normal numbers and never stored: it reads as 0.
    return byte << 23 | jnp.where(byte == 0xFF, 1 << 22, 0)
  bits = ((byte & 0x7F) << 20) + (0x3C00 << 16)
  x = lanes.as_f32(bits)
  value = lanes.as_int(jnp.minimum(x, x + x - 2.0**-6)) | (byte & 0x80) << 24
  return jnp.where(byte & 0x7F == 0x7F, 0x7FC0 << 16, value)


def _main_step(table, out, step, packed):
  """128 entries: sublane g is the g-th group of 16 entries, which fills 9 rows of the table.

  Lanes of a register are (k3..k0, h, w5, w4) for word w = (w5, w4, k3..k0) and half h, which is one
  of two entries: i (h = 0) and i + 2, with i even, are the low rows, i + 1 and i + 3 the high ones.
  """
  l = lanes.lane()
  rows = [table[pl.ds(step * 72 + r, SUBLANES, stride=9), :] for r in range(9)]
  index = (l >> 2 & 1) << 6 | (l & 3) << 4 | l >> 3

  def entry(i):
    """Words of entries i: those of its first row behind where it starts, and of its second."""
    row, start = divmod(i * layout.WORDS, LANES)
    second = rows[min(row + 1, 8)]
    return start, (rows[row] if start == 0 else jnp.where(l >= start, rows[row], second))

  def words_and_scales(i, j):
    (start_i, x), (start_j, y) = entry(i), entry(j)
    straight, across = jnp.where(l < 64, x, y), jnp.where(l < 64, y, x)
    scales_i, scales_j = start_i % 64, start_j % 64

    def stands(start, scales):
      inside = (l >= start) & (l < start + layout.WORDS) | (l < start + layout.WORDS - LANES)
      return jnp.where(inside & ~((l >= scales) & (l < scales + layout.SCALES)), 1, 0)

    here = jnp.where(l < 64, stands(start_i, scales_i), stands(start_j, scales_j))
    words = jnp.where(here == 1, straight, pltpu.roll(across, 64, 1))
    ours = (l >= scales_i) & (l < scales_i + layout.SCALES)
    source = jnp.where(ours, x, y)
    first = jnp.where((l >> 2 & 1) == 0, scales_i, scales_j)
    scales = lanes.gather(source, first + ((l & 3) << 1 | l >> 6))
    return lanes.gather(words, index), _scale_bits(scales, l >> 4 & 3, "e4m3")

  for i in range(0, 16, 4):
    a, scale_a = words_and_scales(i, i + 2)
    b, scale_b = words_and_scales(i + 1, i + 3)
    found = lanes.exchange(_decode(a, b, scale_a, scale_b, E2M1, packed), [0, 1, 2])
    for number, pair in enumerate(found):
      h, tile = number >> 2, number & 3
      at = pl.ds(i // 2 + h, SUBLANES, stride=8)
      out[tile, at, :] = pair


def _index_step(codes, scales, out, step, packed):
  """128 entries, 16 rows of codes and one of scales.

  Lanes are (k3..k0, e2, e1, r) for word k of entry (e2, e1, e0) of a row; r is the first or the
  second eight rows, e0 the low or the high half of a word.
  """
  l = lanes.lane()
  index = (l & 7) << 4 | l >> 3
  both = [lanes.gather(codes[pl.ds(step * 16 + r, SUBLANES), :], index) for r in (0, SUBLANES)]
  a, b = lanes.exchange(both, [0])
  row = jnp.broadcast_to(scales[pl.ds(step, 1), :], (SUBLANES, LANES))
  at = (l & 1) << 6 | lanes.sublane() << 3 | l & 6
  scale_a, scale_b = (_scale_bits(lanes.gather(row, at | odd), l >> 5, "e8m0") for odd in (0, 1))
  found = lanes.exchange(_decode(a, b, scale_a, scale_b, E2M1, packed), [0, 1, 2])
  for number, pair in enumerate(found):
    first = (number & 1) * 32 + (number >> 1)
    out[0, pl.ds(first, SUBLANES, stride=4), :] = pair


def _window_step(codes, scales, out, step, packed):
  """32 slots, one row of codes each and one row of scales; lanes are (w4..w0, w6, w5)."""
  l = lanes.lane()
  index = (l & 3) << 5 | l >> 2
  row = jnp.broadcast_to(scales[pl.ds(step, 1), :], (SUBLANES, LANES))
  for half in range(2):
    first = step * 32 + half * 16
    words, scale = [], []
    for odd in range(2):
      words.append(lanes.gather(codes[pl.ds(first + odd, SUBLANES, stride=2), :], index))
      slot = half * 16 + odd + (lanes.sublane() << 1)
      found = lanes.gather(row, slot << 2 | l & 3)
      scale.append(_scale_bits(found, l >> 5, "e8m0"))
    pairs = lanes.exchange(_decode(*words, *scale, stored.WINDOW.format.element, packed), [0, 1])
    for tile, pair in enumerate(pairs):
      at = pl.ds(half * SUBLANES, SUBLANES)
      out[tile, at, :] = pair


# Steps in straight-line code, which hides their chain of lane moves; more of them wait for spills.
_TOGETHER = {"main": 2, "index": 8, "window": 4}
_STEPS = {"main": _main_step, "index": _index_step, "window": _window_step}


def _kernel(*refs, which: stored.Stored, packed: bool, together: int):
  # Input: the stored arrays, [rows of a block, 128] each. Output: bf16 [block, H].
  # Scratch: pairs int32 [together, H / 128, unit / 2, 128], rows 2i and 2i + 1 in a word.
  *inputs, out, pairs = refs

  @pl.loop(0, out.shape[0] // (which.unit * together))
  def _(turn):
    for one in range(together):
      _STEPS[which.name](*inputs, pairs.at[one], turn * together + one, packed)
    for one in range(together):
      at = pl.ds((turn * together + one) * which.unit, which.unit)
      for tile in range(pairs.shape[1]):
        tiles = slice(LANES * tile, LANES * (tile + 1))
        out[at, tiles] = pltpu.bitcast(pairs[one, tile], jnp.bfloat16)


def unpack(buffers, which: stored.Stored, block: int, packed: bool):
  """See `op.unpack`; `block` rows a grid step, `packed` where the vector unit computes in bf16."""
  together = math.gcd(block // which.unit, _TOGETHER[which.name])
  rows = buffers[0].size // (sum(which.words) if which.interleaved else which.words[0])
  spec = lambda shape: pl.BlockSpec(shape, lambda i: (i, 0))
  return pl.pallas_call(
      functools.partial(_kernel, which=which, packed=packed, together=together),
      grid=(rows // block,),
      in_specs=[spec(shape) for shape in which.shapes(block)],
      out_specs=spec((block, which.width)),
      out_shape=jax.ShapeDtypeStruct((rows, which.width), jnp.bfloat16),
      scratch_shapes=[
          pltpu.VMEM((together, which.width // LANES, which.unit // 2, LANES), jnp.int32)
      ],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
      name=f"unpack_{which.name}",
  )(*buffers)
