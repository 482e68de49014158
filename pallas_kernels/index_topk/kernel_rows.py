"""Index scores of eight and more rows a line: keys are decoded once for all of them.

Decoded planes go through a product with a permutation matrix, which gathers each entry's channels
from the eight planes: one matrix [blocks, 128 channels] for each of a block's eight entries. A
register of scores then is eight rows by the same entry of 128 blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_topk import decode
from pallas_kernels.index_topk.layout import BLOCK, LANES, TILE, TILES, num_tiles

ROWS = 8  # Of queries in a grid step, one a sublane.
_PLANES = decode.NIBBLES * LANES
_STEP = TILES
_STEP_BITS = (_STEP * TILE).bit_length() - 1
_AT_ONCE = 2 * LANES  # Blocks.


def _iota(shape, axis):
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _product(a, b, contract):
  return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


def _gather_matrix(entry):
  """0/1 bf16 [1024, 128]: lane 128·n + 16·entry + w of the planes to channel 8·w + n."""
  shape = (_PLANES, LANES)
  lane, channel = _iota(shape, 0), _iota(shape, 1)
  source = ((channel & 7) << 7) + (entry << 4) + (channel >> 3)
  return jnp.where(lane == source, 1.0, 0.0).astype(jnp.bfloat16)


def _kernel(
    most_ref,  # Prefetch. int32 [B, T / 8]: most entries that one of the eight rows sees.
    seen_ref,  # Input. int32 [8, 1]
    w_ref,  # Input. f32 [8, I]
    q_ref,  # Input. bf16 [8 · I, 128], row 8·h + t.
    codes_ref,  # Input. int32 [blocks of a step, 128]
    scales_ref,  # Input. int32 [blocks of a step / 16, 128]
    out_ref,  # Output. f32 [8, tiles of a step, 8, 128]
    gather_ref,  # Scratch. bf16 [8, 1024, 128]: `_gather_matrix` of each entry.
    planes_ref,  # Scratch. bf16 [256 blocks, 1024]
    keys_ref,  # Scratch. bf16 [8, blocks of a step, 128]
    weight_ref,  # Scratch. f32 [8 · I, 128]
    *,
    packed,
):
  line, step, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  first = step * _STEP
  heads = w_ref.shape[1]
  parts = _STEP * LANES // _AT_ONCE
  widest = most_ref[line, pl.num_programs(2)]

  @pl.when((step == 0) & (group == 0))
  def _():
    for e in range(BLOCK):
      gather_ref[e] = _gather_matrix(e)

  def scale_bytes(i):
    rows = scales_ref[pl.ds(pl.multiple_of(i * _AT_ONCE >> 4, 16), _AT_ONCE >> 4), :]
    return functools.partial(decode.stored_bytes, rows)

  @pl.when((group == 0) & (first * TILE < widest))
  def _():
    def part(i, _):
      start = pl.multiple_of(i * _AT_ONCE, _AT_ONCE)
      planes_ref[...] = decode.planes(codes_ref, start, _AT_ONCE, scale_bytes(i), packed)
      for e in range(BLOCK):
        dense = _product(planes_ref[...], gather_ref[e], ((1,), (0,)))
        keys_ref[e, pl.ds(start, _AT_ONCE), :] = dense.astype(jnp.bfloat16)
      return 0

    jax.lax.fori_loop(0, parts, part, 0)

  most = most_ref[line, group]

  @pl.when(first * TILE >= most)
  def _():
    out_ref[...] = jnp.full(out_ref.shape, -jnp.inf, jnp.float32)

  @pl.when(first * TILE < most)
  def _():
    for h in range(heads):
      weight_ref[h * ROWS : (h + 1) * ROWS, :] = jnp.broadcast_to(
          w_ref[:, h : h + 1], (ROWS, LANES)
      )
    seen = jnp.broadcast_to(seen_ref[...], (ROWS, LANES))

    def part(i, _):
      start = pl.multiple_of(i * _AT_ONCE, _AT_ONCE)
      for e in range(BLOCK):
        dots = _product(q_ref[...], keys_ref[e, pl.ds(start, _AT_ONCE), :], ((1,), (1,)))
        for t in range(_AT_ONCE // LANES):
          total = jnp.zeros((ROWS, LANES), jnp.float32)
          for h in range(heads):
            mine = dots[h * ROWS : (h + 1) * ROWS, t * LANES : (t + 1) * LANES]
            total += jnp.maximum(mine, 0.0) * weight_ref[h * ROWS : (h + 1) * ROWS, :]
          total = jnp.where(total == 0, 0.0, total)
          tile = i * (_AT_ONCE // LANES) + t
          slot = (first + tile) * TILE + BLOCK * _iota((ROWS, LANES), 1) + e
          out_ref[:, tile, e, :] = jnp.where(slot < seen, total, -jnp.inf)
      return 0

    jax.lax.fori_loop(0, parts, part, 0)

    @pl.when(decode.any_nan(scales_ref[...]) > 0)
    def _():
      def part(i, _):
        bad = decode.nan_entries(scale_bytes(i)(0, 1))
        for t in range(_AT_ONCE // LANES):
          tile = i * (_AT_ONCE // LANES) + t
          for e in range(BLOCK):
            slot = (first + tile) * TILE + BLOCK * _iota((ROWS, LANES), 1) + e
            mine = jnp.broadcast_to(bad[e : e + 1, t * LANES : (t + 1) * LANES], (ROWS, LANES))
            mine = jnp.where(slot < seen, mine, 0.0)
            out_ref[:, tile, e, :] = jnp.where(mine > 0, jnp.nan, out_ref[:, tile, e, :])
        return 0

      jax.lax.fori_loop(0, parts, part, 0)


def scores(q, weights, codes, scales, seen, *, packed):
  """As `kernel_scores.scores`, with T a multiple of 8."""
  b, t, heads, width = q.shape
  groups = t // ROWS
  tiles = num_tiles(codes.shape[1] * BLOCK)
  q = q.reshape(b, groups, ROWS, heads, width).swapaxes(2, 3).reshape(b, groups, -1, width)
  seen = seen.reshape(b, groups, ROWS)
  most = jnp.max(seen, axis=2)
  most = jnp.concatenate([most, jnp.max(most, axis=1, keepdims=True)], axis=1)
  blocks = _STEP * LANES

  def keys(i, s, g, most):
    return i, jnp.minimum(s, jnp.maximum(most[i, groups] - 1, 0) >> _STEP_BITS), 0

  of_rows = lambda i, s, g, _: (i, g, 0, 0)
  return pl.pallas_call(
      functools.partial(_kernel, packed=packed),
      out_shape=jax.ShapeDtypeStruct((b, t, tiles, BLOCK, LANES), jnp.float32),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          grid=(b, tiles // _STEP, groups),
          in_specs=[
              pl.BlockSpec((None, None, ROWS, 1), of_rows),
              pl.BlockSpec((None, None, ROWS, heads), of_rows),
              pl.BlockSpec((None, None, heads * ROWS, width), of_rows),
              pl.BlockSpec((None, blocks, LANES), keys),
              pl.BlockSpec((None, blocks // 16, LANES), keys),
          ],
          out_specs=pl.BlockSpec(
              (None, ROWS, _STEP, BLOCK, LANES), lambda i, s, g, _: (i, g, s, 0, 0)
          ),
          scratch_shapes=[
              pltpu.VMEM((BLOCK, _PLANES, LANES), jnp.bfloat16),
              pltpu.VMEM((_AT_ONCE, _PLANES), jnp.bfloat16),
              pltpu.VMEM((BLOCK, blocks, LANES), jnp.bfloat16),
              pltpu.VMEM((heads * ROWS, LANES), jnp.float32),
          ],
      ),
      # A core that starts in the middle of the groups would find no keys decoded.
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary", "arbitrary")
      ),
      name="index_scores_rows",
  )(most, seen[..., None], weights.reshape(b, groups, ROWS, heads), q, codes, scales)
