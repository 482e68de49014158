"""One kernel for a decode step: gather, FP4 and FP8 decoding, joint softmax, values.

While a query attends, the next one is decoded and the entries of the one after are on their way:
one descriptor of two rows (1 KB) an entry, which hold the entry wherever it starts. A grid step is
two queries, so that the compiler sees which buffer is which.

Two entries make a dense row of 128 lanes, one in the lower and one in the upper half, and their
keys K = [E | F] take 8 planes of 128 lanes, plane n with channels 8w + n. Scores of E and F come
from [q | 0] and [0 | q], stacked to 2N rows, in one product with the same tiles as E and F apart.

The kernel takes slots and masks as they are and reorders channels itself: around it XLA computes
nothing.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_attention import selection
from pallas_kernels.sparse_attention.attention import Attention
from pallas_kernels.sparse_attention.channels import (
    WIDTH,
    from_channels,
    spread_queries,
    to_channels,
)
from pallas_kernels.sparse_attention.gather import Gather
from pallas_kernels.sparse_attention.keys import LANES, entry_steps, lanes, window_steps


class Blocks(NamedTuple):
  """What differs between generations; no effect on values beyond the rounding of the arithmetic.

  Attributes:
    packed: decode two bf16 values a word; needs bf16 arithmetic in the vector unit.
    unrolled: issue the descriptors of a query in straight-line code, which the compiler can place
      beside the arithmetic; else in loops, as the interpreter takes minutes for 512.
    cores: TensorCores that share the queries.
    ahead: spread a query's channels while the one before attends.
    pace: of the work on one query, which has three parts (scores, probabilities, values), shares of
      the descriptors of the query after the next that have been issued, and of the next query's
      decoding that has been done, by the end of the first and of the second; of both of a step.
  """

  packed: bool
  unrolled: bool
  cores: int
  ahead: bool
  pace: tuple[tuple[tuple[float, float], ...], ...]


# Tuned on the compiler's schedules of 64 heads, 512 entries and 128 window slots.
_PACE = {
    "v5e": (False, (((0.35, 0.5), (0.7, 0.78)),) * 2),
    "v5p": (False, (((0.35, 0.5), (0.7, 0.78)),) * 2),
    "v6e": (True, (((0.25, 0.33), (0.65, 0.72)),) * 2),
    "tpu7x": (False, (((0.345, 0.295), (0.678, 0.7)),) * 2),
}


def blocks_for(chip, dtype, unrolled: bool) -> Blocks:
  """Block sizes on a generation of `chips.CHIPS`."""
  packed = chip.bf16_vectors and dtype == jnp.bfloat16
  return Blocks(packed, unrolled, chip.cores, *_PACE[chip.name])


def vmem_bytes(requests: int, heads: int, k: int, window: int, dtype) -> int:
  """VMEM of a core: two buffers of everything, spills counted as much as the keys."""
  size = jnp.dtype(dtype).itemsize
  keys = (k + window) * WIDTH * size
  blocks = 10 * heads * WIDTH * size + 3 * window * LANES * 4 + 2**16
  small = requests * (5 + window // 32) * LANES * 4
  return 2 * (2 * k * LANES * 4 + 2 * keys + blocks) + small


def _kernel(*refs, blocks: Blocks, window: int, natural: bool, last_query: int):
  refs = list(refs)
  take = lambda n: [refs.pop(0) for _ in range(n)]
  # Input: int32 [B, 512] slots, [B, 128] seen, [B, W/32, 128] scales of the window; of queries 0,
  # 2s + 1, 2s + 2 [1, W, 128] codes and [1, N, 512] q; f32 [1, N]; int32 [R, 128] in HBM.
  slots_ref, seen_ref, scales_ref = take(3)
  window_refs, q_refs = take(3), take(3)
  sink_ref, data_hbm = take(2)
  # Output: [B, N, 512] in HBM.
  (out_hbm,) = take(1)
  # Scratch, two of each: int32 [8, 128] row numbers, the same in SMEM [4, 128], entries
  # [2, K, 128], words of keys [K/2, 1024] and [W, 512], masks [8, K/2], words of queries [N, 512],
  # spread [2N, 1024] and values [N, 512], outputs [N, 512].
  planned, numbers, buffers, keys, window_keys, masks = (take(2) for _ in range(6))
  queries, spread, values, outs = (take(2) for _ in range(4))
  # f32 [N, 128] sink.
  (sink,) = take(1)
  number_semaphores, semaphores, out_semaphores = take(2), take(2), take(2)
  (barrier_semaphore,) = refs
  step, steps = pl.program_id(1), pl.num_programs(1)
  first = pl.program_id(0) * 2 * steps
  _, n, _ = q_refs[0].shape
  dtype = q_refs[0].dtype
  two_rows = dtype == jnp.bfloat16

  def place(query):
    return jnp.minimum(first + jnp.minimum(query, 2 * steps - 1), last_query)

  def chosen(query):
    return selection.quarters(slots_ref[pl.ds(place(query), 1), :])

  def ring(query, rows):
    return jnp.broadcast_to(seen_ref[pl.ds(place(query), 1), :], (rows, LANES))

  def gather(side):
    return Gather(blocks.unrolled, numbers[side], data_hbm, buffers[side], semaphores[side])

  def fetch(side):
    return pltpu.make_async_copy(planned[side].at[:4], numbers[side], number_semaphores[side])

  def plan(query, side):
    planned[side][...] = selection.first_rows(chosen(query), data_hbm.shape[0])

  def send(query, side):
    # Outputs of queries before the first go where the first's follow.
    at = first + jnp.maximum(query, 0)
    return pltpu.make_async_copy(outs[side], out_hbm.at[at], out_semaphores[side])

  def emit(side):
    words = from_channels(values[side][...]) if natural else values[side][...]
    outs[side][...] = pltpu.bitcast(words, dtype)

  def ready(ref, side):
    words = pltpu.bitcast(q_refs[ref][0], jnp.int32)
    queries[side][...] = words = to_channels(words) if natural else words
    if blocks.ahead:
      spread[side][...] = spread_queries(words)

  def mask(query, side):
    quarter = buffers[0].shape[1] // 4
    masks[side][...] = selection.masks(chosen(query), quarter, two_rows)
    seen = selection.columns(ring(query, 8), window, two_rows)
    masks[side][1:2, :LANES] = jnp.where(seen[:1] != 0, 0, -1)

  def decoding(query, ref, side):
    scales = scales_ref[place(query)]
    seen = selection.in_scales(ring(query, scales.shape[0]), scales.shape[0])
    scales = jnp.where(seen != 0, scales, 0)
    how = blocks.packed, dtype
    near = window_steps(window_refs[ref].at[0], window_keys[side], scales, *how)
    return near + entry_steps(buffers[side], keys[side], selection.facts(chosen(query)), *how)

  def attending(side):
    of_side = (a[side] for a in (keys, window_keys, masks))
    ahead = spread[side] if blocks.ahead else None
    return Attention(queries[side], ahead, *of_side, sink, values[side], dtype).steps

  def barrier():
    # Keeps memory operations on their side, else the compiler leaves most descriptors for the end.
    pl.semaphore_signal(barrier_semaphore, 1)
    pl.semaphore_wait(barrier_semaphore, 1)

  def work(query, i, attend=True, decode=True, issue=True):
    """Parts of the work on a query and on the two after it; i is its side."""
    pace = (0.0, 0.0), *blocks.pace[i], (1.0, 1.0)
    if issue:
      fetch(i).wait()
    if decode:
      gather(1 - i).wait()
    if attend:
      send(query - 2, i).wait()
    if issue:
      plan(query + 4, i)
    ref = i + 1 if attend else 0
    decode_steps = decoding(query + 1, ref, 1 - i) if decode else []
    attend_steps = attending(i) if attend else [lambda: None] * 3
    for part in range(3):
      (issued, decoded), (issue_to, decode_to) = pace[part], pace[part + 1]
      if issue:
        gather(i).start(issued, issue_to)
      if part == 1 and decode:
        mask(query + 1, 1 - i)
      if part == 1 and attend:
        emit(1 - i)
      if part == 2 and decode:
        ready(ref, 1 - i)
      attend_steps[part]()
      for each in decode_steps[
          round(decoded * len(decode_steps)) : round(decode_to * len(decode_steps))
      ]:
        each()
      barrier()
      if part == 1 and attend:
        send(query - 1, 1 - i).start()
    if issue:
      fetch(i).start()

  @pl.when(step == 0)
  def _():
    for side in (0, 1):
      plan(side, side)
      fetch(side).start()
    send(0, 0).start()
    diagonal = lanes((n, n)) == jax.lax.broadcasted_iota(jnp.int32, (n, n), 0)
    at = jnp.where(diagonal, jnp.broadcast_to(sink_ref[...], (n, n)), 0.0)
    sink[...] = jnp.broadcast_to(jnp.sum(at, axis=1, keepdims=True), sink.shape)
    fetch(0).wait()
    gather(0).start(0.0, 1.0)
    plan(2, 0)
    fetch(0).start()
    work(-1, 1, attend=False)

  query = 2 * step

  @pl.when(step < steps - 1)
  def _():
    for i in (0, 1):
      work(query + i, i)

  @pl.when(step == steps - 1)
  def _():
    work(query, 0, issue=False)
    work(query + 1, 1, decode=False, issue=False)
    emit(1)
    send(query + 1, 1).start()
    for side in (0, 1):
      fetch(side).wait()
      send(query + side, side).wait()


def sparse_attention_decode(
    q, entries, slots, window, window_scales, seen, sink, blocks: Blocks, natural: bool
):
  """See `op.sparse_attention_decode`; shapes have been checked.

  Channels of q and of the result are `natural` or in the order of `layout.CHANNELS`.
  """
  asked, n, _ = q.shape
  k, w = slots.shape[1], seen.shape[1]
  # A grid step takes two queries, and the cores of a chip equally many.
  missing = -asked % (2 * blocks.cores)
  if missing:
    more = lambda a: jnp.pad(a, ((0, missing), *((0, 0),) * (a.ndim - 1)))
    q, window = more(q), more(window)
  slots = selection.padded(slots)
  seen = seen if w == LANES else jnp.pad(seen, ((0, 0), (0, LANES - w)))
  per_word = 4 // q.dtype.itemsize
  steps = (asked + missing) // 2 // blocks.cores
  whole = lambda a: pl.BlockSpec(
      a.shape, lambda c, i: (0,) * a.ndim, pipeline_mode=pl.Buffered(buffer_count=1)
  )
  last = 2 * steps - 1

  def three(*shape):
    query = lambda at: pl.BlockSpec((1, *shape), lambda c, i: (c * 2 * steps + at(i), 0, 0))
    return [
        query(lambda i: 0),
        query(lambda i: 2 * i + 1),
        query(lambda i: jnp.minimum(2 * i + 2, last)),
    ]

  sink = sink.reshape(1, n)
  words = lambda rows, columns: pltpu.VMEM((rows // per_word, columns), jnp.int32)
  each = [
      pltpu.VMEM((8, LANES), jnp.int32),
      pltpu.SMEM((4, LANES), jnp.int32),
      pltpu.VMEM((2, k, LANES), jnp.int32),
      words(k // 2, 2 * WIDTH),
      words(w, WIDTH),
      pltpu.VMEM((8, pl.cdiv(k // 2, LANES) * LANES), jnp.int32),
      words(n, WIDTH),
      words(2 * n, 2 * WIDTH),
      words(n, WIDTH),
      pltpu.VMEM((n, WIDTH), q.dtype),
  ]
  out = pl.pallas_call(
      functools.partial(_kernel, blocks=blocks, window=w, natural=natural, last_query=asked - 1),
      grid=(blocks.cores, steps),
      in_specs=[
          whole(slots),
          whole(seen),
          whole(window_scales),
          *three(w, LANES),
          *three(n, WIDTH),
          whole(sink),
          pl.BlockSpec(memory_space=pl.ANY),
      ],
      out_specs=pl.BlockSpec(memory_space=pl.ANY),
      out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
      scratch_shapes=[
          *(ref for ref in each for _ in (0, 1)),
          pltpu.VMEM((n, LANES), jnp.float32),
          *[pltpu.SemaphoreType.DMA] * 6,
          pltpu.SemaphoreType.REGULAR,
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary"),
          disable_bounds_checks=True,
          vmem_limit_bytes=vmem_bytes(asked, n, k, w, q.dtype),
      ),
      name="sparse_attention_decode",
  )(slots, seen, window_scales, *[window] * 3, *[q] * 3, sink, entries)
  return out[:asked] if missing else out
