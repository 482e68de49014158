"""Index keys to bf16: eight entries fill a row of codes, and 128 such rows lie along lanes.

Their scales are eight rows of 128 entries, or fewer; `transposed.entry_words` brings them to the
lanes and rows of the codes.
"""

import functools
import math

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import decode, lanes, transposed
from pallas_kernels.quantize.lanes import LANES, SUBLANES
from pallas_kernels.quantize.stored import INDEX

_ENTRIES = LANES // INDEX.words[0]  # Of a row of codes.
CHUNK = _ENTRIES * LANES
_GROUPS = 4  # Scale bytes of an entry, 32 channels or four words each.
BLOCK = 8 * CHUNK
# Chunks in straight-line code, which hides their chain; more of them spill.
_TOGETHER = {decode.FLOAT32: 2, decode.BFLOAT16: 2, decode.FLOAT4: 4}


def _decode_scales(rows, scales, arithmetic: str):
  """Scales of group g to scales [g]: of entry e in row e.

  By integers, as pairs: of e and e + 1 in row e. By casts: pairs of equal bf16.
  """
  if rows.shape[0] < SUBLANES:
    missing = jnp.zeros((SUBLANES - rows.shape[0], LANES), jnp.int32)
    rows = jnp.concatenate([rows, missing])
  words = transposed.entry_words(rows)
  for g in range(_GROUPS):
    bits = decode.scale_bits(lanes.shift(words, -8 * g) & 0xFF, "e8m0")
    if arithmetic == decode.BFLOAT16:
      bits = lanes.shift(bits, -16) | pltpu.roll(bits, SUBLANES - 1, 0)
    elif arithmetic == decode.FLOAT4:
      bits = decode.twice(bits)
    scales[g] = bits


def _of_words(scales, e: int, eight: int):
  """Scales of entry e in the rows of eight words, two groups."""
  rows = (
      jnp.broadcast_to(scales[g, pl.ds(e, 1), :], (SUBLANES, LANES))
      for g in (2 * eight, 2 * eight + 1)
  )
  return jnp.where(lanes.sublane() < 4, *rows)


def _pair(words, scales, values, pairs, e: int, arithmetic: str):
  """Entries e and e + 1 of all rows of codes."""
  first = [INDEX.words[0] * each for each in (e, e + 1)]
  every = _ENTRIES // 2
  count = pairs.shape[0] // every
  if arithmetic == decode.FLOAT4:
    both = [words[pl.ds(at, INDEX.words[0]), :] for at in first]
    rows = [[scales[i // 2, pl.ds(each, 1), :] for i in range(8)] for each in (e, e + 1)]
    for odd, found in enumerate(transposed.by_casts(both, rows)):
      at = pl.ds(every * odd + e // 2, count // 2, stride=2 * every)
      pairs[at, :] = found[: count // 2]
    return
  packed = arithmetic == decode.BFLOAT16
  eights = [
      [words[pl.ds(at + SUBLANES * eight, SUBLANES), :] for at in first] for eight in range(2)
  ]
  of = functools.partial(_of_words, scales)
  scale = [(of(e, i),) if packed else (of(e, i), of(e + 1, i)) for i in range(2)]
  done = transposed.by_integers(eights, scale, values.at[e // 2], packed)
  pairs[pl.ds(e // 2, count, stride=every), :] = done[:count]


def kernel(codes, stored_scales, out, words, scales, values, pairs, *, arithmetic: str):
  """Unpacks a block of rows."""
  # Input: int32 [rows of codes, 128], [rows of scales, 128]. Output: bf16 [block, 128].
  # Scratch, int32: words [together, 128, 128], transposed; scales [chunks, 4, 8, 128];
  # values [together, 4, VALUES, 128], of pairs of entries; pairs [together, chunk / 2, 128].
  chunks = scales.shape[0]
  chunk = out.shape[0] // chunks
  count, scale_rows = chunk // _ENTRIES, chunk // LANES
  # Chains of lane moves, which hide one another.
  for i in range(chunks):
    rows = stored_scales[pl.ds(i * scale_rows, scale_rows), :]
    _decode_scales(rows, scales.at[i], arithmetic)

  together = words.shape[0]

  @pl.loop(0, chunks // together)
  def _(turn):
    for one in range(together):
      i = turn * together + one
      rows = codes[pl.ds(pl.multiple_of(i * count, count), count), :]
      words[one] = transposed.square(rows)
      for e in range(0, _ENTRIES, 2):
        _pair(words.at[one], scales.at[i], values.at[one], pairs.at[one], e, arithmetic)
      first = pl.multiple_of(i * chunk // 2, chunk // 2)
      lanes.put_pairs(out, first, slice(None), pairs[one])


def scratch(block: int, arithmetic: str) -> list:
  """Of the kernel, for a block of rows."""
  chunk = min(CHUNK, block)
  together = math.gcd(block // chunk, _TOGETHER[arithmetic])
  return [
      pltpu.VMEM((together, LANES, LANES), jnp.int32),
      pltpu.VMEM((block // chunk, _GROUPS, SUBLANES, LANES), jnp.int32),
      pltpu.VMEM((together, _ENTRIES // 2, transposed.VALUES, LANES), jnp.int32),
      pltpu.VMEM((together, chunk // 2, LANES), jnp.int32),
  ]
