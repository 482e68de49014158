"""Window rows to bf16, a row of codes being a slot: words change places with lanes by rolls."""

import math

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import decode, lanes
from pallas_kernels.quantize.lanes import LANES, SUBLANES
from pallas_kernels.quantize.stored import WINDOW

# Steps in straight-line code, which hides their chain of lane moves; more of them wait for spills.
_TOGETHER = 4
CHUNK = WINDOW.unit
BLOCK = 1024  # Slots.


def _step(codes, scales, out, step, packed):
  """32 slots, one row of codes each and one row of scales; lanes are (w4..w0, w6, w5)."""
  l = lanes.lane()
  index = (l & 3) << 5 | l >> 2
  row = jnp.broadcast_to(scales[pl.ds(step, 1), :], (SUBLANES, LANES))
  for half in range(2):
    first = step * 32 + half * 16
    words, bits = [], []
    for odd in range(2):
      words.append(lanes.gather(codes[pl.ds(first + odd, SUBLANES, stride=2), :], index))
      slot = half * 16 + odd + (lanes.sublane() << 1)
      found = lanes.gather(row, slot << 2 | l & 3)
      byte = lanes.shift_right(found, l >> 5 << 3) & 0xFF
      bits.append(decode.scale_bits(byte, WINDOW.format.scale))
    scale = decode.both_scales(*bits, packed)
    found = decode.row_pairs(*words, scale, WINDOW.format.element, packed)
    for tile, pair in enumerate(lanes.exchange(found, [0, 1])):
      out[tile, pl.ds(half * SUBLANES, SUBLANES), :] = pair


def kernel(codes, scales, out, pairs, *, arithmetic: str):
  """Unpacks a block of rows."""
  # Input: int32 [rows of a block, 128] each. Output: bf16 [block, 512].
  # Scratch: pairs int32 [together, 4, 16, 128], rows 2i and 2i + 1 in a word.
  together = pairs.shape[0]
  packed = arithmetic != decode.FLOAT32

  @pl.loop(0, out.shape[0] // (WINDOW.unit * together))
  def _(turn):
    for one in range(together):
      _step(codes, scales, pairs.at[one], turn * together + one, packed)
    for one in range(together):
      at = pl.ds((turn * together + one) * WINDOW.unit, WINDOW.unit)
      for tile in range(pairs.shape[1]):
        tiles = slice(LANES * tile, LANES * (tile + 1))
        out[at, tiles] = pltpu.bitcast(pairs[one, tile], jnp.bfloat16)


def scratch(block: int, arithmetic: str) -> list:
  """Of the kernel, for a block of rows."""
  del arithmetic
  together = math.gcd(block // WINDOW.unit, _TOGETHER)
  return [pltpu.VMEM((together, WINDOW.width // LANES, WINDOW.unit // 2, LANES), jnp.int32)]
