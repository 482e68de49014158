"""Index scores over packed keys, a tile of 1,024 entries being [8 entries of a block, 128 blocks].

One row of queries: the keys of entry e of 128 blocks are the weights of a product with all heads,
whose result has a head in every sublane. The eight products of a tile are weighted and added up
over sublanes together, so that the sums of entry e come out in sublane e.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_topk import decode
from pallas_kernels.index_topk.layout import BLOCK, LANES, TILE, TILES, num_tiles

_STEP = TILES  # Tiles of a grid step.
_STEP_BITS = (_STEP * TILE).bit_length() - 1
_AT_ONCE = 2  # Tiles multiplied together: 256 blocks fill a matrix unit of v6e.
HEADS = 8  # Heads come in multiples of it.


def _iota(shape, axis):
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def number(tile):
  """Entry of every place of a tile."""
  return tile * TILE + _iota((BLOCK, LANES), 1) * BLOCK + _iota((BLOCK, LANES), 0)


def _sums(parts: list):
  """Register with the sum over sublanes of the e-th of eight registers in sublane e."""
  for bit in range(3):
    low = (_iota((BLOCK, LANES), 0) >> bit & 1) == 0
    merged = []
    for a, b in zip(parts[0::2], parts[1::2]):
      # Sublane s of one and sublane s + 2^bit of the other are of the same register.
      other = pltpu.roll(jnp.where(low, b, a), BLOCK - (1 << bit), 0)
      merged.append(jnp.where(low, a, b) + other)
    parts = merged
  return parts[0]


def score_tiles(q_ref, w_ref, words_ref, scales_ref, arithmetic):
  """Scores [8, 128] of a few tiles.

  Args:
    q_ref: bf16 [I, 128], with channels in the order of the keys.
    w_ref: f32 [I, 128], the weight of a head in all lanes.
    words_ref: int32 [tiles, 128, 128], codes transposed.
    scales_ref: int32 [tiles, 4, 8, 128].
    arithmetic: one of those in `quantize.decode`.
  """
  tiles = range(words_ref.shape[0])
  parts = [[] for _ in tiles]
  for e in range(BLOCK):
    keys = [decode.keys(words_ref.at[t], scales_ref.at[t], e, arithmetic) for t in tiles]
    keys = jnp.concatenate(keys, axis=1)
    dots = jnp.dot(q_ref[...], keys, preferred_element_type=jnp.float32)
    for t in tiles:
      mine = jnp.maximum(dots[:, t * LANES : (t + 1) * LANES], 0.0) * w_ref[...]
      heads = (mine[h : h + HEADS] for h in range(0, mine.shape[0], HEADS))
      parts[t].append(functools.reduce(jnp.add, heads))
  totals = map(_sums, parts)
  # −0 of negative weights.
  return [jnp.where(total == 0, 0.0, total) for total in totals]


def masked(total, slot, seen, words):
  """Scores with −inf at entries that are not seen, and NaN at those with a NaN scale."""
  total = jnp.where(decode.nan_entries(words) > 0, jnp.nan, total)
  return jnp.where((slot >= 0) & (slot < seen), total, -jnp.inf)


def prepare(q_ref, w_ref, ordered_ref, weight_ref, arithmetic):
  """Fills the scratch that `score_tiles` reads, for a row."""
  ordered_ref[...] = decode.ordered(q_ref[...], arithmetic)
  weight_ref[...] = jnp.broadcast_to(w_ref[...], weight_ref.shape)


def _row_kernel(
    seen_ref,  # Prefetch. int32 [rows]
    w_ref,  # Input. f32 [I, 1]
    q_ref,  # Input. bf16 [I, 128]
    codes_ref,  # Input. int32 [blocks of a step, 128]
    scales_ref,  # Input. int32 [blocks of a step / 16, 128]
    out_ref,  # Output. f32 [tiles of a step, 8, 128]
    ordered_ref,  # Scratch. bf16 [I, 128]
    weight_ref,  # Scratch. f32 [I, 128]
    words_ref,  # Scratch. int32 [tiles of a step, 128, 128], codes transposed.
    scale_words_ref,  # Scratch. int32 [tiles of a step, 8, 128]
    bits_ref,  # Scratch. int32 [tiles of a step, 4, 8, 128]
    *,
    arithmetic,
):
  step = pl.program_id(2)
  seen = seen_ref[pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)]
  first = step * _STEP

  @pl.when(step == 0)
  def _():
    prepare(q_ref, w_ref, ordered_ref, weight_ref, arithmetic)

  @pl.when(first * TILE >= seen)
  def _():
    out_ref[...] = jnp.full(out_ref.shape, -jnp.inf, jnp.float32)

  @pl.when(first * TILE < seen)
  def _():
    for t in range(_STEP):
      words = decode.stored_words(scales_ref[BLOCK * t : BLOCK * (t + 1), :])
      scale_words_ref[t] = words
      decode.put_scales(bits_ref.at[t], words, arithmetic)
    for t in range(_STEP):
      words_ref[t] = codes_ref[LANES * t : LANES * (t + 1), :].T
    for t in range(0, _STEP, _AT_ONCE):
      at = pl.ds(t, _AT_ONCE)
      totals = score_tiles(ordered_ref, weight_ref, words_ref.at[at], bits_ref.at[at], arithmetic)
      for i, total in enumerate(totals):
        slot = number(first + t + i)
        out_ref[t + i] = masked(total, slot, seen, scale_words_ref[t + i])


def padded(q, weights):
  """Queries and weights with heads of zeros up to a multiple of eight."""
  missing = -q.shape[2] % HEADS
  q = jnp.pad(q, ((0, 0), (0, 0), (0, missing), (0, 0)))
  return q, jnp.pad(weights, ((0, 0), (0, 0), (0, missing)))


def scores(q, weights, codes, scales, seen, *, arithmetic):
  """Scores of rows that share nothing, f32 [B, T, tiles, 8, 128]; see `op.packed_scores`."""
  q, weights = padded(q, weights)
  b, t, heads, width = q.shape
  tiles = num_tiles(codes.shape[1] * BLOCK)
  blocks = _STEP * LANES

  def keys(i, j, s, seen):
    # Steps beyond the row's bound name the block that is there already: nothing is fetched.
    return i, jnp.minimum(s, jnp.maximum(seen[i * t + j] - 1, 0) >> _STEP_BITS), 0

  of_row = lambda i, j, s, _: (i, j, 0, 0)
  return pl.pallas_call(
      functools.partial(_row_kernel, arithmetic=arithmetic),
      out_shape=jax.ShapeDtypeStruct((b, t, tiles, BLOCK, LANES), jnp.float32),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          grid=(b, t, tiles // _STEP),
          in_specs=[
              pl.BlockSpec((None, None, heads, 1), of_row),
              pl.BlockSpec((None, None, heads, width), of_row),
              pl.BlockSpec((None, blocks, LANES), keys),
              pl.BlockSpec((None, blocks // 16, LANES), keys),
          ],
          out_specs=pl.BlockSpec(
              (None, None, _STEP, BLOCK, LANES), lambda i, j, s, _: (i, j, s, 0, 0)
          ),
          scratch_shapes=[
              pltpu.VMEM((heads, width), jnp.bfloat16),
              pltpu.VMEM((heads, LANES), jnp.float32),
              pltpu.VMEM((_STEP, LANES, LANES), jnp.int32),
              pltpu.VMEM((_STEP, BLOCK, LANES), jnp.int32),
              pltpu.VMEM((_STEP, decode.GROUPS, BLOCK, LANES), jnp.int32),
          ],
      ),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary", "arbitrary")
      ),
      name="index_scores",
  )(seen.reshape(-1), weights[..., None], q, codes, scales)
