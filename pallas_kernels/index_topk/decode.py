"""MXFP4 index keys as bf16 inside a kernel.

A row of codes is a block of eight entries, 16 words each: lane 16·e + w has channels 8w to 8w + 7
of entry e, nibble n is channel 8w + n. So eight planes [blocks, 128], one a nibble, hold a tile
without moving anything across lanes.

An element times its scale comes from bit placement: exponent and mantissa of the nibble, shifted to
the lowest exponent bit, plus (scale byte − 1) in the exponent is the value for codes from 2 on. The
subnormal codes 0 and 1 come out as 0.5 and 0.75 of the scale S; min(x, 2x − S) puts them right and
leaves the others.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_topk.layout import BLOCK, LANES

NIBBLES = 8
WORDS = 16  # Of an entry.
# Scale bytes outside are read as the nearest inside: 2^-125 keeps S / 2 a normal number, and
# 6 · 2^125 the sum of exponents in range. 255 is NaN and handled apart.
_SCALES = (2, 252)
_MAGNITUDES, _SIGNS = 0x01C001C0, -0x7FFF8000
_LOW, _HIGH = 0xFFFF, -0x10000


def _shifted(x, left):
  return x << left if left > 0 else x >> -left if left else x


def _finish(bits, signs, scale, dtype):
  x = pltpu.bitcast(bits, dtype)
  x = jnp.minimum(x, x + (x - scale))
  return pltpu.bitcast(pltpu.bitcast(x, jnp.int32) | signs, dtype)


def planes_packed(even, odd, scale_even, scale_odd):
  """Planes [2R, 128] bf16, two values an int32: for chips whose vector unit computes in bf16.

  Args:
    even: codes of blocks 0, 2, 4 …, int32 [R, 128].
    odd: of blocks 1, 3, 5 …
    scale_even: scale bytes in the planes' lanes, likewise.
    scale_odd: likewise.
  """
  scale = (scale_even << 7) | (scale_odd << 23)
  bias = scale - 0x00800080
  scale = pltpu.bitcast(scale, jnp.bfloat16)
  halves = (even & _LOW) | (odd << 16), ((even >> 16) & _LOW) | (odd & _HIGH)
  return [
      _finish(
          (_shifted(half, 6 - 4 * i) & _MAGNITUDES) + bias,
          _shifted(half, 12 - 4 * i) & _SIGNS,
          scale,
          jnp.bfloat16,
      )
      for half in halves
      for i in range(4)
  ]


def planes_wide(codes, scales):
  """Planes [R, 128] bf16 by way of f32; codes and scale bytes int32 [R, 128]."""
  scale = scales << 23
  bias = scale - (1 << 23)
  scale = pltpu.bitcast(scale, jnp.float32)
  return [
      _finish(
          (_shifted(codes, 22 - 4 * n) & (7 << 22)) + bias,
          _shifted(codes, 28 - 4 * n) & (-1 << 31),
          scale,
          jnp.float32,
      ).astype(jnp.bfloat16)
      for n in range(NIBBLES)
  ]


def _iota(shape, axis):
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _repeated(rows, times):
  """[R, 128] → [R · times, 128], every row `times` times."""
  return jnp.concatenate(
      [jnp.broadcast_to(rows[i : i + 1], (times, LANES)) for i in range(rows.shape[0])]
  )


def _byte(words, index):
  """Scale byte of every lane of a plane: word `index` of each row of words [R, 128], its byte."""
  words = jnp.take_along_axis(words, index, axis=1)
  return (words >> ((_iota(words.shape, 1) & 12) << 1)) & 255


def stored_bytes(scales, first, step):
  """Scale bytes [R, 128] of blocks first, first + step, … of whole rows of scales as stored.

  Args:
    scales: int32 [rows, 128]; one row serves 16 blocks.
    first: 0 or 1.
    step: 1 or 2.
  """
  rows = 16 // step
  shape = (rows, LANES)
  index = BLOCK * (first + step * _iota(shape, 0)) + (_iota(shape, 1) >> 4)
  index = jnp.concatenate([index] * scales.shape[0])
  return _byte(_repeated(scales, rows), index)


def gathered_bytes(scale_rows, blocks, first, step):
  """Scale bytes [R, 128] of every `step`-th of the gathered blocks.

  Args:
    scale_rows: int32 [R, 128], for each of those blocks the row that has its scales.
    blocks: int32 [1, R · step], numbers of all gathered blocks.
    first: as in `stored_bytes`.
    step: likewise.
  """
  rows = scale_rows.shape[0]
  shape = (rows, rows * step)
  chosen = _iota(shape, 1) == first + step * _iota(shape, 0)
  inside = jnp.where(chosen, (blocks & 15).astype(jnp.float32), 0.0).astype(jnp.bfloat16)
  everywhere = jnp.ones((shape[1], LANES), jnp.bfloat16)
  inside = jnp.dot(inside, everywhere, preferred_element_type=jnp.float32).astype(jnp.int32)
  return _byte(scale_rows, BLOCK * inside + (_iota((rows, LANES), 1) >> 4))


def nan_entries(scale_bytes):
  """f32 [8, R]: above 0 where an entry has a NaN scale; bytes of consecutive blocks, [R, 128]."""
  entry = _iota((BLOCK, LANES), 1) >> 4 == _iota((BLOCK, LANES), 0)
  bad = jnp.where(scale_bytes == 255, 1.0, 0.0).astype(jnp.bfloat16)
  return jax.lax.dot_general(
      jnp.where(entry, 1.0, 0.0).astype(jnp.bfloat16), bad, (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
  )  # fmt: skip


def any_nan(words):
  """int32, above 0 if a byte of the scale words is the NaN of E8M0."""
  found = jnp.zeros_like(words)
  for g in range(4):
    found = jnp.where(((words >> (8 * g)) & 255) == 255, 1, found)
  return jnp.max(found)


def planes(codes_ref, start, count, scale_bytes, packed):
  """The eight planes [count, 128] of blocks start … start + count, side by side: [count, 1024].

  Args:
    codes_ref: int32 [blocks, 128].
    start: first block.
    count: a multiple of 16.
    scale_bytes: function of (first, step), see `stored_bytes`.
    packed: whether the vector unit computes in bf16.
  """
  if packed:
    even, odd = (codes_ref[pl.ds(start + p, count // 2, stride=2), :] for p in (0, 1))
    scales = (jnp.clip(scale_bytes(p, 2), *_SCALES) for p in (0, 1))
    found = planes_packed(even, odd, *scales)
  else:
    scales = jnp.clip(scale_bytes(0, 1), *_SCALES)
    found = planes_wide(codes_ref[pl.ds(start, count), :], scales)
  return jnp.concatenate(found, axis=1)
