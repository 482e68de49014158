"""Gradient of many rows over decoded entries: of the queries, and of the entries in VMEM.

Scores are recomputed from gathered keys and log Σ exp. The entries' gradient is summed in VMEM, row
after row, so that it has one order. Entries are read, added to and written in groups; inside of a
group every entry occurs once, others with it being counted in its weight.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_attention import kernel_rows
from pallas_kernels.sparse_attention import resident as store
from pallas_kernels.sparse_attention.kernel_rows import PAIR, STEP
from pallas_kernels.window_attention.kernel import LANES, product

GROUP = 16


class Sizes(NamedTuple):
  """Static facts of one call.

  Attributes:
    scale: of the logits.
    cores: TensorCores that share the rows.
    segment: entries of one pass.
    unrolled: gather and add in straight-line code.
    vmem_bytes: the compiler's limit.
  """

  scale: float
  cores: int
  segment: int
  unrolled: bool
  vmem_bytes: int


def vmem_bytes(c: int, n: int, h: int, k: int, dtype) -> int:
  """VMEM of a core: blocks twice, keys of two pairs, words and gradients of one, the entries."""
  size = jnp.dtype(dtype).itemsize
  blocks = 2 * (3 * STEP * n * h * size + 3 * 8 * max(k, LANES) * 4)
  keys = PAIR * k * h * (3 * size + 4)
  table = (c + 16) * h * (size + 4) + 2 * store.chunk_of(c) * h * (size + 4)
  return blocks + keys + table + kernel_rows.SPARE


def weights(slots):
  """int32 [..., K]: how often an entry occurs in its group, at the first of its places, else 0."""
  groups = slots.reshape(*slots.shape[:-1], -1, GROUP)
  same = (groups[..., :, None] == groups[..., None, :]) & (groups[..., None] >= 0)
  earlier = jnp.tril(jnp.ones((GROUP, GROUP), bool), -1)
  first = ~jnp.any(same & earlier, axis=-1)
  return jnp.where(first, same.sum(-1, dtype=jnp.int32), 0).reshape(slots.shape)


def _scores(i, keys, s: Sizes, refs, both):
  """(p | d p of row i) as factors of the gradients, and its d q."""
  q_ref, do_ref, weight_ref, lse_ref, delta_ref, dq_ref = refs
  n, dtype = q_ref.shape[2], q_ref.dtype
  k = pltpu.bitcast(keys[...], dtype)
  weight = weight_ref[0, 0, i : i + 1].astype(jnp.float32)
  lse, delta = (kernel_rows.column(ref[0, 0, i : i + 1], n) for ref in (lse_ref, delta_ref))
  own = jnp.concatenate([q_ref[0, i], do_ref[0, i]], axis=0)
  x = product(own, k, ((1,), (1,)))
  p = jnp.where(weight > 0, jnp.exp(x[:n] * s.scale - lse) * weight, 0.0)
  ds = p * (x[n:] - delta) * s.scale
  dq_ref[0, i] = product(ds.astype(dtype), k, ((1,), (0,))).astype(dtype)
  factors = jnp.concatenate([ds, p], axis=0).astype(dtype)
  dkeys = product(factors, own, ((0,), (0,)))
  rows = dkeys.shape[1] // LANES
  for g in range(dkeys.shape[0] // 8):
    for c in range(rows):
      value = dkeys[g * 8 : g * 8 + 8, c * LANES : (c + 1) * LANES]
      both[pl.ds(g * 8 * rows + c, 8, stride=rows) if rows > 1 else pl.ds(g * 8, 8), :] = value


def _add(targets, values, total, rows: int):
  """Adding of group g of values [K·A, 128] to `total` at rows `targets`."""

  def group(g):
    found = []
    for j in range(GROUP):
      k = g * GROUP + j
      at = pl.ds(targets[k >> 7, k & 127], rows)
      found.append((at, total[at, :] + values[pl.ds(k * rows, rows), :]))
    for at, value in found:
      total[at, :] = value

  return group


def _flush(total, staging, out, semaphores):
  """Sums [A·C, 128] to HBM [C, H], some at a time."""
  c, h = out.shape
  rows, chunk = h // LANES, staging.shape[1]

  def put(i):
    target = out.at[pl.ds(pl.multiple_of(i * chunk, chunk), chunk)]
    return pltpu.make_async_copy(staging.at[i & 1], target, semaphores.at[i & 1])

  @pl.loop(0, c // chunk)
  def _(i):
    pl.when(i > 1)(lambda: put(i - 2).wait())

    @pl.loop(0, chunk // 16)
    def _(g):
      at = pl.multiple_of(g * 16, 16)
      for part in range(rows):
        start = (i * chunk + at) * rows + part
        read = lambda row, start=start: total[
            pl.ds(start + row * rows, 8, stride=rows) if rows > 1 else pl.ds(start + row, 8), :
        ]
        value = jnp.concatenate([read(0), read(8)], axis=0).astype(staging.dtype)
        staging[i & 1, pl.ds(at, 16), part * LANES : (part + 1) * LANES] = value

    put(i).start()

  for i in range(max(0, c // chunk - 2), c // chunk):
    put(i).wait()


def _body(*refs, s: Sizes):
  # Input: SMEM int32 [1], first entry of the pass.
  start_ref, *refs = refs
  # HBM int32 [B, T/2, 2, K/128, 128] rows of entries, and of their sums; [B, C, H];
  # [1, 4, N, H] twice, int32 [1, 1, 4, K], [1, 1, 4, N] twice.
  numbers_hbm, targets_hbm, entries_hbm = refs[:3]
  # Output: [1, 4, N, H]; HBM [cores, B, segment, H].
  blocks, dentries_hbm = refs[3:9], refs[9]
  # Scratch, two of each: keys int32 [2, K·bytes/4, H], SMEM [2, K/128, 128] twice, raw words of a
  # row int32 [K·R, 128], their gradient f32 [K·A, 128]; semaphores; entries and sums.
  keys, numbers, targets, raw, both, number_sem, target_sem = refs[10:17]
  resident, staging, load_sem, total, out_staging, out_sem = refs[17:]
  dtype = blocks[0].dtype
  core, b, step, steps = pl.program_id(0), *map(pl.program_id, (1, 2)), pl.num_programs(2)
  first, last = core * 2 * steps, 2 * steps - 1

  def fetch(source, to, sem, pair, side):
    at = first + jnp.minimum(pair, last)
    return pltpu.make_async_copy(source.at[b, at], to[side], sem.at[side])

  fetch_numbers = functools.partial(fetch, numbers_hbm, numbers, number_sem)
  fetch_targets = functools.partial(fetch, targets_hbm, targets, target_sem)

  def gather(side, i, unrolled=s.unrolled):
    groups = 0, keys[side].shape[1] // store.SUBLANES
    store.gather(groups, numbers[side].at[i], resident, raw[i], keys[side].at[i], dtype, unrolled)

  def add(side, i):
    count = keys[0].shape[1] * store.per_word(dtype)
    group = _add(targets[side].at[i], both[i], total, both[i].shape[0] // count)
    store.in_groups((0, count // GROUP), s.unrolled, group)

  @pl.when(step == 0)
  def _():
    for side in range(2):
      fetch_numbers(side, side).start()
      fetch_targets(side, side).start()
    base = pl.multiple_of(start_ref[0], 16)
    store.load(entries_hbm.at[b, pl.ds(base, s.segment)], resident, staging, load_sem)

    @pl.loop(0, total.shape[0] // 8)
    def _(g):
      total[pl.ds(pl.multiple_of(g * 8, 8), 8), :] = jnp.zeros((8, LANES), jnp.float32)

    fetch_numbers(0, 0).wait()
    for i in range(PAIR):
      gather(0, i, False)
    fetch_numbers(2, 0).start()

  for side in range(2):
    other = 1 - side
    pair = 2 * step + side
    # Waits and starts are barriers to the compiler; what hides what between them depends on the
    # order.
    fetch_numbers(pair + 1, other).wait()
    fetch_targets(pair, side).wait()
    for i in range(PAIR):
      _scores(side * PAIR + i, keys[side].at[i], s, blocks, both[i])
      gather(other, i)
    for i in range(PAIR):
      add(side, i)
    fetch_numbers(pair + 3, other).start()
    fetch_targets(pair + 2, side).start()

  @pl.when(step == steps - 1)
  def _():
    for side in range(2):
      fetch_numbers(pair, side).wait()
      fetch_targets(pair, side).wait()
    _flush(total, out_staging, dentries_hbm.at[core, b], out_sem)


def _segment(s: Sizes, start, q, entries, slots, lse, dout, delta):
  """Gradients of q and of entries, [cores, B, segment, H] for those from `start` on."""
  b, t, n, h = q.shape
  k, dtype, halves = slots.shape[-1], q.dtype, store.per_word(q.dtype)
  inside = (slots >= start) & (slots < start + s.segment)
  slots = jnp.where(inside, slots - start, -1)
  lanes = -(-k // LANES)
  pad = lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, lanes * LANES - k))).reshape(
      b, t // PAIR, PAIR, lanes, LANES
  )
  a = h // LANES
  numbers = pad(store.numbers_of(slots, h, dtype, s.segment))
  counts = weights(slots)
  # A repeated one would write over the sum of the first.
  targets = pad(jnp.where(counts == 0, s.segment, slots) * a)
  in_steps = lambda a: a.reshape(b, t // STEP, STEP, a.shape[-1])
  steps = t // STEP // s.cores
  at = lambda c, b, i: (b, c * steps + i, 0, 0)
  rows = pl.BlockSpec((1, STEP, n, h), at)
  small = lambda width: pl.BlockSpec((1, 1, STEP, width), at)
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  two = lambda space, dtype, *dims: (space(dims, dtype),) * 2
  r, chunk = store.rows_of(h, dtype), store.chunk_of(s.segment)
  # Two cores have a sum each, to be added.
  out_dtype = jnp.float32 if s.cores > 1 else dtype
  return pl.pallas_call(
      functools.partial(_body, s=s),
      grid=(s.cores, b, steps),
      in_specs=[
          pl.BlockSpec(memory_space=pltpu.SMEM),
          *(anywhere,) * 3,
          rows,
          rows,
          small(k),
          small(n),
          small(n),
      ],
      out_specs=[rows, anywhere],
      out_shape=[
          jax.ShapeDtypeStruct(q.shape, dtype),
          jax.ShapeDtypeStruct((s.cores, b, s.segment, h), out_dtype),
      ],
      scratch_shapes=[
          two(pltpu.VMEM, jnp.int32, PAIR, k // halves, h),
          two(pltpu.SMEM, jnp.int32, PAIR, lanes, LANES),
          two(pltpu.SMEM, jnp.int32, PAIR, lanes, LANES),
          two(pltpu.VMEM, jnp.int32, k * r, LANES),
          two(pltpu.VMEM, jnp.float32, k * a, LANES),
          pltpu.SemaphoreType.DMA((2,)),
          pltpu.SemaphoreType.DMA((2,)),
          pltpu.VMEM((store.FRONT + s.segment * r + store.SUBLANES, LANES), jnp.int32),
          pltpu.VMEM((2, chunk, h), dtype),
          pltpu.SemaphoreType.DMA((2,)),
          pltpu.VMEM(((s.segment + 8) * a, LANES), jnp.float32),
          pltpu.VMEM((2, chunk, h), out_dtype),
          pltpu.SemaphoreType.DMA((2,)),
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary", "arbitrary"),
          disable_bounds_checks=True,
          vmem_limit_bytes=s.vmem_bytes,
      ),
      name="sparse_attention_rows_gradient",
  )(
      jnp.reshape(start, (1,)),
      numbers,
      targets,
      entries,
      q,
      dout,
      in_steps(counts),
      in_steps(lse),
      in_steps(delta),
  )


@functools.partial(jax.jit, static_argnums=0)
def gradients(s: Sizes, q, entries, slots, lse, dout, delta):
  """Gradients of q and entries, f32 where several passes are summed.

  Args:
    s: sizes; the segment divides C.
    q: [B, T, N, H], T a multiple of STEP · cores.
    entries: [B, C, H].
    slots: [B, T, K].
    lse: [B, T, N], log Σ exp of all keys.
    dout: [B, T, N, H].
    delta: [B, T, N], Σ d out · out.
  """
  run = lambda start: _segment(s, start, q, entries, slots, lse, dout, delta)
  starts = np.arange(0, entries.shape[1], s.segment, dtype=np.int32)
  if len(starts) == 1:
    dq, dentries = run(starts[0])
    return dq, jnp.sum(dentries, axis=0)

  def add(total, start):
    # Fused with what stacks the sums, the kernel would lose its limit of VMEM.
    dq, dentries = jax.lax.optimization_barrier(run(start))
    return total + dq.astype(jnp.float32), jnp.sum(dentries, axis=0)

  dq, dentries = jax.lax.scan(add, jnp.zeros(q.shape, jnp.float32), starts)
  return dq, jnp.moveaxis(dentries, 0, 1).reshape(entries.shape)
