"""One kernel for a decode step: gather, FP4 and FP8 decoding, joint softmax, values.

While a query attends, the next one is decoded and the entries of the one after are on their way:
one descriptor of two rows (1 KB) an entry, which hold the entry wherever it starts. A grid step is
two queries, so that the compiler sees which buffer is which.

Two entries make a dense row of 128 lanes, one in the lower and one in the upper half, and their
keys K = [E | F] take 8 planes of 128 lanes, plane n with channels 8w + n. Scores of E and F come
from [q | 0] and [0 | q], stacked to 2N rows, in one product with the same tiles as E and F apart.

Queries and outputs have their channels in the order of `CHANNELS`: 4 planes of 128 lanes, plane m
with channels 8w + m at lane w and 8w + 4 + m at lane 64 + w.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_attention import selection
from pallas_kernels.sparse_attention.keys import HALF, LANES, entry_steps, lanes, window_steps

WIDTH = 512
_HIDDEN = -1e30

CHANNELS = np.arange(WIDTH).reshape(HALF, 2, 4).transpose(2, 1, 0).reshape(-1)
PLACES = np.argsort(CHANNELS)


class Blocks(NamedTuple):
  """What differs between generations; no effect on values beyond the rounding of the arithmetic.

  Attributes:
    packed: decode two bf16 values a word; needs bf16 arithmetic in the vector unit.
    unrolled: issue the descriptors of a query in straight-line code, which the compiler can place
      beside the arithmetic; else in loops, as the interpreter takes minutes for 512.
    cores: TensorCores that share the queries.
    pace: parts of the work on one query: share of the next query's descriptors issued in it, steps
      of the next query's decoding and of this query's attention done by its end, as fractions.
  """

  packed: bool
  unrolled: bool
  cores: int
  pace: tuple[tuple[float, float, float], ...]


# Tuned on the compiler's schedules of 64 heads, 512 entries and 128 window slots.
_PACE = {
    "v5e": ((0.35, 0.5, 0.33), (0.35, 0.78, 0.67), (1.0, 1.0, 1.0)),
    "v5p": ((0.35, 0.5, 0.33), (0.35, 0.78, 0.67), (1.0, 1.0, 1.0)),
    "v6e": ((0.39, 0.44, 0.33), (0.29, 0.72, 0.67), (1.0, 1.0, 1.0)),
    "tpu7x": ((0.27, 0.22, 0.33), (0.33, 0.56, 0.67), (1.0, 1.0, 1.0)),
}


def blocks_for(chip, dtype, unrolled: bool) -> Blocks:
  """Block sizes on a generation of `chips.CHIPS`."""
  packed = chip.bf16_vectors and dtype == jnp.bfloat16
  return Blocks(packed, unrolled, chip.cores, _PACE[chip.name])


def vmem_bytes(heads: int, k: int, window: int, dtype) -> int:
  """VMEM of a core: two buffers of everything, spills counted as much as the keys."""
  size = jnp.dtype(dtype).itemsize
  keys = (k + window) * WIDTH * size
  blocks = 4 * heads * WIDTH * size + 3 * window * LANES * 4 + 2**16
  return 2 * (2 * k * LANES * 4 + 2 * keys + blocks)


class _Gather:
  """Descriptors of one query: row numbers in SMEM, entries to a buffer int32 [2, K, 128]."""

  def __init__(self, unrolled: bool, numbers, data, buffer, semaphore):
    self.unrolled, self.issued = unrolled, 0
    self.numbers, self.data, self.buffer, self.semaphore = numbers, data, buffer, semaphore

  @property
  def count(self) -> int:
    return self.buffer.shape[1]

  def _start(self, k):
    source = self.data.at[pl.ds(self.numbers[k >> 7, k & 127], 2)]
    pltpu.make_async_copy(source, self.buffer.at[:, k], self.semaphore).start()

  def start_more(self, count: int):
    """The next `count` of them."""
    end = min(self.count, self.issued + count)
    if self.unrolled:
      for k in range(self.issued, end):
        self._start(k)
    elif end > self.issued:
      pl.loop(self.issued, end)(self._start)
    self.issued = end

  def wait(self):
    pltpu.make_async_copy(self.buffer, self.buffer, self.semaphore).wait()


def _spread_queries(q):
  """[N, 512] as [q | 0] over [0 | q], [2N, 1024]."""
  dtype = q.dtype
  bits = pltpu.bitcast(q, jnp.int32)
  lower = lanes((bits.shape[0], LANES)) < HALF
  e, f = [None] * 8, [None] * 8
  for m in range(4):
    plane = bits[:, m * LANES : (m + 1) * LANES]
    left, right = jnp.where(lower, plane, 0), jnp.where(lower, 0, plane)
    e[m], f[m] = left, pltpu.roll(left, HALF, 1)
    e[m + 4], f[m + 4] = pltpu.roll(right, HALF, 1), right
  rows = [pltpu.bitcast(jnp.concatenate(x, axis=1), dtype) for x in (e, f)]
  return jnp.concatenate(rows, axis=0)


def _gather_outputs(pairs, n: int):
  """Values of pairs [2N, 1024] as [N, 512], E and F added."""
  lower = lanes((n, LANES)) < HALF
  e = lambda m: pairs[:n, m * LANES : (m + 1) * LANES]
  f = lambda m: pairs[n:, m * LANES : (m + 1) * LANES]
  planes = []
  for m in range(4):
    straight = jnp.where(lower, e(m), f(m + 4))
    rotated = pltpu.roll(jnp.where(lower, e(m + 4), f(m)), HALF, 1)
    planes.append(straight + rotated)
  return jnp.concatenate(planes, axis=1)


def _attention_steps(q_ref, keys, window_keys, seen, sink_ref, out_ref):
  """Steps of one softmax over pairs, window and sink: scores, probabilities, values."""
  n, dtype = q_ref.shape[0], q_ref.dtype
  per_word = 4 // dtype.itemsize
  half, w = keys.shape[0] * per_word, window_keys.shape[0] * per_word
  values_of = lambda ref: pltpu.bitcast(ref[...], dtype)
  scale = np.float32(WIDTH**-0.5)
  precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
  dot = functools.partial(
      jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32
  )
  across, along = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))
  x, p, total = [], [], []

  def scores():
    q = q_ref[...]
    pairs = dot(_spread_queries(q), values_of(keys), across)
    x.extend([pairs[:n], pairs[n:], dot(q, values_of(window_keys), across)])

  def probabilities():
    for i, width in enumerate((half, half, w)):
      x[i] = jnp.where(seen[i : i + 1, :width] != 0, x[i] * scale, _HIDDEN)
    sink = sink_ref[:, :1]
    top = functools.reduce(jnp.maximum, [jnp.max(a, axis=1, keepdims=True) for a in x], sink)
    p.extend(jnp.exp(a - top) for a in x)
    total.append(sum((jnp.sum(a, axis=1, keepdims=True) for a in p), jnp.exp(sink - top)))

  def values():
    pairs = dot(jnp.concatenate(p[:2], axis=0).astype(dtype), values_of(keys), along)
    near = dot(p[2].astype(dtype), values_of(window_keys), along)
    out_ref[...] = ((near + _gather_outputs(pairs, n)) / total[0]).astype(dtype)

  return [scores, probabilities, values]


def _kernel(
    # Input
    numbers_hbm,  # int32 [B, K/128, 128]
    facts_refs,  # of queries 0, 2s + 1, 2s + 2: int32 [1, 8, 128]: E, F, scale rows of the window
    window_refs,  # of the same queries: int32 [1, W, 128]
    seen_ref,  # int32 [2, 8, max(K/2, W)]: E, F, window
    q_ref,  # [2, N, 512]
    sink_ref,  # f32 [N, 128]
    data_hbm,  # int32 [R, 128]
    # Output
    out_ref,  # [2, N, 512]
    # Scratch
    numbers,  # SMEM int32 [K/128, 128]
    buffers,  # two of int32 [2, K, 128]: row of the descriptor, entry
    keys,  # two of int32, the bits of [K/2, 1024]
    window_keys,  # two of int32, the bits of [W, 512]
    numbers_semaphore,
    semaphores,  # two
    barrier_semaphore,
    *,
    blocks: Blocks,
):
  step, steps = pl.program_id(1), pl.num_programs(1)
  first = pl.program_id(0) * 2 * steps

  def gather(i):
    return _Gather(blocks.unrolled, numbers, data_hbm, buffers[i % 2], semaphores[i % 2])

  def fetch(query):
    at = first + jnp.minimum(query, 2 * steps - 1)
    return pltpu.make_async_copy(numbers_hbm.at[at], numbers, numbers_semaphore)

  def barrier():
    # Keeps memory operations on their side, else the compiler leaves most descriptors for the end.
    pl.semaphore_signal(barrier_semaphore, 1)
    pl.semaphore_wait(barrier_semaphore, 1)

  def decoding(i):
    side, ref = i % 2, lambda refs: refs[i].at[0]
    how = (ref(facts_refs), blocks.packed, q_ref.dtype)
    window = window_steps(ref(window_refs), window_keys[side], *how)
    return window + entry_steps(buffers[side], keys[side], *how)

  @pl.when(step == 0)
  def _():
    fetch(0).start()
    fetch(0).wait()
    gather(0).start_more(buffers[0].shape[1])
    fetch(1).start()
    fetch(1).wait()
    gather(0).wait()
    following, decode = gather(1), decoding(0)
    for half in (0, 1):
      following.start_more(following.count // 2)
      for each in decode[half * len(decode) // 2 : (half + 1) * len(decode) // 2]:
        each()
      barrier()
    fetch(2).start()

  for i in (0, 1):
    query = 2 * step + i
    fetch(query + 2).wait()
    gather(i + 1).wait()
    following = gather(i)
    decode = decoding(i + 1)
    attend = _attention_steps(
        q_ref.at[i], keys[i], window_keys[i], seen_ref.at[i], sink_ref, out_ref.at[i]
    )
    decoded = attended = 0
    for issue, decode_part, attend_part in blocks.pace:
      decode_to, attend_to = round(decode_part * len(decode)), round(attend_part * len(attend))
      following.start_more(round(issue * following.count))
      for each in attend[attended:attend_to] + decode[decoded:decode_to]:
        each()
      decoded, attended = decode_to, attend_to
      barrier()
    fetch(query + 3).start()

  # The last query fetched itself again, so that no query needs a branch around the issue.
  @pl.when(step == steps - 1)
  def _():
    fetch(query + 3).wait()
    gather(1).wait()


def _ordered(x, channels):
  """x[..., channels] as a product with ones and zeros: exact, and no copies as of a gather."""
  move = jnp.asarray(np.arange(WIDTH)[:, None] == channels, x.dtype)
  return jnp.dot(x, move, precision=jax.lax.Precision.HIGHEST, preferred_element_type=x.dtype)


def sparse_attention_decode(q, entries, slots, window, window_scales, seen, sink, blocks: Blocks):
  """See `op.sparse_attention_decode`; shapes have been checked."""
  asked, n, _ = q.shape
  # A grid step takes two queries; absent ones read entry 0 and are cut off.
  missing = -asked % (2 * blocks.cores)
  more = lambda a, value=0: jnp.pad(
      a, ((0, missing), *((0, 0),) * (a.ndim - 1)), constant_values=value
  )
  q, window, window_scales, seen = map(more, (q, window, window_scales, seen))
  slots = more(slots, -1)
  b, k = slots.shape
  w = seen.shape[1]
  per_word = 4 // q.dtype.itemsize
  numbers, facts = selection.plan(slots)
  rows = -(-k // LANES)
  numbers = jnp.clip(numbers, 0, entries.shape[0] - 2)
  numbers = jnp.pad(numbers, ((0, 0), (0, rows * LANES - k))).reshape(b, rows, LANES)
  in_scales = jnp.repeat(seen, 4, axis=1).reshape(b, w // 32, LANES)
  facts = jnp.concatenate([facts, jnp.where(in_scales != 0, window_scales, 0)], axis=1)
  facts = jnp.pad(facts, ((0, 0), (0, 8 - facts.shape[1]), (0, 0)))
  width = max(k // 2, w)
  masks = selection.halves((slots >= 0).astype(jnp.int32)), seen[:, None]
  masks = [selection.columns(a, per_word == 2) for a in masks]
  masks = [jnp.pad(a, ((0, 0), (0, 0), (0, width - a.shape[-1]))) for a in masks]
  masks = jnp.pad(jnp.concatenate(masks, axis=1), ((0, 0), (0, 5), (0, 0)))

  steps = b // 2 // blocks.cores
  each = lambda shape, dtype: (pltpu.VMEM(shape, dtype),) * 2
  two = lambda *shape: pl.BlockSpec((2, *shape), lambda c, i: (c * steps + i, 0, 0))

  def three(*shape):
    last = 2 * steps - 1
    query = lambda at: pl.BlockSpec((1, *shape), lambda c, i: (c * 2 * steps + at(i), 0, 0))
    return [
        query(lambda i: 0),
        query(lambda i: 2 * i + 1),
        query(lambda i: jnp.minimum(2 * i + 2, last)),
    ]

  out = pl.pallas_call(
      functools.partial(_kernel, blocks=blocks),
      grid=(blocks.cores, steps),
      in_specs=[
          pl.BlockSpec(memory_space=pl.ANY),
          three(8, LANES),
          three(w, LANES),
          two(8, width),
          two(n, WIDTH),
          pl.BlockSpec((n, LANES), lambda c, i: (0, 0)),
          pl.BlockSpec(memory_space=pl.ANY),
      ],
      out_specs=two(n, WIDTH),
      out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
      scratch_shapes=[
          pltpu.SMEM((rows, LANES), jnp.int32),
          each((2, k, LANES), jnp.int32),
          each((k // 2 // per_word, 2 * WIDTH), jnp.int32),
          each((w // per_word, WIDTH), jnp.int32),
          pltpu.SemaphoreType.DMA,
          (pltpu.SemaphoreType.DMA,) * 2,
          pltpu.SemaphoreType.REGULAR,
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary"),
          disable_bounds_checks=True,
          vmem_limit_bytes=vmem_bytes(n, k, w, q.dtype),
      ),
      name="sparse_attention_decode",
  )(
      numbers,
      [facts] * 3,
      [window] * 3,
      masks,
      _ordered(q, CHANNELS),
      jnp.broadcast_to(sink.astype(jnp.float32)[:, None], (n, LANES)),
      entries,
  )
  return _ordered(out[:asked], PLACES)
