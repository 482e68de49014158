"""Grouped product with packed weights: one pass over the words, decoded beside the products.

Grid (halves of the outputs, visits, steps of the outputs). A tile of rows stays in VMEM, input and
output, while the groups in it go by; a visit takes its rows in chunks that start at a multiple of
16 and leaves the others as they are.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import decode, kernel_few
from pallas_kernels.grouped_matmul.layout import GROUP, LANES, UNIT, Fp4
from pallas_kernels.grouped_matmul.visits import Visits

ALIGN = 16  # rows of a bf16 register


class Sizes(NamedTuple):
  """Static facts of a call.

  Attributes:
    tile: rows in VMEM at a time.
    chunk: rows of one product.
    halves: parts of the outputs that go to different cores.
    step: outputs whose words are in VMEM at a time.
    width: outputs decoded at a time.
    unroll: of them in straight-line code, so that little is waited for between them.
    few: chunks are 8 rows of FP4, see `kernel_few`.
    packed: the vector unit computes in bf16.
    vmem_bytes: limit for the compiler.
  """

  tile: int
  chunk: int
  halves: int
  step: int
  width: int
  unroll: int
  few: bool
  packed: bool
  vmem_bytes: int


def _rows(x_ref, start, s: Sizes):
  return pl.ds(pl.multiple_of(start, ALIGN), s.chunk)


def _each_chunk(start, stop, s: Sizes, body):
  """Calls body(first row of a chunk, f32 0/1 [chunk, 1] of the rows that are the visit's own)."""
  first = (start >> 4) << 4
  chunks = (stop - first + s.chunk - 1) >> (s.chunk.bit_length() - 1)

  @pl.loop(0, jnp.where(stop > start, chunks, 0))
  def _(i):
    own = first + i * s.chunk
    # The last chunk of a tile begins earlier and repeats rows that are done.
    at = jnp.minimum(own, s.tile - s.chunk)
    row = at + lax.broadcasted_iota(jnp.int32, (s.chunk, LANES), 0)
    body(at, (row >= jnp.maximum(start, own)) & (row < stop))


def _spread(mask, width):
  return jnp.concatenate([mask] * (width // LANES), axis=1)


def _product(a, b, transposed):
  exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  contract = ((1,), (1,)) if transposed else ((1,), (0,))
  return lax.dot_general(
      a, b, (contract, ((), ())), precision=exact, preferred_element_type=jnp.float32
  )


def _forward(tile_ref, matrix_ref, start_ref, stop_ref, x_ref, words_ref, scales_ref, out_ref,
             factors, *, s: Sizes, fp4: bool):  # fmt: skip
  # Prefetch: Visits, int32 [P] each
  # Input: x [tile, K], words [K / 8 or K / 4, step], scales [R, step]
  # Output: rows of a tile, [tile, N / halves]
  # Scratch: factors int32 [step / 128, K / 32, 128], scales as the vector unit multiplies them
  del matrix_ref
  p, j = pl.program_id(1), pl.program_id(2)
  k = x_ref.shape[1]

  @pl.when((j == 0) & ((p == 0) | (tile_ref[p] != tile_ref[jnp.maximum(p - 1, 0)])))
  def _():
    out_ref[...] = jnp.zeros_like(out_ref)

  start, stop = start_ref[p], stop_ref[p]

  @pl.when(stop > start)
  def _():
    decode.factors(scales_ref, factors, s.packed)

  def chunk(at, mask):
    rows = _rows(x_ref, at, s)

    @pl.loop(0, s.step // s.width, unroll=s.unroll)
    def _(n):
      first = n * (s.width // LANES)
      lanes = pl.ds(pl.multiple_of(n * s.width, s.width), s.width)
      total = jnp.zeros((s.chunk, s.width), jnp.float32)
      for piece in range(k // UNIT):
        matrix = decode.piece(words_ref, factors, first, lanes, piece, k, fp4, s.packed)
        x = jnp.concatenate([x_ref[rows, at] for at in decode.inputs(piece, k, fp4)], axis=1)
        total += _product(x, matrix.astype(x.dtype), False)
      lanes = pl.ds(pl.multiple_of(j * s.step + n * s.width, s.width), s.width)
      old = out_ref[rows, lanes]
      total = total * decode.E5M2_UNIT if fp4 else total
      new = jnp.where(_spread(mask, s.width), total, old.astype(jnp.float32))
      out_ref[rows, lanes] = new.astype(out_ref.dtype)

  _each_chunk(start, stop, s, chunk)


def _backward(tile_ref, matrix_ref, start_ref, stop_ref, y_ref, words_ref, scales_ref, out_ref,
              factors, total, *, s: Sizes, fp4: bool):  # fmt: skip
  # Prefetch: Visits, int32 [P] each
  # Input: y [tile, N], words [K / 8 or K / 4, step], scales [R, step]
  # Output: rows of a tile, [tile, K]
  # Scratch: factors int32 [step / 128, K / 32, 128]; total f32 [tile, K], sums over the outputs
  del matrix_ref
  p, j = pl.program_id(1), pl.program_id(2)
  k = out_ref.shape[1]

  @pl.when((j == 0) & ((p == 0) | (tile_ref[p] != tile_ref[jnp.maximum(p - 1, 0)])))
  def _():
    total[...] = jnp.zeros_like(total)

  start, stop = start_ref[p], stop_ref[p]

  @pl.when(stop > start)
  def _():
    decode.factors(scales_ref, factors, s.packed)

  def chunk(at, mask):
    rows = _rows(y_ref, at, s)

    @pl.loop(0, s.step // s.width, unroll=s.unroll)
    def _(n):
      first = n * (s.width // LANES)
      lanes = pl.ds(pl.multiple_of(n * s.width, s.width), s.width)
      y = y_ref[rows, pl.ds(pl.multiple_of(j * s.step + n * s.width, s.width), s.width)]
      for piece in range(k // UNIT):
        matrix = decode.piece(words_ref, factors, first, lanes, piece, k, fp4, s.packed)
        part, done = _product(y, matrix.astype(y.dtype), True), 0
        for lane in decode.inputs(piece, k, fp4):
          size = lane.stop - lane.start
          own = _spread(mask, size)
          total[rows, lane] += jnp.where(own, part[:, done : done + size], 0.0)
          done += size

  _each_chunk(start, stop, s, chunk)

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    unit = decode.E5M2_UNIT if fp4 else 1.0
    out_ref[...] = (total[...] * unit).astype(out_ref.dtype)


def run(x, weights, at: Visits, s: Sizes, transposed: bool):
  """Rows x [S, K] times the matrices, or [S, N] times their transposes; S is a multiple of 16."""
  fp4 = isinstance(weights, Fp4)
  _, words, n = weights.words.shape
  k = words * (8 if fp4 else 4)
  rows = x.shape[0]
  steps = n // s.halves // s.step
  width = k if transposed else n // s.halves

  def matrix(h, p, j, tile, matrix, start, stop):
    # A visit without rows stays at the words that are there.
    return matrix[p], 0, h * steps + jnp.where(stop[p] > start[p], j, steps - 1)

  whole = lambda h, p, j, tile, *_: (tile[p], 0)
  out = lambda h, p, j, tile, *_: (tile[p], h)
  scratch = [pltpu.VMEM((s.step // LANES, k // GROUP, LANES), jnp.int32)]
  if transposed:
    scratch.append(pltpu.VMEM((s.tile, k), jnp.float32))
  if s.few:
    scratch.append(kernel_few.scratch(k))
    body = functools.partial(kernel_few.forward, s=s)
  else:
    body = functools.partial(_backward if transposed else _forward, s=s, fp4=fp4)
  return pl.pallas_call(
      body,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=4,
          grid=(s.halves, at.tile.shape[0], steps),
          in_specs=[
              pl.BlockSpec((s.tile, x.shape[1]), whole),
              pl.BlockSpec((None, words, s.step), matrix),
              pl.BlockSpec((None, weights.scales.shape[1], s.step), matrix),
          ],
          out_specs=pl.BlockSpec((s.tile, width), out),
          scratch_shapes=scratch,
      ),
      out_shape=jax.ShapeDtypeStruct((rows, k if transposed else n), x.dtype),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary", "arbitrary"),
          vmem_limit_bytes=s.vmem_bytes,
      ),
      name=f"grouped_matmul_{'fp4' if fp4 else 'fp8'}{'_transposed' if transposed else ''}",
  )(*at, x, *weights)
