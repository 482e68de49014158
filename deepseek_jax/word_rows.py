"""Entries in buffers [*n, R, lanes] that hold their words one after another, R rows of 128 words.

A view [*n, entries, words] of such a buffer is free on a CPU; on a TPU it is a copy of all of it in
another layout. Here a program reads and writes the rows that hold the entries it names, no others.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import dispatch


class Stretch(NamedTuple):
  """New entries of each line that go to consecutive slots.

  Attributes:
    start: first of them, counted in what is appended.
    count: how many; 0 where nothing is left.
    slot: of the first.
  """

  start: Int[Array, "*own"]
  count: Int[Array, "*own"]
  slot: Int[Array, "*own"]

  @classmethod
  def after(cls, done: Int[Array, "*own"], slots: Int[Array, "*own T"], entries: int) -> "Stretch":
    """The next one behind the first `done` new entries; slots ≥ `entries` belong to none."""
    at = jnp.arange(slots.shape[-1])
    left = (slots < entries) & (at >= done[..., None])
    start = jnp.argmax(left, axis=-1)
    slot = jnp.take_along_axis(slots, start[..., None], axis=-1)
    follows = left & (slots - at == slot - start[..., None])
    ends = (at > start[..., None]) & ~follows
    stop = jnp.where(ends.any(-1), jnp.argmax(ends, axis=-1), at.size)
    return cls(start, jnp.where(left.any(-1), stop - start, 0), slot[..., 0])


class _Unit(NamedTuple):
  """The smallest number of entries that fill whole rows."""

  entries: int
  rows: int

  @classmethod
  def of(cls, words: int, lanes: int) -> "_Unit":
    entries = lanes // math.gcd(words, lanes)
    return cls(entries, entries * words // lanes)


def _most_rows(words: int, step: int, lanes: int) -> int:
  """Rows that `words` words touch at most, if they begin at a multiple of `step`."""
  return -(-(words + lanes - math.gcd(step, lanes)) // lanes)


def append(
    buffers: tuple[Array, ...], new: tuple[Array, ...], slots: Int[Array, "*#n T"], entries: int
) -> tuple[Array, ...]:
  """The buffers with new entries at `slots`; slots ≥ `entries` are dropped.

  A turn writes one stretch of every line. A chunk of prefill is one, in a ring that it wraps two;
  any other slots take as many turns as they need.

  Args:
    buffers: [*n, R, lanes] each.
    new: words of the new entries in each buffer, [*n, T, words].
    slots: leading axes of size 1 serve all that `n` has there.
    entries: that each buffer holds.
  """
  shared = next((i for i, n in enumerate(slots.shape[:-1]) if n > 1), slots.ndim - 1)
  slots = jnp.broadcast_to(slots[(0,) * shared], new[0].shape[shared:-1])
  length = slots.shape[-1]

  def some(state):
    return jnp.any((slots < entries) & (jnp.arange(length) >= state[1][..., None]))

  def once(state):
    buffers, done = state
    stretch = Stretch.after(done, slots, entries)
    buffers = tuple(_write(b, n, stretch, entries) for b, n in zip(buffers, new))
    return buffers, stretch.start + stretch.count

  start = buffers, jnp.zeros(slots.shape[:-1], jnp.int32)
  if length == 1 and dispatch.platform() == "tpu":
    return once(start)[0]
  # A loop, for one entry as well: later reads cannot be fused with the write across it. Without it
  # XLA's CPU computes the written rows again in every read and copies each table three times.
  return jax.lax.while_loop(some, once, start)[0]


def _write(buffer: Array, new: Array, stretch: Stretch, entries: int) -> Array:
  """A buffer [*shared, *own, R, lanes] with a stretch of new words [*shared, *own, T, words]."""
  (length, words), (height, lanes) = new.shape[-2:], buffer.shape[-2:]
  lead, own = buffer.shape[:-2], stretch.slot.shape
  shared = len(lead) - len(own)
  over_shared = lambda a: a.reshape((1,) * shared + a.shape)

  # Whole units from `base` on take the new entries by a static reshape. A last unit that is not
  # whole cannot be cut out of the buffer.
  unit = _Unit.of(words, lanes)
  units = -(-entries // unit.entries)
  taken = units if entries % unit.entries else min(units, -(-(length - 1) // unit.entries) + 1)
  base = jnp.clip(stretch.slot // unit.entries, 0, units - taken)
  before = stretch.slot - base * unit.entries
  if length == 1:
    fresh = jnp.broadcast_to(new, (*lead, taken * unit.entries, words))
  else:
    source = jnp.arange(taken * unit.entries) + (stretch.start - before)[..., None]
    source = jnp.clip(source, 0, length - 1)[..., None]
    fresh = jnp.take_along_axis(new, over_shared(source), axis=-2)
  fresh = fresh.reshape(*lead, taken * unit.rows, lanes)[..., :height, :]

  size = min(fresh.shape[-2], _most_rows(length * words, words, lanes))
  top = jnp.clip(before * words // lanes, 0, fresh.shape[-2] - size)
  row = top[..., None] + jnp.arange(size)
  if size < fresh.shape[-2]:
    fresh = jnp.take_along_axis(fresh, over_shared(row[..., None]), axis=-2)
  word = row[..., None] * lanes + jnp.arange(lanes) - (before * words)[..., None, None]
  mine = over_shared((word >= 0) & (word < (stretch.count * words)[..., None, None]))

  if size == height:
    return jnp.where(mine, fresh, buffer)
  first = base * unit.rows + top
  if not own:
    old = jax.lax.dynamic_slice_in_dim(buffer, first, size, axis=-2)
    fresh = jnp.where(mine, fresh, old)
    return jax.lax.dynamic_update_slice_in_dim(buffer, fresh, first, axis=-2)
  return _exchange(buffer, first[..., None] + jnp.arange(size), mine, fresh, shared)


def _exchange(buffer: Array, rows: Array, mine: Array, fresh: Array, shared: int) -> Array:
  """The buffer with `rows` [*own, size] taken from `fresh` where `mine`.

  Indexing by arrays would move the axes `shared`, or index along all of them: TPU programs then lay
  the buffer out anew, or write 20 layers one by one, and a partitioner gathers the lines.
  """
  row, own = buffer.ndim - 2, rows.ndim - 1
  window, lines = (*range(shared), row + 1), tuple(range(shared, row))
  sizes = tuple(1 if axis in (row, *lines) else n for axis, n in enumerate(buffer.shape))
  at = rows[..., None]
  gathered = jax.lax.GatherDimensionNumbers(
      offset_dims=window,
      collapsed_slice_dims=(row,),
      start_index_map=(row,),
      operand_batching_dims=lines,
      start_indices_batching_dims=tuple(range(own)),
  )
  scattered = jax.lax.ScatterDimensionNumbers(
      update_window_dims=window,
      inserted_window_dims=(row,),
      scatter_dims_to_operand_dims=(row,),
      operand_batching_dims=lines,
      scatter_indices_batching_dims=tuple(range(own)),
  )
  how = dict(unique_indices=True, mode="promise_in_bounds")
  old = jax.lax.gather(buffer, at, gathered, sizes, **how)
  return jax.lax.scatter(buffer, at, jnp.where(mine, fresh, old), scattered, **how)


def take(buffer: Array, slots: Int[Array, " B *n"], words: int) -> Array:
  """Words [B, *n, words] of entries of a buffer [B, R, lanes]; slots are within it."""
  height, lanes = buffer.shape[-2:]
  unit = _Unit.of(words, lanes)
  word = slots % unit.entries * words
  first = slots // unit.entries * unit.rows + word // lanes
  pick = jax.vmap(lambda rows, at: rows.at[at].get(mode="clip"))
  found = [pick(buffer, first + i) for i in range(_most_rows(words, words, lanes))]
  found, lane = jnp.concatenate(found, axis=-1), (word % lanes)[..., None]
  # Entries begin at multiples of a power of two: a shift by each of its bits.
  step = lanes // 2
  while step >= lanes // unit.entries:
    found = jnp.where(lane & step > 0, found[..., step:], found[..., :-step])
    step //= 2
  return found[..., :words]
