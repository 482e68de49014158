"""Many rows over decoded entries: gather from VMEM, softmax, values, merged with another part.

The entries of a request stay in VMEM and are gathered by vector loads, one scalar load and one
address an entry; a DMA costs twice that. Entries that do not fit are gathered from HBM by DMA, one
descriptor an entry.

Four rows are in flight, so that nothing waits for the chain of gather, product, softmax, product:
while row i sums its values, row i + 1 has its softmax, row i + 2 its scores and row i + 3 its keys.
A grid step is four rows with static buffers, which tells the compiler that they are not the same
memory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_attention import resident as store
from pallas_kernels.window_attention.kernel import HIDDEN, LANES, product

PAIR = 2  # rows of a block of queries, which are read ahead of the others
STEP = 4  # rows of a grid step
# Spills, semaphores, what the compiler needs besides.
SPARE = 4 << 20


class Sizes(NamedTuple):
  """Static facts of one call.

  Attributes:
    scale: of the logits.
    cores: TensorCores that share the rows.
    remote: gather from HBM.
    mass: also give the probabilities summed over heads.
    in_place: write the output over the other part's.
    unrolled: gather in straight-line code.
    vmem_bytes: the compiler's limit.
  """

  scale: float
  cores: int
  remote: bool
  mass: bool
  in_place: bool
  unrolled: bool
  vmem_bytes: int


def vmem_bytes(c: int, n: int, h: int, k: int, dtype, remote: bool) -> int:
  """VMEM of a core: blocks twice, keys and raw words of four rows, scores of two, the entries."""
  size = jnp.dtype(dtype).itemsize
  blocks = 2 * (13 * n * h * size + 5 * 8 * (max(k, LANES) + 2 * LANES) * 4)
  keys = 2 * STEP * k * h * size + 2 * n * (max(k, LANES) * (4 + size) + 6 * LANES * 4)
  table = 0 if remote else (c + 16) * h * size + 2 * store.chunk_of(c) * h * size
  return blocks + keys + table + SPARE


def column(row, n: int):
  """[1, N] as [N, 1]."""
  at = jax.lax.broadcasted_iota(jnp.int32, (n, n), 0)
  diagonal = at == jax.lax.broadcasted_iota(jnp.int32, (n, n), 1)
  return jnp.sum(jnp.where(diagonal, jnp.broadcast_to(row, (n, n)), 0.0), axis=1, keepdims=True)


def _row(column, n: int):
  """[N, 1] as [1, N]."""
  at = jax.lax.broadcasted_iota(jnp.int32, (n, n), 0)
  diagonal = at == jax.lax.broadcasted_iota(jnp.int32, (n, n), 1)
  return jnp.sum(jnp.where(diagonal, jnp.broadcast_to(column, (n, n)), 0.0), axis=0, keepdims=True)


class _Row(NamedTuple):
  """Static refs of one row: its block of queries, its place there, keys, and scratch.

  Attributes:
    q: [1, 2, N, H].
    facts: int32 [1, 1, 2, K/128·128 + 128], which entries are there, and bits of the other part's
      log Σ exp.
    at: place in both.
    keys: int32, the bits of [K, H].
    x: f32 [N, K].
    p: [N, K].
    columns: f32 [6, N, 128]: highest logit, log Σ exp of the other part, whether any entry is
      there; 1 / Σ exp, share of the other part, log Σ exp.
    mass: f32 [1, K].
  """

  q: jax.Array
  facts: jax.Array
  at: int
  keys: jax.Array
  x: jax.Array
  p: jax.Array
  columns: jax.Array
  mass: jax.Array

  def scores(self, scale: float):
    """Steps: logits of pieces of keys, then their maximum."""
    n, dtype = self.q.shape[2], self.q.dtype
    k, at, tops = self.x.shape[1], self.at, []

    def logits(lo, hi):
      words = slice(lo // store.per_word(dtype), hi // store.per_word(dtype))
      keys = pltpu.bitcast(self.keys[words, :], dtype)
      x = product(self.q[0, at], keys, ((1,), (1,))) * scale
      x = jnp.where(self.facts[0, 0, at : at + 1, lo:hi] != 0, x, HIDDEN)
      self.x[:, lo:hi] = x
      tops.append(jnp.max(x, axis=1, keepdims=True))

    def highest():
      facts = self.facts[0, 0, at : at + 1]
      before = column(pltpu.bitcast(facts[:, -LANES:], jnp.float32)[:, :n], n)
      top = functools.reduce(jnp.maximum, tops, before)
      some = jnp.max(facts[:, :k], axis=1, keepdims=True).astype(jnp.float32)
      for i, value in enumerate((top, before, some)):
        self.columns[i] = jnp.broadcast_to(value, (n, LANES))

    return [functools.partial(logits, *l) for l in _pieces(k)], highest

  def softmax(self, mass: bool):
    """Probabilities, their sum, the mass."""
    n, k = self.x.shape
    top, before = self.columns[0], self.columns[1]
    lanes = [slice(at, min(at + LANES, k)) for at in range(0, k, LANES)]
    width = min(k, LANES)
    sums = jnp.zeros((n, width), jnp.float32)
    for l in lanes:
      p = jnp.exp(self.x[:, l] - top[:, :width])
      self.p[:, l] = p.astype(self.p.dtype)
      if mass:
        self.x[:, l] = p
      sums = sums + p
    weight = jnp.exp(before - top)
    total = jnp.sum(sums, axis=1, keepdims=True) + weight
    inverse = 1.0 / total
    self.columns[3], self.columns[4] = inverse, weight * inverse
    self.columns[5] = top + jnp.log(total)
    if mass:
      for l in lanes:
        self.mass[:, l] = jnp.sum(self.x[:, l] * inverse[:, :width], axis=0, keepdims=True)

  def values(self, near, out, remote: bool):
    """The output [N, H] from the other part's.

    From HBM a row without entries gathered what may be NaN, and must not take it.
    """
    dtype = out.dtype
    for lo, hi in _pieces(out.shape[1]):
      found = product(self.p[...], pltpu.bitcast(self.keys[:, lo:hi], dtype), ((1,), (0,)))
      some, inverse, share = (self.columns[i] for i in (2, 3, 4))
      for at in range(lo, hi, LANES):
        l = slice(at, at + LANES)
        before = near[:, l].astype(jnp.float32)
        value = found[:, at - lo : at - lo + LANES] * inverse + before * share
        out[:, l] = (jnp.where(some > 0, value, before) if remote else value).astype(dtype)


_PIECE = 256


def _pieces(size: int):
  return [(at, min(at + _PIECE, size)) for at in range(0, size, _PIECE)]


def _body(*refs, s: Sizes):
  # Input: HBM int32 [B, T, K/128, 128]; [B, C, H], or int32 [B, C·R, 128] if remote; HBM
  # [B, T, N, H] and int32 [B, T/2, 2, F]; of pairs 2s + 1 and 2s + 2 [1, 2, N, H], int32
  # [1, 1, 2, F]; [1, 4, N, H].
  numbers_hbm, entries_hbm, q_hbm, facts_hbm, q_pairs, facts_pairs, near_ref = refs[:7]
  # Output: [1, 4, N, H], [1, 1, 4, N] and, if asked for, [1, 1, 4, K].
  out_ref, lse_ref, *mass_ref = refs[7 : 9 + s.mass]
  # Scratch, four of each: keys int32 [K·bytes/4, H], SMEM int32 [K/128, 128], raw words int32
  # [K·R, 128]; two of each: scores f32 [N, K], probabilities [N, K], f32 [6, N, 128], f32 [1, K];
  # the first pair's [1, 2, N, H] and int32 [1, 1, 2, F]; semaphores; what the gather needs.
  keys, numbers, raw, x, p, columns, mass, q_first, facts_first = refs[9 + s.mass : 18 + s.mass]
  number_sem, first_sem, *more = refs[18 + s.mass :]
  n, dtype = out_ref.shape[2], out_ref.dtype
  b, step, steps = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
  first, last = pl.program_id(0) * STEP * steps, STEP * steps - 1
  rows, halves = store.rows_of(out_ref.shape[3], dtype), store.per_word(dtype)

  def fetch(i):
    at = first + jnp.minimum(STEP * step + i, last)
    side = i % STEP
    return pltpu.make_async_copy(numbers_hbm.at[b, at], numbers[side], number_sem.at[side])

  def request(i, unrolled=s.unrolled):
    store.request(
        numbers[i % STEP], entries_hbm.at[b], raw[i % STEP], more[0].at[i % STEP], rows, halves,
        unrolled,
    )  # fmt: skip

  def arrived(i):
    return pltpu.make_async_copy(raw[i % STEP], raw[i % STEP], more[0].at[i % STEP])

  def gather(i, part, unrolled=s.unrolled):
    """A half of the keys."""
    side, count = i % STEP, keys[0].shape[0] // store.SUBLANES
    groups = (0, count // 2) if part == 0 else (count // 2, count)
    if s.remote:
      store.join(groups, raw[side], keys[side], dtype, unrolled)
    else:
      store.gather(groups, numbers[side], more[0], raw[side], keys[side], dtype, unrolled)

  def row(i):
    q, facts = ((q_first, *q_pairs)[i // PAIR], (facts_first, *facts_pairs)[i // PAIR])
    side = i % 2
    return _Row(q, facts, i % PAIR, keys[i % STEP], x[side], p[side], columns[side], mass[side])

  @pl.when(step == 0)
  def _():
    for i in range(STEP):
      fetch(i).start()
    for source, to in (
        (q_hbm.at[b, pl.ds(first, PAIR)], q_first.at[0]),
        (facts_hbm.at[b, pl.ds(pl.program_id(0) * 2 * steps, 1)], facts_first.at[0]),
    ):
      copy = pltpu.make_async_copy(source, to, first_sem)
      copy.start()
      copy.wait()
    for i in range(4 if s.remote else 3):
      fetch(i).wait()
      if s.remote:
        request(i, False)
        fetch(STEP + i).start()
    if s.remote:
      for i in range(3):
        arrived(i).wait()
    else:
      store.load(entries_hbm.at[b], *more)
    for i in range(2):
      gather(i, 0, False)
      gather(i, 1, False)
      logits, highest = row(i).scores(s.scale)
      for each in (*logits, highest):
        each()
      if i == 0:
        row(0).softmax(s.mass)
      if not s.remote:
        fetch(STEP + i).start()
    gather(2, 0, False)

  for i in range(STEP):
    # Waits and starts are barriers to the compiler. They stand where half of a row is gathered, so
    # that no product is waited for there; what hides what between them depends on this order.
    fetch(i + 3 + s.remote).wait()
    if s.remote:
      arrived(i + 3).wait()
      request(i + 4)
    logits, highest = row(i + 2).scores(s.scale)
    gather(i + 2, 1)
    for each in logits:
      each()
    gather(i + 3, 0)
    row(i).values(near_ref.at[0, i], out_ref.at[0, i], s.remote)
    row(i + 1).softmax(s.mass)
    highest()
    lse_ref[0, 0, i : i + 1] = _row(columns[i % 2][5, :, :n], n)
    if s.mass:
      mass_ref[0][0, 0, i : i + 1] = mass[i % 2][...]
    fetch(i + 6 + 2 * s.remote).start()

  # Rows after the last are the last again, so that no row needs a branch.
  @pl.when(step == steps - 1)
  def _():
    for i in range(4 if s.remote else 3):
      fetch(STEP + 3 + i + s.remote).wait()
    if s.remote:
      arrived(STEP + 3).wait()


def _lanes(a):
  """The last axis in whole lanes."""
  return jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, -a.shape[-1] % LANES),))


@functools.partial(jax.jit, static_argnums=0)
def attend(s: Sizes, q, entries, slots, near, near_lse):
  """Joint attention of the selected entries and a part (near, near_lse).

  Args:
    s: sizes.
    q: [B, T, N, H], T a multiple of STEP · cores.
    entries: [B, C, H].
    slots: [B, T, K].
    near: [B, T, N, H], output of the part.
    near_lse: [B, T, N], its log Σ exp.

  Returns:
    Output, log Σ exp [B, T, N], and if asked for the mass [B, T, K].
  """
  b, t, n, h = q.shape
  c, k = entries.shape[1], slots.shape[-1]
  dtype, halves = q.dtype, store.per_word(q.dtype)
  # From HBM a row reads one of its own entries in place of absent ones.
  absent = jnp.maximum(slots.max(-1, keepdims=True), 0) if s.remote else c
  numbers = store.numbers_of(slots, h, dtype, absent)
  numbers = _lanes(numbers).reshape(b, t, -1, LANES)
  lanes = numbers.shape[2]
  steps = t // STEP // s.cores
  at = lambda c, b, i: (b, c * steps + i, 0, 0)
  rows = pl.BlockSpec((1, STEP, n, h), at)
  small = lambda width: pl.BlockSpec((1, 1, STEP, width), at)

  def pairs(*dims):
    end = STEP // PAIR * steps - 1
    pair = lambda of: pl.BlockSpec(
        dims, lambda c, b, i: (b, c * (end + 1) + jnp.minimum(of(i), end), 0, 0)
    )
    return [pair(lambda i: 2 * i + 1), pair(lambda i: 2 * i + 2)]

  bits = jax.lax.bitcast_convert_type(near_lse, jnp.int32)
  facts = jnp.concatenate(
      [_lanes((slots >= 0).astype(jnp.int32)), _lanes(bits)], axis=-1
  ).reshape(b, t // PAIR, PAIR, -1)  # fmt: skip
  shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
  each = lambda *dims, dtype=jnp.int32, count=2: (pltpu.VMEM(dims, dtype),) * count
  r = store.rows_of(h, dtype)
  specs = [rows, small(n)] + [small(k)] * s.mass
  shapes = [jax.ShapeDtypeStruct(q.shape, dtype), shape(b, t // STEP, STEP, n)]
  shapes += [shape(b, t // STEP, STEP, k)] * s.mass
  if s.remote:
    entries = store.words(entries)
    gathering = [pltpu.SemaphoreType.DMA((STEP,))]
  else:
    gathering = [
        pltpu.VMEM((store.FRONT + c * r + store.SUBLANES, LANES), jnp.int32),
        pltpu.VMEM((2, store.chunk_of(c), h), dtype),
        pltpu.SemaphoreType.DMA((2,)),
    ]
  out, lse, *mass = pl.pallas_call(
      functools.partial(_body, s=s),
      grid=(s.cores, b, steps),
      in_specs=[
          pl.BlockSpec(memory_space=pl.ANY),
          pl.BlockSpec(memory_space=pl.ANY),
          pl.BlockSpec(memory_space=pl.ANY),
          pl.BlockSpec(memory_space=pl.ANY),
          pairs(1, PAIR, n, h),
          pairs(1, 1, PAIR, facts.shape[-1]),
          rows,
      ],
      out_specs=specs,
      out_shape=shapes,
      # Flattened: numbers, entries, q, facts, two of q, two of facts, near.
      input_output_aliases={8: 0} if s.in_place else {},
      scratch_shapes=[
          each(k // halves, h, count=STEP),
          (pltpu.SMEM((lanes, LANES), jnp.int32),) * STEP,
          each(k * r, LANES, count=STEP),
          each(n, k, dtype=jnp.float32),
          each(n, k, dtype=dtype),
          each(6, n, LANES, dtype=jnp.float32),
          each(1, k, dtype=jnp.float32),
          pltpu.VMEM((1, PAIR, n, h), dtype),
          pltpu.VMEM((1, 1, PAIR, facts.shape[-1]), jnp.int32),
          pltpu.SemaphoreType.DMA((STEP,)),
          pltpu.SemaphoreType.DMA,
          *gathering,
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary", "arbitrary"),
          disable_bounds_checks=True,
          vmem_limit_bytes=s.vmem_bytes,
      ),
      name="sparse_attention_rows",
  )(numbers, entries, q, facts, [q] * 2, [facts] * 2, near)
  flat = lambda a: a.reshape(b, t, a.shape[-1])
  return out, flat(lse), *map(flat, mass)
