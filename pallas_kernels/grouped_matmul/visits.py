"""Which group meets which tile of rows: what the scalar unit of the kernel walks through."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Visits(NamedTuple):
  """One entry for every pair of a tile and a group with rows in it, in the order of the rows.

  There are at most tiles + min(E, S) of them, the rows behind the last group being one group more.
  What is left repeats the last visit without rows.

  Attributes:
    tile: of rows.
    matrix: of the group; the one before where there is nothing to multiply, so that none is read.
    start: first row of the visit, counted in its tile.
    stop: row behind its last; equal to `start` where there is nothing to multiply.
  """

  tile: Int32[Array, " P"]
  matrix: Int32[Array, " P"]
  start: Int32[Array, " P"]
  stop: Int32[Array, " P"]


def visits(group_sizes: Int32[Array, " E"], rows: int, tile: int) -> Visits:
  """Visits of sorted `rows` in tiles of `tile`; groups behind the last row are cut off."""
  count = group_sizes.shape[0]
  ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes, 0)), rows)
  ends = jnp.append(ends, rows).astype(jnp.int32)
  starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
  first = starts // tile
  pairs = jnp.where(ends > starts, (ends - 1) // tile - first + 1, 0)
  until = jnp.cumsum(pairs)
  p = jnp.arange(-(-rows // tile) + min(count, rows), dtype=jnp.int32)
  last = until[-1] - 1
  group = jnp.sum(until[None, :] <= jnp.minimum(p, last)[:, None], axis=1, dtype=jnp.int32)
  # Sums instead of gathers, which a TPU does one scalar at a time.
  chosen = group[:, None] == jnp.arange(count + 1, dtype=jnp.int32)
  of = lambda values: jnp.sum(jnp.where(chosen, values, 0), axis=1, dtype=jnp.int32)
  at = jnp.minimum(p, last) + of(first + pairs - until)
  used = (group < count) & (p <= last)
  start = jnp.maximum(of(starts) - at * tile, 0)
  stop = jnp.where(used, jnp.minimum(of(ends) - at * tile, tile), start)
  # The last group with rows is the one that a visit without any would have to fetch nothing of.
  largest = jnp.max(jnp.where(pairs[:-1] > 0, jnp.arange(count, dtype=jnp.int32), 0))
  return Visits(at, jnp.minimum(group, largest), start, stop)
