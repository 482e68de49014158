"""Token groups → global entries (spec 4): m = 1 takes a latent, m > 1 pools a group by a gate."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from deepseek_jax import sharding
from deepseek_jax.cache import Table, Tail
from deepseek_jax.config import ModelConfig
from deepseek_jax.nn.layers import Linear, RMSNorm
from deepseek_jax.nn.rows import Rows


class Entries(NamedTuple):
  """Global entries of one KV source, as later layers read them: arrays, or tables of a cache.

  Attributes:
    kv: main KV, rotated at the group's first token and rounded to the cache format.
    index_keys: rotated and rounded likewise.
    last: position of the group's last token; entry j of ratio m has last = j·m + m − 1.
    segments: document of the entry; 0 marks a slot without an entry.
  """

  kv: Float[Array, "B C H"] | Table
  index_keys: Float[Array, "B C J"] | Table
  last: Int[Array, "B C"]
  segments: Int[Array, "B C"]


class Groups(NamedTuple):
  """Where the entries of a set of rows lie: slot c is filled by rows `members[:, c]`."""

  members: Int[Array, "B C m"]
  last: Int[Array, "B C"]
  segments: Int[Array, "B C"]


def group_rows(rows: Rows, m: int, earlier: Int[Array, "B n"] | None = None) -> Groups:
  """The complete groups of `rows`, restarting with every document; C = ⌈T/m⌉.

  A group ends at a writing row of position ≡ m − 1 whose m − 1 predecessors are rows of the same
  document. Ends of one row array are at least m apart, so end t owns slot t // m: slots ascend with
  rows, and a row t can only see slots up to t // m.

  Args:
    rows: that may end groups.
    m: rows of a group.
    earlier: segments of the m − 1 rows before them, if groups can begin there; members are then
      counted from the first of these.
  """
  positions, segments = rows.positions, rows.segments
  batch, length = positions.shape
  slots = -(-length // m)
  front = 0 if earlier is None else m - 1
  earlier = jnp.zeros((batch, m - 1), jnp.int32) if earlier is None else earlier
  before = jnp.concatenate([earlier, segments], axis=1)[:, :length]
  ends = rows.writes & (segments > 0) & (positions % m == m - 1) & (before == segments)
  ends = jnp.pad(ends, ((0, 0), (0, slots * m - length))).reshape(batch, slots, m)
  last_row = jnp.arange(slots) * m + jnp.argmax(ends, axis=-1)
  filled = ends.any(-1)
  members = last_row[..., None] + front - m + 1 + jnp.arange(m)
  members = jnp.clip(members, 0, front + length - 1)
  last_row = jnp.minimum(last_row, length - 1)
  return Groups(
      members,
      jnp.take_along_axis(positions, last_row, axis=1),
      jnp.where(filled, jnp.take_along_axis(segments, last_row, axis=1), 0),
  )


def with_predecessors(rows: Rows, count: int) -> Rows:
  """Rows preceded by the `count` rows before them, which write nothing; absent ones are padding."""
  positions = rows.positions[:, :1] + np.arange(-count, 0, dtype=np.int32)
  there = (positions >= 0) & (rows.segments[:, :1] > 0)
  front = Rows(
      jnp.maximum(positions, 0),
      jnp.zeros_like(positions),
      jnp.where(there, rows.segments[:, :1], 0),
      jnp.zeros_like(there),
  )
  return Rows(*(jnp.concatenate(pair, axis=1) for pair in zip(front[:4], rows[:4])))


def visible(
    rows: Rows, last: Int[Array, "B C"], segments: Int[Array, "B C"]
) -> Bool[Array, "B T C"]:
  """Entries a row may see: of its document, complete at its position (j < ⌊(i + 1)/m⌋)."""

  def of(segment, end):
    same = (segments[:, None, :] == segment[..., None]) & (segments > 0)[:, None, :]
    return same & (last[:, None, :] <= end[..., None])

  if rows.reads is None:
    return of(rows.segments, rows.positions)
  own, base, until, _ = rows.reads
  return of(own, rows.positions) | of(base, jnp.minimum(rows.positions, until - 1))


class Compressor(nnx.Module):
  """Latents of the groups, before rotation and rounding."""

  def __init__(self, stack: tuple[int, ...], config: ModelConfig, m: int, *, rngs: nnx.Rngs, dtype):
    self.m = m
    self.wkv = Linear(stack, config.hidden_size, config.head_dim, rngs=rngs, dtype=dtype)
    if m > 1:
      self.wgate = Linear(stack, config.hidden_size, config.head_dim, rngs=rngs, dtype=dtype)
    self.norm = RMSNorm(stack, config.head_dim, config.rms_norm_eps, dtype=dtype)

  def __call__(
      self, x: Float[Array, "B T D"], rows: Rows, tail: Tail | None = None
  ) -> tuple[Float[Array, "B C H"], Groups, Tail | None]:
    """Latents of the complete groups of `rows`, their places, and the tail for the next rows.

    Args:
      x: attention input of the rows.
      rows: with a tail one document a line, live rows first.
      tail: of the m − 1 rows before them; None where groups cannot begin earlier, or begin on
        another device.
    """
    m = self.m
    if m == 1:
      return self.norm(self.wkv(x)), group_rows(rows, 1), None
    v = x.astype(jnp.float32)  # pooled in f32: spec 4
    pooled = Tail(self.wkv(v), self.wgate(v))
    if tail is not None:
      live = jnp.sum(rows.segments > 0, axis=1)[:, None]
      rows = with_predecessors(rows, m - 1)
      pooled = Tail(*(jnp.concatenate(pair, axis=1) for pair in zip(tail, pooled)))
      newest = (live + jnp.arange(m - 1))[..., None]
      tail = Tail(*(jnp.take_along_axis(a, newest, axis=1) for a in pooled))
      groups = group_rows(rows, m)
    elif sharding.axis_size(sharding.SEQ) == 1:
      groups = group_rows(rows, m)
    else:
      earlier, halo = sharding.before((rows.segments, pooled), m - 1)
      groups = group_rows(rows, m, earlier)
      pooled = Tail(*(jnp.concatenate(pair, axis=1) for pair in zip(halo, pooled)))

    def of_groups(a):
      flat = groups.members.reshape(a.shape[0], -1, 1)
      return jnp.take_along_axis(a, flat, axis=1).reshape(*groups.members.shape, -1)

    gate = jax.nn.softmax(of_groups(pooled.gates), axis=2)
    latents = jnp.sum(gate * of_groups(pooled.values), axis=2)
    return self.norm(latents.astype(x.dtype)), groups, tail
