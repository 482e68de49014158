"""Moves of words between lanes and registers that the pack and unpack kernels share.

Stored words lie along lanes, and a word holds the channels 8w to 8w + 7 (or 4w to 4w + 3); decoded
channels lie along lanes too. So the bits of a channel number that count inside a word have to
change places with the bits of a lane number that count words, entries or tiles. One lane gather
brings the latter to the lowest lane bits; `exchange` then swaps them with the register number.

Two rows share a register throughout, one in the low and one in the high half of each word, as
bf16 rows 2i and 2i + 1 do in a TPU's memory.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch

LANES = 128
SUBLANES = 8


def lane():
  """Lane numbers of a register."""
  return lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)


def sublane():
  """Sublane numbers of a register."""
  return lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)


def shift(words, bits: int):
  """Words shifted left by `bits`, or right, without the sign, by -`bits`."""
  if bits == 0:
    return words
  if bits > 0:
    return words << bits
  return lax.shift_right_logical(words, jnp.full(words.shape, -bits, jnp.int32))


def shift_right(words, bits):
  """Words shifted right without the sign, each by its own number of bits."""
  return lax.shift_right_logical(words, bits)


def gather(words, index):
  """Words of the lanes `index` of the same row."""
  return jnp.take_along_axis(words, index, axis=1)


def exchange(registers: list, bits: list[int]) -> list:
  """Swaps bit j of the register number with bit `bits[j]` of the lane number, for every j.

  It is its own inverse.
  """
  registers = list(registers)
  for j, bit in enumerate(bits):
    lower = (lane() >> bit & 1) == 0
    step = 1 << bit
    for number in range(len(registers)):
      if number >> j & 1:
        continue
      a, b = registers[number], registers[number | 1 << j]
      registers[number] = jnp.where(lower, a, pltpu.roll(b, step, 1))
      registers[number | 1 << j] = jnp.where(lower, pltpu.roll(a, LANES - step, 1), b)
  return registers


def spread_max(values, bits: list[int]):
  """Largest value among the lanes that differ in these bits of their number."""
  for bit in bits:
    step = 1 << bit
    lower = (lane() >> bit & 1) == 0
    other = jnp.where(lower, pltpu.roll(values, LANES - step, 1), pltpu.roll(values, step, 1))
    values = jnp.maximum(values, other)
  return values


def halves(a, b):
  """Two registers of which the first holds the low halves of a (low) and b (high)."""
  low = (a & 0xFFFF) | (b << 16)
  high = shift(a, -16) | (b & ~0xFFFF)
  return low, high


def bf16_pair(low, high):
  """Words of two f32 each that bf16 holds exactly."""
  if dispatch.interpreted():  # It does not know the instruction.
    return shift(as_int(low), -16) | (as_int(high) & ~0xFFFF)
  return as_int(pltpu.pack_elementwise([low, high], packed_dtype=jnp.bfloat16))


def put_pairs(ref, row, columns, pairs):
  """Writes rows 2 · `row` and on of a bf16 reference: pairs int32 [n, 128], two rows a word."""
  if dispatch.interpreted():  # It does not know references of another type.
    ref[pl.ds(2 * row, 2 * pairs.shape[0]), columns] = pltpu.bitcast(pairs, jnp.bfloat16)
  else:
    ref.bitcast(jnp.int32)[pl.ds(row, pairs.shape[0]), columns] = pairs


def as_f32(words):
  """The f32 with these bits."""
  return lax.bitcast_convert_type(words, jnp.float32)


def as_int(values):
  """The bits of f32 values."""
  return lax.bitcast_convert_type(values, jnp.int32)


def signed(pattern: int) -> int:
  """The int32 with the bits of a 32-bit pattern."""
  return pattern - (pattern >> 31 << 32)
