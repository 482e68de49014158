"""A visit is a tile of rows and a group with rows in it; its matrices pass by in steps of F.

Rows lie along lanes: the weights of the visit's own rows, 0 for others, multiply hidden values in
place, and sums over visits of a tile need no mask.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.visits import Visits

LANES = 128
TILE = 128  # rows
_STEP = 256  # hidden values


def _dot(a, b, contract):
  exact = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
  return lax.dot_general(
      a, b, (contract, ((), ())), precision=exact, preferred_element_type=jnp.float32
  )


def _body(layer_ref, tile_ref, matrix_ref, start_ref, stop_ref, x_ref, scale_ref, w1_ref, w2_ref,
          w3_ref, out_ref, total_ref, *, limit: float):  # fmt: skip
  # Prefetch: number of the layer, int32 [1]; Visits, int32 [P] each
  # Input: x [tile, D], scale f32 [1, tile], w1 and w3 [step, D], w2 [D, step]
  # Output: rows of a tile, [tile, D]
  # Scratch: total f32 [D, tile]
  del layer_ref, matrix_ref
  p, j = pl.program_id(0), pl.program_id(1)
  last = pl.num_programs(0) - 1
  here = tile_ref[p]

  @pl.when((j == 0) & ((p == 0) | (here != tile_ref[jnp.maximum(p - 1, 0)])))
  def _():
    total_ref[...] = jnp.zeros_like(total_ref)

  start, stop = start_ref[p], stop_ref[p]

  @pl.when(stop > start)
  def _():
    x = x_ref[...]
    g, u = (_dot(w[...], x, ((1,), (1,))).astype(x.dtype) for w in (w1_ref, w3_ref))
    g, u = g.astype(jnp.float32), u.astype(jnp.float32)
    if limit:
      g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
    h = g / (1.0 + jnp.exp(-g)) * u * scale_ref[...]
    row = lax.broadcasted_iota(jnp.int32, h.shape, 1)
    h = jnp.where((row >= start) & (row < stop), h, 0.0).astype(x.dtype)
    total_ref[...] += _dot(w2_ref[...], h, ((1,), (0,)))

  done = (p == last) | (here != tile_ref[jnp.minimum(p + 1, last)])

  @pl.when(done & (j == pl.num_programs(1) - 1))
  def _():
    out_ref[...] = total_ref[...].T.astype(out_ref.dtype)


def run(layer, at: Visits, x, scale, w1, w2, w3, limit: float, vmem_bytes: int):
  """Rows x [S, D] of whole tiles, scale [1, S]; see `op.grouped_experts`."""
  d, f = x.shape[1], w1.shape[2]
  step = max(w for w in range(LANES, _STEP + 1, LANES) if f % w == 0)
  steps = f // step

  def matrix(p, j, layer, tile, matrix, start, stop):
    # A visit without rows stays at the weights that are there.
    return layer[0], matrix[p], jnp.where(stop[p] > start[p], j, steps - 1)

  rows = lambda p, j, layer, tile, *_: (tile[p], 0)
  up = pl.BlockSpec((None, None, step, d), lambda *a: (*matrix(*a), 0))
  down = pl.BlockSpec((None, None, d, step), lambda *a: (*matrix(*a)[:2], 0, matrix(*a)[2]))
  return pl.pallas_call(
      functools.partial(_body, limit=limit),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=5,
          grid=(at.tile.shape[0], steps),
          in_specs=[
              pl.BlockSpec((TILE, d), rows),
              pl.BlockSpec((1, TILE), lambda p, j, layer, tile, *_: (0, tile[p])),
              up, down, up,
          ],
          out_specs=pl.BlockSpec((TILE, d), rows),
          scratch_shapes=[pltpu.VMEM((d, TILE), jnp.float32)],
      ),
      out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vmem_bytes
      ),
      name="grouped_experts",
  )(layer, *at, x, scale, w1, w2, w3)  # fmt: skip
