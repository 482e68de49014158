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
    w_ref,  # Input, SMEM. f32 [1, I]
    numbers_ref,  # Input. int32 [P / 128, 128]: the pool again.
    q_ref,  # Input. bf16 [I, 128]
    codes_hbm,  # Input, HBM. int32 [B, C / 8, 128]
    scales_hbm,  # Input, HBM. int32 [B, C / 128, 128]
    out_ref,  # Output. f32 [P / 128, 8, 128]
    spread_ref,  # Scratch. bf16 [8 · I, 1024]
    keys_ref,  # Scratch. bf16 [2, 256, 1024]
    codes_ref,  # Scratch. int32 [2, 256, 128]
    scales_ref,  # Scratch. int32 [2, 256, 128]
    sems,  # Scratch. DMA semaphores [2, 2]: of codes and scales, of each half.
    *,
    packed,
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

  def slots(t):
    number = jnp.broadcast_to(numbers_ref[t : t + 1, :], (BLOCK, LANES))
    entry = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, LANES), 0)
    return jnp.where(number < 0, -1, number * BLOCK + entry)

  def score(part):
    half = part % 2
    numbers = numbers_ref[part * tiles : (part + 1) * tiles, :]
    blocks = jnp.maximum(jnp.concatenate([numbers[i : i + 1] for i in range(tiles)], axis=1), 0)

    def scale_bytes(first, step):
      rows = scales_ref[half, pl.ds(first, _PART // step, stride=step), :]
      return decode.gathered_bytes(rows, blocks, first, step)

    keys_ref[half] = decode.planes(codes_ref.at[half], 0, _PART, scale_bytes, packed)
    kernel_scores.score_blocks(spread_ref, keys_ref, w_ref, out_ref, part, slots, seen)

    @pl.when(decode.any_nan(scales_ref[half]) > 0)
    def _():
      bad = decode.nan_entries(scale_bytes(0, 1))
      kernel_scores.mark_nan(out_ref, part, bad, slots, seen)

  spread_ref[...] = kernel_scores.spread(q_ref[...])
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


def scores(q, weights, codes, scales, seen, pool, *, packed):
  """Scores of the pool's entries, f32 [B, T, tiles, 8, 128]; see `op.packed_scores`.

  The pool is int32 [B, T, P], block numbers, −1 for none; P is a multiple of 1,024.
  """
  b, t, heads, width = q.shape
  tiles = pool.shape[2] // LANES
  assert tiles % TILES == 0
  count = jnp.max(jnp.where(pool >= 0, jnp.arange(1, pool.shape[2] + 1), 0), axis=2)
  of_row = lambda i, j, *_: (i, j, 0, 0)
  row = lambda *shape, **kwargs: pl.BlockSpec((None, None, *shape), of_row, **kwargs)
  anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
  return pl.pallas_call(
      functools.partial(_kernel, packed=packed),
      out_shape=jax.ShapeDtypeStruct((b, t, tiles, BLOCK, LANES), jnp.float32),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2,
          grid=(b, t),
          in_specs=[
              row(1, pool.shape[2], memory_space=pltpu.SMEM),
              row(1, heads, memory_space=pltpu.SMEM),
              row(tiles, LANES),
              row(heads, width),
              anywhere,
              anywhere,
          ],
          out_specs=pl.BlockSpec(
              (None, None, tiles, BLOCK, LANES), lambda i, j, *_: (i, j, 0, 0, 0)
          ),
          scratch_shapes=[
              pltpu.VMEM((heads * BLOCK, decode.NIBBLES * LANES), jnp.bfloat16),
              pltpu.VMEM((2, _PART, decode.NIBBLES * LANES), jnp.bfloat16),
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
      weights[:, :, None],
      pool.reshape(b, t, tiles, LANES),
      q,
      codes,
      scales,
  )
