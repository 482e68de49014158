"""Exact Top-K by counting: no sort, no scatter.

1. Of every column of the row's tiles the eight largest scores stay as candidates (a column is one
   place of a tile; what is selected is spread over columns, so that a ninth is rare).
2. The K-th largest candidate T is found bit by bit. At least K scores are ≥ T. If fewer than K
   scores of the row are above T, then T is the row's K-th largest; otherwise a column had a ninth
   one, and T is searched in the whole row.
3. Scores above T and equal to T become bits: eight entries a word, the equals in the next byte.
4. Slot k of the result lies in the first word whose cumulative count exceeds k. Counts are products
   with triangular matrices of ones; a word is fetched by a product with a one-hot matrix.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_topk.layout import BLOCK, LANES, TILES

_LEVELS = 8  # Candidates of a column.
_COLUMNS_FOR = 512  # Selected entries that one set of columns serves.
_CHUNK = 512  # Slots of the result that are worked out together.
# Scores of one step, both buffers; as much again for scratch fits into the 64 MiB of v5p and TPU7x.
VMEM = 24 << 20
LARGEST = 4096  # Selected entries.
_LOWEST = -(1 << 31)
_NEGATIVE_INFINITY_KEY = (0xFF800000 - (1 << 32)) ^ 0x7FFFFFFF


def _key(x):
  """int32 in the order of f32, −0 before +0: what is found is compared as f32 in the end."""
  bits = pltpu.bitcast(x, jnp.int32)
  return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _value(key):
  return pltpu.bitcast(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def _bisect(count, rows, k):
  """Largest key [rows, 128] (all lanes alike) with count(key) ≥ k, but at least that of −inf."""

  def step(_, carry):
    found, bit = carry
    tried = [found + n * bit for n in (1, 2, 3)]
    for key, n in zip(tried, [count(key) for key in tried]):
      found = jnp.where(n >= k, key, found)
    return found, bit >> 2

  lowest = jnp.full((rows, LANES), _LOWEST, jnp.int32)
  found, _ = jax.lax.fori_loop(0, 16, step, (lowest, jnp.int32(1 << 30)))
  return jnp.maximum(found, _NEGATIVE_INFINITY_KEY)


def _all_lanes(x):
  """The sum of every row in all its lanes."""
  return jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True), x.shape)


def _ones(shape, keep):
  """0/1 bf16 matrix with ones where keep(row, column)."""
  row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  return jnp.where(keep(row, column), 1.0, 0.0).astype(jnp.bfloat16)


def _bf16(x):
  return x.astype(jnp.float32).astype(jnp.bfloat16)


def _product(a, b, contract=((1,), (0,))):
  return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


def _popcount(x):
  """Of bytes."""
  x = x - ((x >> 1) & 0x55)
  x = (x & 0x33) + ((x >> 2) & 0x33)
  return (x + (x >> 4)) & 0xF


def _candidates(x_ref, keys_ref, row, sets):
  """The `_LEVELS` largest of every column, as keys, into keys_ref[row]."""
  registers = x_ref.shape[1] // TILES // sets

  def insert(i, best):
    out = []
    for s in range(sets):
      x = x_ref[row, pl.ds(pl.multiple_of((i * sets + s) * TILES, TILES), TILES), :]
      x = jnp.where(x == x, x, -jnp.inf)  # Maxima of NaN differ between backends.
      for l in range(_LEVELS):
        held = best[s * _LEVELS + l]
        out.append(jnp.maximum(held, x))
        x = jnp.minimum(held, x)
    return tuple(out)

  none = jnp.full((TILES, LANES), -jnp.inf, jnp.float32)
  best = jax.lax.fori_loop(0, registers, insert, (none,) * (_LEVELS * sets), unroll=8)
  for l, x in enumerate(best):
    keys_ref[row, l * TILES : (l + 1) * TILES, :] = _key(x)


def _hits(x_ref, row, hit):
  """int32 [8, 128]: how often `hit` holds in each column of a row."""

  def add(i, n):
    x = x_ref[row, pl.ds(pl.multiple_of(i * TILES, TILES), TILES), :]
    return n + jnp.where(hit(x), 1, 0)

  zero = jnp.zeros((TILES, LANES), jnp.int32)
  return jax.lax.fori_loop(0, x_ref.shape[1] // TILES, add, zero, unroll=8)


def _words(x_ref, words_ref, row, limit, bits):
  """Bits of the scores above `limit` and, from bit 8 on, of those equal to it."""
  groups = x_ref.shape[1]
  size = min(groups, 64 * BLOCK)
  if bits == BLOCK:
    shape = (size // BLOCK, size)
    word = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    group = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    weights = jnp.where(group >> 3 == word, jnp.int32(1) << (group & 7), 0)
    weights = _bf16(weights)
  for start in range(0, groups, size):
    x = x_ref[row, start : start + size, :]
    hit = jnp.where(x > limit, 1.0, jnp.where(x == limit, 256.0, 0.0))
    if bits == BLOCK:
      rows = x.shape[0] // BLOCK
      hit = _product(weights[:rows, : x.shape[0]], hit.astype(jnp.bfloat16))
      words_ref[row, start // BLOCK : start // BLOCK + rows, :] = hit.astype(jnp.int32)
    else:
      words_ref[row, start : start + size, :] = hit.astype(jnp.int32)


def _counts(words, bits):
  """Selected entries of each word: those above, those equal; f32."""
  above, equal = words & 255, words >> 8
  count = _popcount if bits == BLOCK else lambda x: x
  return count(above).astype(jnp.float32), count(equal).astype(jnp.float32)


def _cumulative(counts):
  """Counts [R, 128] of all words → [R, 128], all lanes alike: entries up to the end of the row."""
  rows = counts.shape[0]
  everywhere = _ones((LANES, LANES), lambda i, j: j >= 0)
  total = _product(counts.astype(jnp.bfloat16), everywhere).astype(jnp.int32)
  # A row of words has up to 1,024 entries; bf16 holds whole numbers up to 256.
  high, low = _bf16(total >> 7), _bf16(total & 127)
  size = min(rows, LANES)
  upto = _ones((size, size), lambda i, j: j <= i)
  done, base = [], jnp.zeros((1, LANES), jnp.float32)
  for start in range(0, rows, size):
    part = slice(start, min(start + size, rows))
    matrix = upto[: part.stop - start, : part.stop - start]
    sums = _product(matrix, low[part]) + 128.0 * _product(matrix, high[part]) + base
    base = sums[-1:]
    done.append(sums)
  return jnp.concatenate(done, axis=0)


def _slots(words_ref, fields_ref, row, missing, bits):
  """For every slot of the row's result: its word's number, the word, and what is before it.

  Fields: number of the word (−1 for no entry); the word; equals to take from it; selected entries
  of the word that come before the slot. `missing`, f32 [1, 128], is how many equals the row takes.
  """
  words = words_ref[row]  # [R, 128]
  above, equal = _counts(words, bits)
  above_upto, equal_upto = _cumulative(above), _cumulative(equal)
  upto = above_upto + jnp.minimum(equal_upto, missing)
  table = [above.astype(jnp.bfloat16), equal.astype(jnp.bfloat16)]
  if bits == BLOCK:
    table += [_bf16(words & 255), _bf16(words >> 8)]
  table = jnp.concatenate(table, axis=1)  # [R, 128 · 4]
  lanes_upto = _ones((LANES, LANES), lambda i, j: j <= i)
  k = fields_ref.shape[2]
  # Fewer slots at a time where a row has many words: [R, width] has to stay near the registers.
  size = min(k, max(LANES, _CHUNK * 64 // max(64, words.shape[0])))
  for start in range(0, k, size):
    width = min(size, k - start)
    wide = lambda x, n=width // LANES: jnp.concatenate([x] * n, axis=1)
    slot = (start + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)).astype(jnp.float32)
    limit = wide(missing)
    # Rows of words against slots, [R, width].
    passed = wide(upto) <= slot
    number = _total(jnp.where(passed, 1.0, 0.0))
    above_base = _largest(jnp.where(passed, wide(above_upto), 0.0))
    equal_base = _largest(jnp.where(passed, wide(equal_upto), 0.0))
    line = jax.lax.broadcasted_iota(jnp.int32, passed.shape, 0).astype(jnp.float32)
    mine = jnp.where(line == number, 1.0, 0.0).astype(jnp.bfloat16)
    # Counts and words of the slot's row of words, [128, width] each.
    fetched = _product(table, mine, ((0,), (0,)))
    above_here, equal_here, *fetched_words = (
        fetched[i : i + LANES] for i in range(0, fetched.shape[0], LANES)
    )
    if bits == BLOCK:
      word = fetched_words[0] + 256.0 * fetched_words[1]
    else:
      word = above_here + 256.0 * equal_here
    equal_here = _product(lanes_upto, equal_here.astype(jnp.bfloat16)) + equal_base
    here = _product(lanes_upto, above_here.astype(jnp.bfloat16)) + above_base
    here += jnp.minimum(equal_here, limit)
    passed = here <= slot
    lane = _total(jnp.where(passed, 1.0, 0.0))
    before = _largest(jnp.where(passed, here, above_base + jnp.minimum(equal_base, limit)))
    equals = _largest(jnp.where(passed, equal_here, equal_base))
    line = jax.lax.broadcasted_iota(jnp.int32, passed.shape, 0).astype(jnp.float32)
    word = _total(jnp.where(line == lane, word, 0.0))
    fields = (
        jnp.where(number >= words.shape[0], -1.0, number * LANES + lane),
        word,
        jnp.maximum(limit - equals, 0.0),
        slot - before,
    )
    for i, field in enumerate(fields):
      fields_ref[row, i : i + 1, start : start + width] = field.astype(jnp.int32)


def _total(x):
  return jnp.sum(x, axis=0, keepdims=True)


def _largest(x):
  return jnp.max(x, axis=0, keepdims=True)


def _entries(fields_ref, bits):
  """Slots' fields [rows, 4, K] → their entries."""
  number, word, equals, before = (fields_ref[:, i, :] for i in range(4))
  found = jnp.zeros_like(word)
  for bit in range(bits):
    equal = jnp.where(equals > 0, (word >> (8 + bit)) & 1, 0)
    equals = equals - equal
    chosen = ((word >> bit) & 1) | equal
    found = jnp.where((chosen == 1) & (before == 0), bit, found)
    before = before - chosen
  return jnp.where(number < 0, -1, number * bits + found)


def _kernel(
    x_ref,  # Input. f32 [rows, groups, 128]
    out_ref,  # Output. int32 [rows, K]
    keys_ref,  # Scratch. int32 [rows, candidates, 128]
    turned_ref,  # Scratch. int32 [candidates, rows, 128]
    limit_ref,  # Scratch. int32 [rows, 128]: T of every row as a key.
    over_ref,  # Scratch. int32 [rows, 128]: scores above T.
    hits_ref,  # Scratch. int32 [rows, 8, 128]
    words_ref,  # Scratch. int32 [rows, groups / bits, 128]
    fields_ref,  # Scratch. int32 [rows, 4, K]: see `_slots`.
    *,
    k,
    bits,
    sets,
):
  rows = x_ref.shape[0]
  each_row = lambda body: jax.lax.fori_loop(0, rows, lambda row, _: (body(row), 0)[1], 0)

  def count(row, hit):
    hits_ref[row] = _hits(x_ref, row, hit)

  def count_above():
    def one(row):
      limit = _value(limit_ref[pl.ds(row, 1), :])
      count(row, lambda x: x > limit)

    each_row(one)
    over_ref[...] = _all_lanes(jnp.sum(hits_ref[...], axis=1))

  each_row(lambda row: _candidates(x_ref, keys_ref, row, sets))
  for c in range(keys_ref.shape[1]):
    turned_ref[c] = keys_ref[:, c, :]

  def count_candidates(key):
    return _all_lanes(jnp.sum(jnp.where(turned_ref[...] >= key, 1, 0), axis=0))

  limit_ref[...] = _bisect(count_candidates, rows, k)
  count_above()

  @pl.when(jnp.max(over_ref[...]) >= k)
  def _():
    def count_all(key):
      over_ref[...] = key

      def one(row):
        limit = _value(over_ref[pl.ds(row, 1), :])
        count(row, lambda x: x >= limit)

      each_row(one)
      return _all_lanes(jnp.sum(hits_ref[...], axis=1))

    limit_ref[...] = _bisect(count_all, rows, k)
    count_above()

  each_row(lambda row: _words(x_ref, words_ref, row, _value(limit_ref[pl.ds(row, 1), :]), bits))

  def locate(row):
    # Equals to take: what is missing above T, none where T is −inf.
    missing = k - over_ref[pl.ds(row, 1), :]
    missing = jnp.where(limit_ref[pl.ds(row, 1), :] > _NEGATIVE_INFINITY_KEY, missing, 0)
    _slots(words_ref, fields_ref, row, missing.astype(jnp.float32), bits)

  each_row(locate)
  out_ref[...] = _entries(fields_ref, bits)


def rows_at_once(rows: int, groups: int, budget: int) -> int:
  """Rows of one grid step: as many as fit the budget twice, at most 8.

  Raises:
    ValueError: not even one does.
  """
  fitting = budget // (2 * groups * LANES * 4)
  if not fitting:
    most = budget // 8
    raise ValueError(f"a row has {groups * LANES} scores: {budget} bytes of VMEM hold {most} twice")
  return max(n for n in (1, 2, 4, 8) if n == 1 or (n <= fitting and rows % n == 0))


@functools.partial(jax.jit, static_argnames=("k", "tiled", "vmem"))
def top_k(scores, k, *, tiled, vmem=VMEM):
  """Entries of the k best scores of every row, int32 [R, k]; see `op.top_k`.

  Args:
    scores: f32 [R, groups, 128]; groups is a multiple of 64 if tiled, of 8 else.
    k: a multiple of 128.
    tiled: group g = 8·n + s holds entries 1024·n + 8·lane + s; else 128·g + lane.
    vmem: bytes for the scores of one step, both buffers.
  """
  total, groups, _ = scores.shape
  rows = rows_at_once(total, groups, vmem)
  sets = min(4, -(-k // _COLUMNS_FOR))
  sets = next(n for n in range(sets, 0, -1) if groups % (n * TILES) == 0)
  bits = BLOCK if tiled else 1
  out = pl.pallas_call(
      functools.partial(_kernel, k=k, bits=bits, sets=sets),
      out_shape=jax.ShapeDtypeStruct((total // rows, rows, k), jnp.int32),
      grid=(total // rows,),
      in_specs=[pl.BlockSpec((rows, groups, LANES), lambda i: (i, 0, 0))],
      out_specs=pl.BlockSpec((None, rows, k), lambda i: (i, 0, 0)),
      scratch_shapes=[
          pltpu.VMEM((rows, _LEVELS * sets * TILES, LANES), jnp.int32),
          pltpu.VMEM((_LEVELS * sets * TILES, rows, LANES), jnp.int32),
          pltpu.VMEM((rows, LANES), jnp.int32),
          pltpu.VMEM((rows, LANES), jnp.int32),
          pltpu.VMEM((rows, TILES, LANES), jnp.int32),
          pltpu.VMEM((rows, groups // bits, LANES), jnp.int32),
          pltpu.VMEM((rows, 4, k), jnp.int32),
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel",), vmem_limit_bytes=vmem + (24 << 20)
      ),
      name=f"top_{k}",
  )(scores)
  return out.reshape(total, k)
