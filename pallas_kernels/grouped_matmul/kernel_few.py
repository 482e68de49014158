"""Forward body for groups of few rows, as in decoding: nothing but the words' HBM time is left.

The matrix unit takes E2M1 elements as E5M2, without scales. A chunk's 8 rows stand four times
below each other, each time zero outside of one group of 32 inputs, so that a product over 128
inputs gives the sums of its four groups; scales are multiplied to these sums.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import decode
from pallas_kernels.grouped_matmul.layout import GROUP, LANES, UNIT

ROWS = 8
_DEPTH = LANES
_GROUPS = _DEPTH // GROUP


def scratch(k: int):
  """Of the spread rows: bf16 [K / 128, 32, 128]."""
  return pltpu.VMEM((k // _DEPTH, _GROUPS * ROWS, _DEPTH), jnp.bfloat16)


def forward(tile_ref, matrix_ref, start_ref, stop_ref, x_ref, words_ref, scales_ref, out_ref,
            factors, spread, *, s):  # fmt: skip
  """As `kernel._forward`; `s` is its `Sizes`."""
  # Prefetch: Visits, int32 [P] each
  # Input: x bf16 [tile, K], words [K / 8, step], scales [R, step]
  # Output: rows of a tile, [tile, N / halves]
  # Scratch: factors int32 [step / 128, K / 32, 128]; spread, see above
  del matrix_ref
  p, j = pl.program_id(1), pl.program_id(2)
  k = x_ref.shape[1]
  window = min(32, s.tile)

  @pl.when((j == 0) & ((p == 0) | (tile_ref[p] != tile_ref[jnp.maximum(p - 1, 0)])))
  def _():
    out_ref[...] = jnp.zeros_like(out_ref)

  start, stop = start_ref[p], stop_ref[p]
  chunks = jnp.where(stop > start, (stop - start + ROWS - 1) >> 3, 0)

  @pl.when(stop > start)
  def _():
    decode.factors(scales_ref, factors, False)

  @pl.loop(0, chunks)
  def _(i):
    own = start + ROWS * i
    # A window of whole bf16 registers; what wraps around at its end is not the visit's own.
    base = jnp.minimum((own >> 4) << 4, s.tile - window)
    rows, offset = pl.ds(pl.multiple_of(base, 16), window), own - base

    @pl.when((j == 0) | (chunks > 1))
    def _():
      group = lax.broadcasted_iota(jnp.int32, (ROWS, _DEPTH), 1) >> 5
      for part in range(k // _DEPTH):
        x = x_ref[rows, part * _DEPTH : (part + 1) * _DEPTH].astype(jnp.float32)
        x = pltpu.roll(x, (window - offset) & (window - 1), 0)[:ROWS]
        each = [jnp.where(group == g, x, 0.0) for g in range(_GROUPS)]
        spread[part] = jnp.concatenate(each, axis=0).astype(jnp.bfloat16)

    @pl.loop(0, s.step // s.width, unroll=s.unroll)
    def _(n):
      first = n * (s.width // LANES)
      lanes = pl.ds(pl.multiple_of(n * s.width, s.width), s.width)
      total = jnp.zeros((ROWS, s.width), jnp.float32)
      for number in range(k // UNIT):
        matrices = decode.elements(words_ref, lanes, number, k)
        for inputs, matrix in zip(decode.inputs(number, k, True), matrices):
          x = spread[inputs.start // _DEPTH]
          sums = lax.dot_general(
              x, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
          )
          for g in range(_GROUPS):
            factor = decode.factor_rows(factors, inputs.start // GROUP + g, first, s.width)
            total += sums[g * ROWS : (g + 1) * ROWS] * factor
      lanes = pl.ds(pl.multiple_of(j * s.step + n * s.width, s.width), s.width)
      behind = jnp.zeros((window - ROWS, s.width), jnp.float32)
      new = jnp.concatenate([total * decode.E5M2_UNIT, behind], axis=0)
      new = pltpu.roll(new, offset, 0)
      row = base + lax.broadcasted_iota(jnp.int32, new.shape, 0)
      mine = (row >= own) & (row < jnp.minimum(stop, own + ROWS))
      old = out_ref[rows, lanes].astype(jnp.float32)
      out_ref[rows, lanes] = jnp.where(mine, new, old).astype(out_ref.dtype)
