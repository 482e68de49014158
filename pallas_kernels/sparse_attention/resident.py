"""Decoded entries in VMEM as rows of 128 words, and their gather by vector loads.

An entry of H channels is R whole rows. A word of a bf16 entry holds channels 256r + l (low half)
and 256r + 128 + l: the halves of two entries' words then join to bf16 rows without crossing lanes.
A vector load takes 8 rows from anywhere, so that 8/R entries meet in one register, each loaded to
its own sublanes, by selects.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8
FRONT = SUBLANES  # rows before entry 0: loads begin up to 8 − R rows before their entry
LARGEST = SUBLANES * LANES * 4  # bytes of an entry
_HIGH = np.int32(-65536)


def per_word(dtype) -> int:
  """Values in a word."""
  return 4 // jnp.dtype(dtype).itemsize


def channels_for(h: int, dtype) -> int:
  """The next number of channels from `h` on whose entries fill 1, 2, 4 or 8 rows; 0 if none."""
  sizes = (per_word(dtype) * LANES * rows for rows in (1, 2, 4, 8))
  return next((size for size in sizes if size >= h), 0)


def rows_of(h: int, dtype) -> int:
  """R."""
  return h // (per_word(dtype) * LANES)


def numbers_of(slots, h: int, dtype, absent):
  """Rows of entries at `slots`, `absent` for −1."""
  return jnp.where(slots < 0, absent, slots) * rows_of(h, dtype)


def _logical_right(x, by: int):
  return jax.lax.shift_right_logical(x, np.int32(by))


def chunk_of(c: int) -> int:
  """Entries that one DMA brings in; `c` is a multiple of 16."""
  return next(size for size in (256, 128, 64, 32, 16) if c % size == 0)


def _spread(x, to, first, rows: int, halves: int):
  """Writes a group's channels [8 or 16, H] as the rows of words from `first` on."""
  x = pltpu.bitcast(x, jnp.int32)
  lanes = lambda n: x[:, n * LANES : (n + 1) * LANES]
  stride = halves * rows

  def write(row, value):
    at = pl.ds(first + row, SUBLANES, stride=stride) if stride > 1 else pl.ds(first, SUBLANES)
    to[at, :] = value

  for r in range(rows):
    if halves == 1:
      write(r, lanes(r))
    else:
      a, b = lanes(2 * r), lanes(2 * r + 1)
      write(r, (a & 0xFFFF) | (b << 16))
      write(rows + r, _logical_right(a, 16) | (b & _HIGH))


def load(entries, resident, staging, semaphores):
  """Fills `resident` int32 [FRONT + C·R + 8, 128]: entries from HBM [C, H], then a zero one.

  Args:
    entries: ref in HBM.
    resident: ref.
    staging: two buffers [chunk, H] of the entries' dtype.
    semaphores: two.
  """
  c, h = entries.shape
  dtype, chunk = staging.dtype, staging.shape[1]
  rows, halves = rows_of(h, dtype), per_word(dtype)
  group = SUBLANES * halves

  def fetch(i):
    source = entries.at[pl.ds(pl.multiple_of(i * chunk, chunk), chunk)]
    return pltpu.make_async_copy(source, staging.at[i & 1], semaphores.at[i & 1])

  fetch(0).start()

  @pl.loop(0, c // chunk)
  def _(i):
    fetch(i).wait()
    following = i + 1 < c // chunk
    pl.when(following)(lambda: fetch(i + 1).start())

    @pl.loop(0, chunk // group)
    def _(g):
      at = pl.multiple_of(g * group, group)
      x = staging[i & 1, pl.ds(at, group)]
      _spread(x, resident, FRONT + (i * chunk + at) * rows, rows, halves)

  end = FRONT + c * rows
  resident[end : end + SUBLANES, :] = jnp.zeros((SUBLANES, LANES), jnp.int32)


def _words_body(entries, out, *, rows: int, halves: int):
  # Input: [1, chunk, H]. Output: int32 [1, chunk·R, 128].
  group = SUBLANES * halves

  @pl.loop(0, entries.shape[1] // group)
  def _(g):
    at = pl.multiple_of(g * group, group)
    _spread(entries[0, pl.ds(at, group)], out.at[0], at * rows, rows, halves)


def words(entries):
  """Entries [B, C, H] in HBM as rows of words, int32 [B, C·R, 128]; XLA does it in four passes."""
  b, c, h = entries.shape
  rows, halves, chunk = rows_of(h, entries.dtype), per_word(entries.dtype), chunk_of(c)
  return pl.pallas_call(
      functools.partial(_words_body, rows=rows, halves=halves),
      grid=(b, c // chunk),
      in_specs=[pl.BlockSpec((1, chunk, h), lambda b, i: (b, i, 0))],
      out_specs=pl.BlockSpec((1, chunk * rows, LANES), lambda b, i: (b, i, 0)),
      out_shape=jax.ShapeDtypeStruct((b, c * rows, LANES), jnp.int32),
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
      name="sparse_attention_words",
  )(entries)


def collect(g, numbers, resident, raw, rows: int, halves: int):
  """Group g of the entries at rows `numbers` (SMEM) to `raw` int32 [K·R, 128], half by half."""
  each = SUBLANES // rows
  sublane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)

  def load_at(half, v, j):
    p = (g * SUBLANES + v * each + j) * halves + half  # halves alternate in the list
    at = numbers[p >> 7, p & 127] + (FRONT - rows * j)
    return resident[pl.ds(at, SUBLANES), :]

  def joined(half, v, lo, hi):
    if hi - lo == 1:
      return load_at(half, v, lo)
    middle = (lo + hi) // 2
    a, b = joined(half, v, lo, middle), joined(half, v, middle, hi)
    return jnp.where(sublane < middle * rows, a, b)

  for half in range(halves):
    for v in range(rows):
      row = ((g * halves + half) * rows + v) * SUBLANES
      raw[pl.ds(row, SUBLANES), :] = joined(half, v, 0, each)


def join_halves(g, raw, keys, rows: int, halves: int):
  """Group g of `raw` to `keys` int32, the bits of [K, H] in the order of the list."""
  at = g * SUBLANES

  def load_rows(half, r):
    start = (g * halves + half) * SUBLANES * rows + r
    return raw[pl.ds(start, SUBLANES, stride=rows) if rows > 1 else pl.ds(start, SUBLANES), :]

  def write(n, value):
    keys[pl.ds(at, SUBLANES), n * LANES : (n + 1) * LANES] = value

  for r in range(rows):
    if halves == 1:
      write(r, load_rows(0, r))
    else:
      a, b = load_rows(0, r), load_rows(1, r)
      write(2 * r, (a & 0xFFFF) | (b << 16))
      write(2 * r + 1, _logical_right(a, 16) | (b & _HIGH))


def in_groups(groups: tuple[int, int], unrolled: bool, *steps):
  """Calls every step(g) from the first group to the second.

  In a straight line, which the compiler can place beside other work, or in one loop, as the
  interpreter wants it.
  """

  def group(g):
    for step in steps:
      step(g)

  if unrolled:
    for g in range(*groups):
      group(g)
  elif groups[0] < groups[1]:
    pl.loop(*groups)(group)


def _request(g, numbers, table, raw, semaphore, rows: int, halves: int):
  """Starts the descriptors of group g from `table` in HBM, int32 [C·R, 128], to `raw`."""
  for half in range(halves):
    for s in range(SUBLANES):
      p = (g * SUBLANES + s) * halves + half
      source = table.at[pl.ds(numbers[p >> 7, p & 127], rows)]
      target = raw.at[pl.ds(((g * halves + half) * SUBLANES + s) * rows, rows)]
      pltpu.make_async_copy(source, target, semaphore).start()


def request(numbers, table, raw, semaphore, rows: int, halves: int, unrolled: bool):
  """Starts the gather of a row's entries from HBM to `raw`, for `join`."""
  step = functools.partial(
      _request, numbers=numbers, table=table, raw=raw, semaphore=semaphore, rows=rows,
      halves=halves,
  )  # fmt: skip
  in_groups((0, raw.shape[0] // (rows * halves * SUBLANES)), unrolled, step)


def _shape(keys, dtype):
  halves = per_word(dtype)
  return dict(rows=keys.shape[1] // (halves * LANES), halves=halves)


def join(groups, raw, keys, dtype, unrolled: bool):
  """Groups of a row's gathered words to keys."""
  step = functools.partial(join_halves, raw=raw, keys=keys, **_shape(keys, dtype))
  in_groups(groups, unrolled, step)


def gather(groups, numbers, resident, raw, keys, dtype, unrolled: bool):
  """Groups of a row's entries to `keys` int32, the bits of [K, H]."""
  shape = _shape(keys, dtype)
  collected = functools.partial(collect, numbers=numbers, resident=resident, raw=raw, **shape)
  joined = functools.partial(join_halves, raw=raw, keys=keys, **shape)
  in_groups(groups, unrolled, collected, joined)
