"""MXFP4 index keys as bf16 inside a kernel, with blocks along lanes.

A row of codes is a block of eight entries, 16 words each: lane 16·e + w has channels 8w to 8w + 7
of entry e, nibble n is channel 8w + n. Transposed, the rows 16·e to 16·e + 15 of 128 blocks are the
words of their entries e, and the nibbles i and i + 4 of a word a pair of bf16 rows: all channels of
an entry come to stand under one another, in an order that `_channel` gives, and nothing crosses
lanes after the words have been transposed.

Where the chip casts float4, its casts do the rest, in the natural order. Elsewhere an element times
its scale comes from bit placement: exponent and mantissa of the nibble, shifted to the lowest
exponent bit, plus (scale byte − 1) in the exponent is the value for codes from 2 on. The subnormal
codes 0 and 1 come out as 0.5 and 0.75 of the scale S; min(x, 2x − S) puts them right and leaves the
others, also where 2x is infinite.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_topk.layout import BLOCK, LANES
from pallas_kernels.quantize import lanes, transposed
from pallas_kernels.quantize.decode import BFLOAT16, FLOAT4, FLOAT32

WORDS = 16  # Of an entry.
GROUPS = 4  # Scales of an entry, one byte each of its scale word.
_ROWS = lanes.SUBLANES
# Scale bytes outside are read as the nearest inside: 2^-125 keeps S / 2 a normal number, and
# 6 · 2^125 the sum of exponents in range. 255 is NaN and handled apart.
_SCALES = (2, 252)
_MAGNITUDES, _SIGNS = 0x01C001C0, -0x7FFF8000


def _channel(row, arithmetic: str):
  """Channel in row `row` of the keys of an entry."""
  if arithmetic == FLOAT4:
    return row
  eight, i, word, half = row >> 6, row >> 4 & 3, row >> 1 & 7, row & 1
  return eight << 6 | word << 3 | half << 2 | i


def ordered(q, arithmetic: str):
  """Queries [n, 128] with their channels in the order of the keys."""
  iota = lambda axis: lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis)
  matrix = jnp.where(iota(0) == _channel(iota(1), arithmetic), 1.0, 0.0).astype(jnp.bfloat16)
  return jnp.dot(q, matrix, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def stored_words(rows):
  """Scale words [8, 128], of entry e of a block in row e, of eight whole rows of scales."""
  return transposed.entry_words(rows)


def gathered_words(rows, inside):
  """Scale words [8, 128] of 128 blocks that have been fetched one by one.

  Args:
    rows: int32 [128, 128], for each block the row of scales that it is in.
    inside: int32 [1, 128], which of the 16 blocks of its row it is.
  """
  words = rows.T
  inside = jnp.broadcast_to(inside, (_ROWS, LANES))
  found = jnp.zeros((_ROWS, LANES), jnp.int32)
  for block in range(LANES // BLOCK):
    found = jnp.where(inside == block, words[BLOCK * block : BLOCK * (block + 1)], found)
  return found


def put_scales(ref, words, arithmetic: str):
  """Fills ref [4, 8, 128] with the scales of each group as bits, of an f32 or of two bf16."""
  for g in range(GROUPS):
    byte = jnp.clip(lanes.shift(words, -8 * g) & 255, *_SCALES)
    ref[g] = byte << 23 if arithmetic == FLOAT32 else byte << 7 | byte << 23


def nan_entries(words):
  """int32 [8, 128], 1 where a byte of an entry's scale word is the NaN of E8M0."""
  found = jnp.zeros_like(words)
  for g in range(GROUPS):
    found = jnp.where(lanes.shift(words, -8 * g) & 255 == 255, 1, found)
  return found


def _values(words, left: int, mask: int, bias, scale, dtype):
  x = pltpu.bitcast((lanes.shift(words, left) & mask) + bias, dtype)
  # Not x + (x − scale): a quarter of the smallest scale is flushed.
  return jnp.minimum(x, x + x - scale)


def _pairs(words, bits, packed: bool) -> list:
  """bf16 [16, 128] of nibbles i and i + 4 of eight words, scales being `bits`."""
  found = []
  for i in range(4):
    if packed:
      scale = pltpu.bitcast(bits, jnp.bfloat16)
      value = _values(words, 6 - 4 * i, _MAGNITUDES, bits - 0x00800080, scale, jnp.bfloat16)
      value = pltpu.bitcast(value, jnp.int32)
    else:
      scale = lanes.as_f32(bits)
      value = lanes.bf16_pair(
          *(
              _values(words, 22 - 4 * n, 7 << 22, bits - (1 << 23), scale, jnp.float32)
              for n in (i, i + 4)
          )
      )
    sign = lanes.shift(words, 12 - 4 * i) & _SIGNS
    found.append(pltpu.bitcast(value | sign, jnp.bfloat16))
  return found


def keys(words, scales, e: int, arithmetic: str):
  """Keys bf16 [128 channels, 128 blocks] of entry e.

  Args:
    words: reference of the transposed codes, int32 [128, 128].
    scales: reference that `put_scales` has filled.
    e: of a block.
    arithmetic: one of those in `quantize.decode`.
  """
  mine = [jnp.broadcast_to(scales[g, pl.ds(e, 1), :], (_ROWS, LANES)) for g in range(GROUPS)]
  found = []
  if arithmetic == FLOAT4:
    codes = pltpu.bitcast(words[pl.ds(WORDS * e, WORDS), :], jnp.float4_e2m1fn)
    values = codes.astype(jnp.bfloat16)
    for i in range(2 * GROUPS):
      scale = pltpu.bitcast(mine[i // 2], jnp.bfloat16)
      found.append(values[2 * _ROWS * i : 2 * _ROWS * (i + 1)] * scale)
    return jnp.concatenate(found)
  first = lax.broadcasted_iota(jnp.int32, (_ROWS, LANES), 0) < _ROWS // 2
  for eight in range(WORDS // _ROWS):
    rows = words[pl.ds(WORDS * e + _ROWS * eight, _ROWS), :]
    bits = jnp.where(first, mine[2 * eight], mine[2 * eight + 1])
    found += _pairs(rows, bits, arithmetic == BFLOAT16)
  return jnp.concatenate(found)
