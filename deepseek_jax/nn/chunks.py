"""Query rows in chunks: the scores of one chunk exist at a time; memory grows linearly with T."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# A row sees no slot behind its own, so later rows alone need late entries. Cutting the chunks into
# two bands, each with its own static bound on the entries, saves a quarter of the scores for twice
# the code; four bands would save three eighths.
BANDS = 2


def chunk_rows(length: int, chunk: int, front: int) -> int:
  """Rows per chunk: all of a short input; never fewer than the `front` slots it reaches back."""
  return length if length <= chunk else max(chunk, front)


def bands(n: int, count: int = BANDS) -> list[tuple[int, int]]:
  """At most `count` ranges of n chunks that share a static bound."""
  edges = sorted({round(i * n / count) for i in range(count + 1)})
  return list(zip(edges[:-1], edges[1:]))


def split(tree: Any, size: int) -> Any:
  """Arrays [B, T, ...] as [n, B, size, ...]; the last chunk is padded with zeros (segment 0)."""

  def one(a):
    n = -(-a.shape[1] // size)
    a = jnp.pad(a, ((0, 0), (0, n * size - a.shape[1])) + ((0, 0),) * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(a.shape[0], n, size, *a.shape[2:]), 1, 0)

  return jax.tree.map(one, tree)


def split_overlapping(tree: Any, size: int, front: int) -> Any:
  """Arrays [B, front + T, ...] as [n, B, front + size, ...]: chunks begin `front` early."""

  def one(a):
    own = split(a[:, front:], size)
    n = own.shape[0]
    before = a[None, :, :front] if n == 1 else split(a[:, : n * size], size)[:, :, :front]
    return jnp.concatenate([before, own], axis=2)

  return jax.tree.map(one, tree)


def join(tree: Any, length: int) -> Any:
  """Inverse of `split`: arrays [n, B, size, ...] as [B, length, ...]."""

  def one(a):
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], -1, *a.shape[3:])[:, :length]

  return jax.tree.map(one, tree)


def map_bands(fn: Callable[[Any, int], Any], xs: Any, count: int = BANDS) -> Any:
  """Fn over the leading axis of xs [n, B, size, ...]: (chunk, stop) → arrays [B, size, ...].

  `stop` is a static bound on the row indices of the chunk, the same in each of `count` bands.
  Recomputed in the backward pass.
  """
  n, _, size = jax.tree.leaves(xs)[0].shape[:3]
  if n == 1:
    return jax.tree.map(lambda a: a[None], fn(jax.tree.map(lambda a: a[0], xs), size))
  parts = []
  for lo, hi in bands(n, count):
    body = jax.checkpoint(lambda x, stop=hi * size: fn(x, stop))
    parts.append(jax.lax.map(body, jax.tree.map(lambda a, lo=lo, hi=hi: a[lo:hi], xs)))
  return jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def over_rows(fn: Callable[[Any, int], Any], tree: Any, size: int, count: int = BANDS) -> Any:
  """Fn over chunks of arrays [B, T, ...], joined again; see `map_bands`."""
  length = jax.tree.leaves(tree)[0].shape[1]
  return join(map_bands(fn, split(tree, size), count), length)
