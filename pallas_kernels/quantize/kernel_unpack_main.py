"""Main KV to bf16: 16 entries fill nine rows of the table, and 128 such periods lie along lanes.

Transposed, the words of an entry stand at a multiple of eight rows, wherever the stored order puts
them: nothing moves for it.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import decode, lanes, transposed
from pallas_kernels.quantize.lanes import LANES, SUBLANES
from pallas_kernels.quantize.stored import MAIN
from pallas_kernels.sparse_attention import layout

_PERIOD = layout.PERIOD
_ROWS = _PERIOD * layout.WORDS // LANES  # Of the table, for a period.
_TILES = MAIN.width // LANES
CHUNK = BLOCK = _PERIOD * LANES  # Entries whose periods fill the lanes.


def _aligned(start, count: int):
  return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, count), count)


def _place(entry: int, eight):
  """Row of the transposed words where code words 8 · `eight` and on of an entry begin."""
  start = layout.WORDS * entry
  row = start + (SUBLANES * eight - start & layout.CODES - 1)
  if start & layout.CODES:
    return row
  # The scale words have the place below lane 64.
  other = start + layout.CODES
  if isinstance(eight, int):
    return other if row == start else row
  return jnp.where(row == start, other, row)


def _scale_place(entry: int) -> int:
  start = layout.WORDS * entry
  return start + (start & layout.CODES)


def _decode_scales(words, scales, arithmetic: str):
  """Scales of entries 2p and 2p + 1 to scales [p].

  By integers: a row for each code word, pairs or one plane each. By casts: a plane of entry 2p and
  one of 2p + 1, with a row of pairs of equal bf16 for each 16 channels.
  """
  for p in range(_PERIOD // 2):
    both = [words[pl.ds(_scale_place(2 * p + e), SUBLANES), :] for e in (0, 1)]
    if arithmetic == decode.FLOAT4:
      for e, found in enumerate(both):
        bits = lanes.as_int(pltpu.bitcast(found, jnp.float8_e4m3fn).astype(jnp.float32))
        scales[p, e, pl.ds(0, 4 * SUBLANES), :] = decode.twice(bits)
      continue
    for j in range(4):
      bits = (decode.scale_bits(lanes.shift(each, -8 * j) & 0xFF, "e4m3") for each in both)
      for plane, found in enumerate(decode.both_scales(*bits, arithmetic == decode.BFLOAT16)):
        for row in (2 * j, 2 * j + 1):  # Two words share a scale.
          scales[p, plane, pl.ds(row, SUBLANES, stride=SUBLANES), :] = found


def _tile_of_pair(words, scales, values, pairs, p: int, tile, arithmetic: str):
  """128 channels of entries 2p and 2p + 1 of all periods, to rows p, p + 9 … of `pairs`."""
  eights = 2 * tile, 2 * tile + 1
  found = [
      [words[_aligned(_place(2 * p + e, eight), SUBLANES), :] for e in (0, 1)] for eight in eights
  ]
  periods = pairs.shape[0] // transposed.PADDED
  if arithmetic == decode.FLOAT4:
    both = [jnp.concatenate(each) for each in zip(*found)]
    rows = [[scales[p, e, pl.ds(8 * tile + g, 1), :] for g in range(8)] for e in (0, 1)]
    for odd, values in enumerate(transposed.by_casts(both, rows)):
      first = transposed.PADDED * odd + p
      at = pl.ds(first, periods // 2, stride=2 * transposed.PADDED)
      pairs[at, :] = values[: periods // 2]
    return
  planes = 1 if arithmetic == decode.BFLOAT16 else 2
  scale = [
      tuple(scales[p, i, _aligned(SUBLANES * eight, SUBLANES), :] for i in range(planes))
      for eight in eights
  ]
  done = transposed.by_integers(found, scale, values.at[p], arithmetic == decode.BFLOAT16)
  pairs[pl.ds(p, periods, stride=transposed.PADDED), :] = done[:periods]


# Tiles in straight-line code, which hides their latencies; more of them spill.
_TOGETHER = {decode.FLOAT32: 2, decode.BFLOAT16: 1, decode.FLOAT4: 4}


def kernel(table, out, words, scales, values, pairs, *, arithmetic: str):
  """Unpacks a block of rows."""
  # Input: int32 [9 · periods, 128]. Output: bf16 [16 · periods, 512].
  # Scratch, int32: words [9 · 128, 128], transposed; scales [8, 2, 64, 128];
  # values [8, VALUES, 128], of a pair of entries; pairs [2, 9 · periods, 128], of a tile, eight
  # rows 16g + 2p to 16g + 2p + 1 of the result from row 9g on.
  periods = out.shape[0] // _PERIOD
  for r in range(_ROWS):
    row = table[pl.ds(r, periods, stride=_ROWS), :]
    words[LANES * r : LANES * (r + 1), :] = transposed.square(row)
  _decode_scales(words, scales, arithmetic)
  together = _TOGETHER[arithmetic]

  def turn(first):
    for i in range(together):
      tile, mine = first + i, pairs.at[i % 2]
      for p in range(_PERIOD // 2):
        _tile_of_pair(words, scales, values, mine, p, tile, arithmetic)
      for g in range(periods):
        rows = mine[pl.ds(transposed.PADDED * g, SUBLANES), :]
        lanes.put_pairs(out, SUBLANES * g, _aligned(LANES * tile, LANES), rows)

  if together == _TILES:
    turn(0)
  else:
    pl.loop(0, _TILES // together)(lambda i: turn(i * together))


def scratch(block: int, arithmetic: str) -> list:
  """Of the kernel, for a block of rows."""
  del arithmetic
  return [
      pltpu.VMEM((_ROWS * LANES, LANES), jnp.int32),
      pltpu.VMEM((_PERIOD // 2, 2, layout.CODES, LANES), jnp.int32),
      pltpu.VMEM((_PERIOD // 2, transposed.VALUES, LANES), jnp.int32),
      pltpu.VMEM((2, transposed.PADDED * block // _PERIOD, LANES), jnp.int32),
  ]
