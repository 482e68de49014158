"""Index scores of several rows a line: keys are decoded once for all of them.

The keys of entry e of 128 blocks are the weights of a product with all heads of eight rows. A
register of scores then is eight rows by the same entry of 128 blocks, and the sum over heads is
nothing but additions.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_topk import decode
from pallas_kernels.index_topk.layout import BLOCK, LANES, TILE, TILES, num_tiles

ROWS = 8  # Of queries in a grid step, one a sublane.
_STEP = TILES
_STEP_BITS = (_STEP * TILE).bit_length() - 1
_AT_ONCE = 2  # Tiles.


def _iota(shape, axis):
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _kernel(
    most_ref,  # Prefetch. int32 [B, groups + 1]: most entries that one of eight rows sees; of all.
    seen_ref,  # Input. int32 [8, 1]
    w_ref,  # Input. f32 [8, I]
    q_ref,  # Input. bf16 [8 · I, 128], row 8·h + t.
    codes_ref,  # Input. int32 [blocks of a step, 128]
    scales_ref,  # Input. int32 [blocks of a step / 16, 128]
    out_ref,  # Output. f32 [8, tiles of a step, 8, 128]
    words_ref,  # Scratch. int32 [128, 128]
    bits_ref,  # Scratch. int32 [4, 8, 128]
    nan_ref,  # Scratch. int32 [tiles of a step, 8, 128]
    keys_ref,  # Scratch. bf16 [8, 128, blocks of a step]
    weight_ref,  # Scratch. f32 [8 · I, 128]
    *,
    arithmetic,
):
  line, step, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  first = step * _STEP
  heads = w_ref.shape[1]
  widest = most_ref[line, pl.num_programs(2)]

  @pl.when((group == 0) & (first * TILE < widest))
  def _():
    for t in range(_STEP):
      words = decode.stored_words(scales_ref[BLOCK * t : BLOCK * (t + 1), :])
      decode.put_scales(bits_ref, words, arithmetic)
      nan_ref[t] = decode.nan_entries(words)
      blocks = slice(LANES * t, LANES * (t + 1))
      words_ref[...] = codes_ref[blocks, :].T
      for e in range(BLOCK):
        keys_ref[e, :, blocks] = decode.keys(words_ref, bits_ref, e, arithmetic)

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
    q = decode.ordered(q_ref[...], arithmetic)

    @pl.loop(0, _STEP // _AT_ONCE)
    def _(i):
      blocks = pl.ds(pl.multiple_of(i * _AT_ONCE * LANES, _AT_ONCE * LANES), _AT_ONCE * LANES)
      for e in range(BLOCK):
        dots = jnp.dot(q, keys_ref[e, :, blocks], preferred_element_type=jnp.float32)
        for t in range(_AT_ONCE):
          total = jnp.zeros((ROWS, LANES), jnp.float32)
          for h in range(heads):
            mine = dots[h * ROWS : (h + 1) * ROWS, t * LANES : (t + 1) * LANES]
            total += jnp.maximum(mine, 0.0) * weight_ref[h * ROWS : (h + 1) * ROWS, :]
          total = jnp.where(total == 0, 0.0, total)
          tile = i * _AT_ONCE + t
          bad = jnp.broadcast_to(nan_ref[tile, e : e + 1, :], (ROWS, LANES))
          slot = (first + tile) * TILE + BLOCK * _iota((ROWS, LANES), 1) + e
          total = jnp.where(bad > 0, jnp.nan, total)
          out_ref[:, tile, e, :] = jnp.where(slot < seen, total, -jnp.inf)


def scores(q, weights, codes, scales, seen, *, arithmetic):
  """As `kernel_scores.scores`, for rows of the same lines; rows beyond T see nothing."""
  b, t, heads, width = q.shape
  groups = pl.cdiv(t, ROWS)
  rows = lambda x: jnp.pad(x, ((0, 0), (0, groups * ROWS - t)) + ((0, 0),) * (x.ndim - 2))
  tiles = num_tiles(codes.shape[1] * BLOCK)
  q = rows(q).reshape(b, groups, ROWS, heads, width).swapaxes(2, 3).reshape(b, groups, -1, width)
  weights = rows(weights).reshape(b, groups, ROWS, heads)
  seen = rows(seen).reshape(b, groups, ROWS)
  most = jnp.max(seen, axis=2)
  most = jnp.concatenate([most, jnp.max(most, axis=1, keepdims=True)], axis=1)
  blocks = _STEP * LANES

  def keys(i, s, g, most):
    return i, jnp.minimum(s, jnp.maximum(most[i, groups] - 1, 0) >> _STEP_BITS), 0

  of_rows = lambda i, s, g, _: (i, g, 0, 0)
  return pl.pallas_call(
      functools.partial(_kernel, arithmetic=arithmetic),
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
              pltpu.VMEM((LANES, LANES), jnp.int32),
              pltpu.VMEM((decode.GROUPS, BLOCK, LANES), jnp.int32),
              pltpu.VMEM((_STEP, BLOCK, LANES), jnp.int32),
              pltpu.VMEM((BLOCK, LANES, blocks), jnp.bfloat16),
              pltpu.VMEM((heads * ROWS, LANES), jnp.float32),
          ],
      ),
      # A core that starts in the middle of the groups would find no keys decoded.
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary", "arbitrary")
      ),
      name="index_scores_rows",
  )(most, seen[..., None], weights, q, codes, scales)
