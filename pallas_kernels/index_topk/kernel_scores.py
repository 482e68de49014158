"""Index scores over packed keys, a tile of 1,024 entries being [8 entries of a block, 128 blocks].

One row of queries: the query is spread to [8 · heads, 1024], row 8h + e having head h in the lanes
of entry e of all eight planes and zeros elsewhere. Its product with the planes of 128 blocks is a
register per head in the order of the tile, so that the sum over heads is nothing but additions.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_topk import decode
from pallas_kernels.index_topk.layout import BLOCK, LANES, TILE, TILES, num_tiles

_PLANES = decode.NIBBLES * LANES
_STEP = TILES  # Tiles of a grid step.
_STEP_BITS = (_STEP * TILE).bit_length() - 1
_AT_ONCE = 2  # Tiles decoded and multiplied together: 256 blocks fill a matrix unit of v6e.


def _iota(shape, axis):
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _product(a, b, contract):
  return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


def spread(q):
  """Queries bf16 [I, 128] in the lanes of the planes: [8·I, 1024], zero outside their entry."""
  channel, lane = _iota((LANES, _PLANES), 0), _iota((LANES, _PLANES), 1)
  # Lane 128·n + 16·e + w has channel 8·w + n.
  source = ((lane & (decode.WORDS - 1)) << 3) + (lane >> 7)
  wide = _product(q, jnp.where(channel == source, 1.0, 0.0).astype(jnp.bfloat16), ((1,), (0,)))
  shape = (q.shape[0], BLOCK, _PLANES)
  wide = jnp.broadcast_to(wide[:, None, :], shape)
  mine = ((_iota(shape, 2) >> 4) & (BLOCK - 1)) == _iota(shape, 1)
  return jnp.where(mine, wide, 0.0).reshape(q.shape[0] * BLOCK, _PLANES).astype(jnp.bfloat16)


def _number(tile):
  """Entry of every place of a tile."""
  return tile * TILE + _iota((BLOCK, LANES), 1) * BLOCK + _iota((BLOCK, LANES), 0)


def score_blocks(spread_ref, keys_ref, w_ref, out_ref, i, slots, seen):
  """Scores of the i-th 256 blocks; `slots(t)` are the entries of tile t's places."""
  blocks = keys_ref.shape[1]
  dots = _product(spread_ref[...], keys_ref[i % 2], ((1,), (1,)))  # [8 · I, blocks]
  total = jnp.zeros((BLOCK, blocks), jnp.float32)
  for h in range(dots.shape[0] // BLOCK):
    total += jnp.maximum(dots[h * BLOCK : (h + 1) * BLOCK], 0.0) * w_ref[0, h]
  # −0 if the compiler leaves out the sum with the first zero.
  total = jnp.where(total == 0, 0.0, total)
  for t in range(i * _AT_ONCE, (i + 1) * _AT_ONCE):
    mine = total[:, (t % _AT_ONCE) * LANES : (t % _AT_ONCE + 1) * LANES]
    slot = slots(t)
    out_ref[t] = jnp.where((slot >= 0) & (slot < seen), mine, -jnp.inf)


def mark_nan(out_ref, i, bad, slots, seen):
  """NaN scores among the i-th 256 blocks where bad [8, 256] is above 0."""
  for u in range(_AT_ONCE):
    mine = bad[:, u * LANES : (u + 1) * LANES]
    t = i * _AT_ONCE + u
    slot = slots(t)
    mine = jnp.where((slot >= 0) & (slot < seen), mine, 0.0)
    out_ref[t] = jnp.where(mine > 0, jnp.nan, out_ref[t])


def _row_kernel(
    seen_ref,  # Prefetch. int32 [rows]
    w_ref,  # Input, SMEM. f32 [1, I]
    q_ref,  # Input. bf16 [I, 128]
    codes_ref,  # Input. int32 [blocks of a step, 128]
    scales_ref,  # Input. int32 [blocks of a step / 16, 128]
    out_ref,  # Output. f32 [tiles of a step, 8, 128]
    spread_ref,  # Scratch. bf16 [8 · I, 1024]
    keys_ref,  # Scratch. bf16 [2, 256 blocks, 1024]
    *,
    packed,
):
  step = pl.program_id(2)
  seen = seen_ref[pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)]
  first = step * _STEP

  @pl.when(step == 0)
  def _():
    spread_ref[...] = spread(q_ref[...])

  @pl.when(first * TILE >= seen)
  def _():
    out_ref[...] = jnp.full(out_ref.shape, -jnp.inf, jnp.float32)

  @pl.when(first * TILE < seen)
  def _():
    blocks = _AT_ONCE * LANES
    slots = lambda t: _number(first + t)

    def scale_bytes(i):
      rows = blocks // 16
      start = i * rows if isinstance(i, int) else pl.multiple_of(i * rows, rows)
      return functools.partial(decode.stored_bytes, scales_ref[pl.ds(start, rows), :])

    def unpack(i):
      keys_ref[i % 2] = decode.planes(codes_ref, i * blocks, blocks, scale_bytes(i), packed)

    unpack(0)
    for i in range(_STEP // _AT_ONCE):
      if i + 1 < _STEP // _AT_ONCE:
        unpack(i + 1)
      score_blocks(spread_ref, keys_ref, w_ref, out_ref, i, slots, seen)

    @pl.when(decode.any_nan(scales_ref[...]) > 0)
    def _():
      def mark(i, _):
        mark_nan(out_ref, i, decode.nan_entries(scale_bytes(i)(0, 1)), slots, seen)
        return 0

      jax.lax.fori_loop(0, _STEP // _AT_ONCE, mark, 0)


def scores(q, weights, codes, scales, seen, *, packed):
  """Scores of rows that share nothing, f32 [B, T, tiles, 8, 128]; see `op.packed_scores`."""
  b, t, heads, width = q.shape
  tiles = num_tiles(codes.shape[1] * BLOCK)
  blocks = _STEP * LANES

  def keys(i, j, s, seen):
    # Steps beyond the row's bound name the block that is there already: nothing is fetched.
    return i, jnp.minimum(s, jnp.maximum(seen[i * t + j] - 1, 0) >> _STEP_BITS), 0

  of_row = lambda i, j, s, _: (i, j, 0, 0)
  return pl.pallas_call(
      functools.partial(_row_kernel, packed=packed),
      out_shape=jax.ShapeDtypeStruct((b, t, tiles, BLOCK, LANES), jnp.float32),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          grid=(b, t, tiles // _STEP),
          in_specs=[
              pl.BlockSpec((None, None, 1, heads), of_row, memory_space=pltpu.SMEM),
              pl.BlockSpec((None, None, heads, width), of_row),
              pl.BlockSpec((None, blocks, LANES), keys),
              pl.BlockSpec((None, blocks // 16, LANES), keys),
          ],
          out_specs=pl.BlockSpec(
              (None, None, _STEP, BLOCK, LANES), lambda i, j, s, _: (i, j, s, 0, 0)
          ),
          scratch_shapes=[
              pltpu.VMEM((heads * BLOCK, _PLANES), jnp.bfloat16),
              pltpu.VMEM((2, _AT_ONCE * LANES, _PLANES), jnp.bfloat16),
          ],
      ),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary", "arbitrary")
      ),
      name="index_scores",
  )(seen.reshape(-1), weights[:, :, None], q, codes, scales)
