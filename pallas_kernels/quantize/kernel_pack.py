"""Rows to their stored layouts, around the arithmetic of `reference`.

With the exchange first, the channels of a word lie in different registers and the words of a block
in a few lanes, so that the largest magnitude of a block takes one to three lane moves. Magnitudes
are compared as integers, where NaN is above infinity.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import lanes
from pallas_kernels.quantize.formats import E2M1, E4M3, Format
from pallas_kernels.quantize.lanes import LANES, SUBLANES
from pallas_kernels.quantize.stored import INDEX, MAIN, WINDOW, Stored
from pallas_kernels.sparse_attention import layout

_INFINITY = 0x7F800000
_LARGEST = 0x7F7FFFFF
_SMALLEST = 0x00800000
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _scale(amax, fmt: Format):
  """Scale f32 and its byte of blocks with the largest magnitude `amax`, as f32 bits."""
  is_nan = amax > _INFINITY
  finite = lanes.as_f32(jnp.minimum(amax, _LARGEST))
  if fmt.scale == "e8m0":
    wanted = jnp.maximum(finite, fmt.floor) * (1 / fmt.element.largest)
    byte = (lanes.as_int(wanted) + 0x7FFFFF) >> 23
    return lanes.as_f32(byte << 23), jnp.where(is_nan, 0xFF, byte), is_nan
  clipped = jnp.clip(finite, fmt.floor, fmt.element.largest * E4M3.largest)
  below = clipped * (1 / fmt.element.largest)
  binade = jnp.maximum(lanes.as_int(below) >> 23, 121)
  step = lanes.as_f32((binade - 3) << 23)
  steps = (below * lanes.as_f32((257 - binade) << 23)).astype(jnp.int32)
  middle = (2 * steps + 1).astype(jnp.float32) * (fmt.element.largest / 2) * step
  odd = jnp.where(steps & 1 == 1, 1, 0)
  up = jnp.where(clipped > middle, 1, jnp.where(clipped == middle, odd, 0))
  steps += up
  byte = (binade - 121) * 8 + steps
  return steps.astype(jnp.float32) * step, jnp.where(is_nan, 0x7F, byte), is_nan


def _codes(bits, scale, fmt: Format):
  """Codes with their sign of values given as f32 bits."""
  magnitudes = lanes.as_f32(bits & 0x7FFFFFFF)
  sign = lanes.shift(bits, fmt.element.bits - 32) & (1 << (fmt.element.bits - 1))
  unit = scale
  if fmt.scale == "e8m0":
    largest = (2 - 2.0**-fmt.element.mantissa_bits) * 2.0**127
    normal = (bits & 0x7FFFFFFF) >= _SMALLEST
    magnitudes = jnp.where(normal, jnp.minimum(magnitudes, largest), 0.0)
    magnitudes *= lanes.as_f32((254 << 23) - lanes.as_int(scale))
    unit = jnp.ones_like(scale)
  if fmt.element == E2M1:
    code = jnp.zeros_like(bits)
    for below, tie in enumerate(_E2M1_TIES):
      middle = tie * unit
      passed = magnitudes >= middle if below % 2 else magnitudes > middle
      code = jnp.where(passed, below + 1, code)
    return code | sign
  binade = jnp.maximum(lanes.as_int(magnitudes) >> 23, 121)
  rounder = lanes.as_f32((binade + 20) << 23)
  steps = lanes.as_int(magnitudes + rounder) - lanes.as_int(rounder)
  return (binade - 121) * 8 + steps | sign


def _encode(registers: list, block_bits: list[int], fmt: Format):
  """Words and scale bytes of f32 registers of which number n holds channel n of every word."""
  bits = [lanes.as_int(x) for x in registers]
  amax = functools.reduce(jnp.maximum, (b & 0x7FFFFFFF for b in bits))
  scale, byte, is_nan = _scale(lanes.spread_max(amax, block_bits), fmt)
  word = jnp.zeros_like(byte)
  for n, b in enumerate(bits):
    word |= _codes(b, scale, fmt) << (n * fmt.element.bits)
  return jnp.where(is_nan, 0, word), byte


def _gathered_words(byte, index, step: int):
  """Words of the bytes at lanes `index`, `index` + `step` and so on, the first one lowest."""
  parts = (lanes.gather(byte, index + b * step) << 8 * b for b in range(4))
  return functools.reduce(jnp.bitwise_or, parts)


def _main_step(rows, table, step):
  l = lanes.lane()
  natural = (l & 15) << 3 | l >> 4
  entries = {}
  for i in range(0, 16, 4):
    for low in (i, i + 1):
      pair = (low, low + 2)
      registers = [
          rows[tile, pl.ds(each, SUBLANES, stride=16), :] for each in pair for tile in range(4)
      ]
      words, byte = _encode(lanes.exchange(registers, [0, 1, 2]), [3], MAIN.format)
      words = lanes.gather(words, natural)
      other = pltpu.roll(words, LANES // 2, 1)
      for h, each in enumerate(pair):
        first = each * layout.WORDS % 64
        ours = (l >= first) & (l < first + layout.SCALES)
        s = jnp.where(ours, l - first, 0)
        scales = _gathered_words(byte, (s & 1) << 6 | h << 2 | s >> 1, 16)
        twice = jnp.where((l < 64) == (h == 0), words, other)
        entries[each] = jnp.where(ours, scales, twice)
  for r in range(9):
    covering = [i for i in range(16) if -layout.WORDS < i * layout.WORDS - r * LANES < LANES]
    row = entries[covering[0]]
    for i in covering[1:]:
      row = jnp.where(l >= i * layout.WORDS - r * LANES, entries[i], row)
    table[pl.ds(step * 72 + r, SUBLANES, stride=9), :] = row


def _index_step(rows, codes, scales, step):
  l = lanes.lane()
  words, bytes_ = [], []
  for odd in range(2):
    registers = [
        rows[0, pl.ds((n & 1) * 64 + (n >> 1) * 2 + odd, SUBLANES, stride=8), :] for n in range(8)
    ]
    found = _encode(lanes.exchange(registers, [0, 1, 2]), [3, 4], INDEX.format)
    words.append(found[0])
    bytes_.append(found[1])
  natural = (l & 15) << 3 | l >> 4
  for half, each in enumerate(lanes.exchange(words, [0])):
    codes[pl.ds(step * 16 + half * SUBLANES, SUBLANES), :] = lanes.gather(each, natural)
  even, odd = (_gathered_words(byte, l & 6 | l >> 6, 32) for byte in bytes_)
  own = jnp.where(lanes.sublane() == (l >> 3 & 7), jnp.where(l & 1 == 1, odd, even), 0)
  scales[pl.ds(step, 1), :] = jnp.sum(own, axis=0, keepdims=True)


def _window_step(rows, codes, scales, step):
  l = lanes.lane()
  natural = (l & 31) << 2 | l >> 5
  own = jnp.zeros((SUBLANES, LANES), jnp.int32)
  for first in (0, 1, 16, 17):
    at = pl.ds(first, SUBLANES, stride=2)
    registers = lanes.exchange([rows[tile, at, :] for tile in range(4)], [0, 1])
    words, byte = _encode(registers, [2, 3, 4], WINDOW.format)
    codes[pl.ds(step * 32 + first, SUBLANES, stride=2), :] = lanes.gather(words, natural)
    slot = first + (lanes.sublane() << 1)
    own += jnp.where(slot == l >> 2, _gathered_words(byte, l & 3, 32), 0)
  scales[pl.ds(step, 1), :] = jnp.sum(own, axis=0, keepdims=True)


# Steps in straight-line code, which hides their chain of lane moves; more of them wait for spills.
_TOGETHER = {"main": 1, "index": 4, "window": 4}
_STEPS = {"main": _main_step, "index": _index_step, "window": _window_step}


# Rows rotated in straight-line code.
_TURNED = 512


def _turned(x, table, pairs: int, dtype):
  """f32 rows of the last tile with their last `pairs` pairs of lanes rotated, then rounded.

  A row of `table` is its cosines, then its sines.
  """
  l = lax.broadcasted_iota(jnp.int32, x.shape, 1)
  first = LANES - 2 * pairs
  pair = jnp.maximum(l - first, 0) >> 1
  cos, sin = lanes.gather(table, pair), lanes.gather(table, pair + pairs)
  even = l & 1 == 0
  partner = jnp.where(even, pltpu.roll(x, LANES - 1, 1), pltpu.roll(x, 1, 1))
  turned = x * cos + partner * jnp.where(even, -sin, sin)
  return jnp.where(l >= first, turned.astype(dtype).astype(jnp.float32), x)


def _kernel(x, *refs, which: Stored, together: int, pairs: int):
  # Input: x [block, H]; table f32 [block, 128] if there are pairs to rotate.
  # Output: the stored arrays, [rows of a block, 128] each.
  # Scratch: rows f32 [together, H / 128, unit, 128]; turned f32 [block, 128], the last channels,
  # rotated, if there are.
  turned = None
  if pairs:
    table, *refs, turned = refs
    count = math.gcd(x.shape[0], _TURNED)

    @pl.loop(0, x.shape[0] // count)
    def _(i):
      at = pl.ds(pl.multiple_of(i * count, count), count)
      last = x[at, x.shape[1] - LANES :].astype(jnp.float32)
      turned[at, :] = _turned(last, table[at, :], pairs, x.dtype)

  *outputs, rows = refs

  @pl.loop(0, x.shape[0] // (which.unit * together))
  def _(turn):
    for one in range(together):
      at = pl.ds((turn * together + one) * which.unit, which.unit)
      for tile in range(rows.shape[1]):
        if pairs and tile == rows.shape[1] - 1:
          rows[one, tile] = turned[at, :]
          continue
        tiles = slice(LANES * tile, LANES * (tile + 1))
        rows[one, tile] = x[at, tiles].astype(jnp.float32)
    for one in range(together):
      _STEPS[which.name](rows.at[one], *outputs, turn * together + one)


@functools.partial(jax.jit, static_argnums=(2, 3))
def pack(x, rotation, which: Stored, block: int):
  """See `op.pack`; `block` rows a grid step."""
  together = math.gcd(block // which.unit, _TOGETHER[which.name])
  spec = lambda shape: pl.BlockSpec(shape, lambda i: (i, 0))
  pairs, tables = 0, ()
  if rotation is not None:
    pairs = rotation[0].shape[1]
    tables = (jnp.pad(jnp.concatenate(rotation, axis=1), ((0, 0), (0, LANES - 2 * pairs))),)
  return tuple(
      pl.pallas_call(
          functools.partial(_kernel, which=which, together=together, pairs=pairs),
          grid=(x.shape[0] // block,),
          in_specs=[spec((block, which.width)), *(spec((block, LANES)) for _ in tables)],
          out_specs=[spec(shape) for shape in which.shapes(block)],
          out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in which.shapes(x.shape[0])],
          scratch_shapes=[
              pltpu.VMEM((together, which.width // LANES, which.unit, LANES), jnp.float32),
              *(pltpu.VMEM((block, LANES), jnp.float32) for _ in tables),
          ],
          compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
          name=f"pack_{which.name}",
      )(x, *tables)
  )
