"""Index scores of a row over the blocks of its candidate pool, which are fetched one by one.

A block is one row of codes, and its scales lie in one row of scales: two copies of 512 bytes. The
copies of the next 256 blocks are under way while 256 are scored as in `kernel_scores`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_topk import decode, kernel_scores
from pallas_kernels.index_topk.layout import BLOCK, LANES, TILES

_PART = 2 * LANES  # Blocks fetched and scored together.
_UNROLLED = 16  # Blocks whose copies one turn of the loop starts.


def _kernel(
    seen_ref,  # Prefetch. int32 [B · T]
    count_ref,  # Prefetch. int32 [B · T]: blocks up to the last that is not absent.
    pool_ref,  # Input, SMEM. int32 [1, P]
    w_ref,  # Input. f32 [I, 1]
    numbers_ref,  # Input. int32 [P / 128, 128]: the pool again.
    q_ref,  # Input. bf16 [I, 128]
    codes_hbm,  # Input, HBM. int32 [B, C / 8, 128]
    scales_hbm,  # Input, HBM. int32 [B, C / 128, 128]
    out_ref,  # Output. f32 [P / 128, 8, 128]
    ordered_ref,  # Scratch. bf16 [I, 128]
    weight_ref,  # Scratch. f32 [I, 128]
    words_ref,  # Scratch. int32 [2, 128, 128], codes of a part, transposed.
    bits_ref,  # Scratch. int32 [2, 4, 8, 128]
    codes_ref,  # Scratch. int32 [2, 256, 128]
    scales_ref,  # Scratch. int32 [2, 256, 128]
    sems,  # Scratch. DMA semaphores [2, 2]: of codes and scales, of each half.
    *,
    arithmetic,
):
  line = pl.program_id(0)
  row = line * pl.num_programs(1) + pl.program_id(1)
  seen, count = seen_ref[row], count_ref[row]
  parts = numbers_ref.shape[0] * LANES // _PART
  tiles = _PART // LANES

  def turns(part, body):
    def turn(i, _):
      body(part % 2, part * _PART, pl.multiple_of(i * _UNROLLED, _UNROLLED))
      return 0

    blocks = jnp.clip(count - part * _PART, 0, _PART)
    jax.lax.fori_loop(0, (blocks + _UNROLLED - 1) >> _UNROLLED.bit_length() - 1, turn, 0)

  def start(half, base, first):
    for j in range(_UNROLLED):
      block = jnp.maximum(pool_ref[0, base + first + j], 0)
      at = pl.ds(first + j, 1)
      pltpu.make_async_copy(
          codes_hbm.at[line, pl.ds(block, 1)], codes_ref.at[half, at], sems.at[0, half]
      ).start()
      pltpu.make_async_copy(
          scales_hbm.at[line, pl.ds(block >> 4, 1)], scales_ref.at[half, at], sems.at[1, half]
      ).start()

  def wait(half, base, first):
    # One wait for the bytes of all copies of a turn.
    del base
    for k, ref in enumerate((codes_ref, scales_ref)):
      rows = ref.at[half, pl.ds(first, _UNROLLED)]
      pltpu.make_async_copy(rows, rows, sems.at[k, half]).wait()

  def score(part):
    half = part % 2
    numbers = [numbers_ref[tiles * part + i : tiles * part + i + 1, :] for i in range(tiles)]
    scale_words = []
    for i, mine in enumerate(numbers):
      at = pl.ds(i * LANES, LANES)
      words_ref[i] = codes_ref[half, at, :].T
      words = decode.gathered_words(scales_ref[half, at, :], jnp.maximum(mine, 0) & 15)
      decode.put_scales(bits_ref.at[i], words, arithmetic)
      scale_words.append(words)
    totals = kernel_scores.score_tiles(ordered_ref, weight_ref, words_ref, bits_ref, arithmetic)
    for i, (total, mine, words) in enumerate(zip(totals, numbers, scale_words)):
      mine = jnp.broadcast_to(mine, (BLOCK, LANES))
      entry = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, LANES), 0)
      slot = jnp.where(mine < 0, -1, mine * BLOCK + entry)
      out_ref[tiles * part + i] = kernel_scores.masked(total, slot, seen, words)

  kernel_scores.prepare(q_ref, w_ref, ordered_ref, weight_ref, arithmetic)
  turns(0, start)
  for part in range(parts):
    if part + 1 < parts:
      turns(part + 1, start)
    turns(part, wait)
    pl.when(part * _PART < count)(functools.partial(score, part))

    @pl.when(part * _PART >= count)
    def _(part=part):
      absent = jnp.full((tiles, BLOCK, LANES), -jnp.inf, jnp.float32)
      out_ref[part * tiles : (part + 1) * tiles] = absent


def scores(q, weights, codes, scales, seen, pool, *, arithmetic):
  """Scores of the pool's entries, f32 [B, T, tiles, 8, 128]; see `op.packed_scores`.

  The pool is int32 [B, T, P], block numbers, −1 for none; P is a multiple of 1,024.
  """
  q, weights = kernel_scores.padded(q, weights)
  b, t, heads, width = q.shape
  tiles = pool.shape[2] // LANES
  assert tiles % TILES == 0
  count = jnp.max(jnp.where(pool >= 0, jnp.arange(1, pool.shape[2] + 1), 0), axis=2)
  of_row = lambda i, j, *_: (i, j, 0, 0)
  row = lambda *shape, **kwargs: pl.BlockSpec((None, None, *shape), of_row, **kwargs)
  anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
  return pl.pallas_call(
      functools.partial(_kernel, arithmetic=arithmetic),
      out_shape=jax.ShapeDtypeStruct((b, t, tiles, BLOCK, LANES), jnp.float32),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2,
          grid=(b, t),
          in_specs=[
              row(1, pool.shape[2], memory_space=pltpu.SMEM),
              row(heads, 1),
              row(tiles, LANES),
              row(heads, width),
              anywhere,
              anywhere,
          ],
          out_specs=pl.BlockSpec(
              (None, None, tiles, BLOCK, LANES), lambda i, j, *_: (i, j, 0, 0, 0)
          ),
          scratch_shapes=[
              pltpu.VMEM((heads, width), jnp.bfloat16),
              pltpu.VMEM((heads, LANES), jnp.float32),
              pltpu.VMEM((_PART // LANES, LANES, LANES), jnp.int32),
              pltpu.VMEM((_PART // LANES, decode.GROUPS, BLOCK, LANES), jnp.int32),
              pltpu.VMEM((2, _PART, LANES), jnp.int32),
              pltpu.VMEM((2, _PART, LANES), jnp.int32),
              pltpu.SemaphoreType.DMA((2, 2)),
          ],
      ),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
      ),
      name="index_scores_pool",
  )(
      seen.reshape(-1),
      count.reshape(-1),
      pool[:, :, None],
      weights[..., None],
      pool.reshape(b, t, tiles, LANES),
      q,
      codes,
      scales,
  )
