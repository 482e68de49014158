"""One softmax over window keys, selected entries and the sink, some rows at a time (spec 3.6).

Keys are values. The gradient is written out: it needs the output and one log-sum-exp a row and head
instead of the scores, so memory grows linearly with the rows.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from deepseek_jax.cache import Table
from deepseek_jax.nn import chunks
from deepseek_jax.nn.layers import dot
from deepseek_jax.nn.rows import Rows
from pallas_kernels import dispatch
from pallas_kernels.quantize.formats import FP4_MAIN, FP8_WINDOW
from pallas_kernels.sparse_attention import op as sparse_op
from pallas_kernels.window_attention import op as window_op

# Up to this many entries a selected entry, masking all entries beats gathering the selected ones on
# a CPU: the gather's gradient is a serial scatter-add. Both give the same values.
DENSE_ENTRIES_PER_CHOICE = 16


class WindowKeys(NamedTuple):
  """Window latents of slots before the queries, at least W − 1, and of the queries' own rows."""

  kv: Float[Array, "*n B S H"] | Table
  positions: Int[Array, "*n B S"]
  segments: Int[Array, "*n B S"]


def window_mask(
    rows: Rows, positions: Int[Array, "B S"], segments: Int[Array, "B S"], window: int
) -> Bool[Array, "B T S"]:
  """Window keys of each row: same segment, positions [max(floor, i − W + 1), i] (spec 17)."""
  at, key = rows.positions[..., None], positions[:, None]
  first = jnp.maximum(rows.floors[..., None], at - window + 1)
  same = (rows.segments[..., None] == segments[:, None]) & (segments > 0)[:, None]
  return same & (first <= key) & (key <= at)


def selection_mask(slots: Int[Array, "B T K"], c: int) -> Bool[Array, "B T C"]:
  """True at the selected slots; −1 marks nothing."""
  b, t, _ = slots.shape
  at = jnp.where(slots < 0, c, slots)
  mask = jnp.zeros((b, t, c), bool)
  return mask.at[jnp.arange(b)[:, None, None], jnp.arange(t)[:, None], at].set(True, mode="drop")


def gather_entries(
    kv: Float[Array, "B C H"] | Table, slots: Int[Array, "B T K"], dtype=None
) -> Float[Array, "B T K H"]:
  """The selected entries of every row; slot −1 reads entry 0 and must be masked."""
  if isinstance(kv, Table):
    return kv.take(slots, dtype)
  at = jnp.maximum(slots, 0)
  return jax.vmap(lambda a, i: a.at[i].get(mode="clip"))(kv, at)


class Part(NamedTuple):
  """Keys under a mask: shared by all rows, or gathered for each."""

  keys: Float[Array, "B C H"] | Float[Array, "B T K H"]
  seen: Bool[Array, "B T C"]

  @property
  def axes(self) -> str:
    return "bch" if self.keys.ndim == 3 else "btch"


def joint_attention(
    q: Float[Array, "B T N H"], parts: tuple[Part, ...], sink: Float[Array, " N"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Float[Array, "B T C"]]:
  """Softmax over the keys of all parts and the sink, which only enters the denominator.

  Logits and sums are f32, probabilities are rounded to q's dtype for the value product. A row that
  sees nothing gives exactly 0. A key that two parts hold counts twice.

  Returns:
    The output; log Σ exp over keys and sink; the last part's probabilities summed over heads.
  """
  scale, logits = q.shape[-1] ** -0.5, []
  for part in parts:
    x = dot(f"btnh,{part.axes}->btnc", q, part.keys) * scale
    logits.append(jnp.where(part.seen[:, :, None], x, -1e30))
  top = functools.reduce(jnp.maximum, [x.max(-1, keepdims=True) for x in logits], sink[:, None])
  total, out = jnp.exp(sink[:, None] - top), 0.0
  for part, x in zip(parts, logits):
    p = jnp.exp(x - top)  # exactly 0 where masked: top is at least the sink
    total = total + p.sum(-1, keepdims=True)
    out = out + dot(f"btnc,{part.axes}->btnh", p.astype(q.dtype), part.keys)
  lse = (top + jnp.log(total))[..., 0]
  return (out / total).astype(q.dtype), lse, jnp.sum(p / total, axis=2)


class Gradients(NamedTuple):
  """Of one chunk, f32: queries with their channels first, the keys of every part, sink."""

  q: Float[Array, "B H T N"]
  keys: tuple[Array, ...]
  sink: Float[Array, " N"]


def joint_attention_gradients(
    q: Float[Array, "B T N H"], parts: tuple[Part, ...], sink: Float[Array, " N"],
    out: Float[Array, "B T N H"], lse: Float[Array, "B T N"], dout: Float[Array, "B T N H"],
) -> Gradients:  # fmt: skip
  """Gradient of `joint_attention` from its output and log-sum-exp.

  Scores are recomputed with the key axis before rows and heads, and the queries' gradient comes out
  with channels first: every product is then a plain matrix product. Transposing a chunk's scores
  costs a CPU more than computing them.
  """
  scale, f32 = q.shape[-1] ** -0.5, jnp.float32
  delta = jnp.sum(dout.astype(f32) * out.astype(f32), axis=-1)
  dq, dkeys = 0.0, []
  for part in parts:
    shared = part.keys.ndim == 3
    axes, s = part.axes, "bctn" if shared else "btcn"
    along = 1 if shared else 2
    seen = jnp.swapaxes(part.seen, 1, 2) if shared else part.seen
    x = dot(f"{axes},btnh->{s}", part.keys, q) * scale
    p = jnp.where(seen[..., None], jnp.exp(x - jnp.expand_dims(lse, along)), 0.0)
    dp = dot(f"{axes},btnh->{s}", part.keys, dout)
    ds = (p * (dp - jnp.expand_dims(delta, along))).astype(q.dtype)
    dq = dq + dot(f"{axes},{s}->bhtn", part.keys, ds) * scale
    dkeys.append(
        dot(f"{s},btnh->{axes}", ds, q) * scale + dot(f"{s},btnh->{axes}", p.astype(q.dtype), dout)
    )
  dsink = -jnp.sum(jnp.exp(sink - lse) * delta, axis=(0, 1))
  return Gradients(dq, tuple(dkeys), dsink)


@dataclasses.dataclass(frozen=True)
class Reach:
  """Static facts of one call.

  Attributes:
    window: W.
    ratio: m of the entries; 0 without entries.
    same_rows: entries come from the very rows that read them, so row t sees slots up to t // m.
    mass: return the attention mass of the selected entries too.
  """

  window: int
  ratio: int
  same_rows: bool
  mass: bool = False

  def bound(self, kv: Array, stop: int) -> int:
    """Number of entries that rows before `stop` can see."""
    return min(kv.shape[1], -(-stop // self.ratio)) if self.same_rows else kv.shape[1]

  def near(self, kv: Array | Table | None, stop: int) -> Array | Table | None:
    """The entries that rows before `stop` can see; a table is gathered from as it is."""
    return kv if kv is None or isinstance(kv, Table) else kv[:, : self.bound(kv, stop)]


class Where(NamedTuple):
  """Integers of the chunks: rows, places of their window keys, selected slots."""

  rows: Rows
  positions: Int[Array, "*n B S"]
  segments: Int[Array, "*n B S"]
  slots: Int[Array, "*n B T K"] | None


def _parts(reach: Reach, window: Array, kv: Array | Table | None, where: Where) -> tuple[Part, ...]:
  own = Part(window, window_mask(where.rows, where.positions, where.segments, reach.window))
  if kv is None:
    return (own,)
  c, k = kv.shape[1], where.slots.shape[-1]
  if not isinstance(kv, Table) and c <= DENSE_ENTRIES_PER_CHOICE * k:
    return own, Part(kv, selection_mask(where.slots, c))
  return own, Part(gather_entries(kv, where.slots, window.dtype), where.slots >= 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(reach: Reach, q, window, kv, sink, where: Where):
  """(out, mass) of all chunks [n, B, size, ...]; mass per selected slot, without gradient."""
  return _attend_forward(reach, q, window, kv, sink, where)[0]


def _attend_forward(reach, q, window, kv, sink, where):
  def of_chunk(x, stop):
    q, window, where = x
    near = reach.near(kv, stop)
    parts = _parts(reach, window, near, where)
    out, lse, mass = joint_attention(q, parts, sink)
    if not reach.mass:
      return out, lse, None
    if parts[1].keys.ndim == 3:
      at = jnp.clip(where.slots, 0, near.shape[1] - 1)
      mass = jnp.take_along_axis(mass, at, axis=-1)
    return out, lse, jnp.where(where.slots < 0, 0.0, mass)

  out, lse, mass = chunks.map_bands(of_chunk, (q, window, where))
  return (out, mass), (q, window, kv, sink, where, out, lse)


def _attend_backward(reach, saved, cotangents):
  q, window, kv, sink, where, out, lse = saved
  total = None if kv is None else jnp.zeros(kv.shape, jnp.float32)
  dsink = jnp.zeros_like(sink)
  pieces = []
  for lo, hi in chunks.bands(q.shape[0]):
    c = 0 if kv is None else reach.bound(kv, hi * q.shape[2])

    def body(carry, x, c=c):
      dkv, dsink = carry
      q, window, where, out, lse, dout = x
      near = None if kv is None else kv[:, :c]
      parts = _parts(reach, window, near, where)
      d = joint_attention_gradients(q, parts, sink, out, lse, dout)
      if kv is not None:
        dnear = d.keys[1]
        if parts[1].keys.ndim == 4:
          at = jnp.where(where.slots < 0, c, where.slots)
          b = jnp.arange(at.shape[0])[:, None, None]
          dkv = dkv.at[b, at].add(dnear, mode="drop")
        else:
          dkv = dkv + dnear
      return (dkv, dsink + d.sink), (d.q.astype(q.dtype), d.keys[0].astype(window.dtype))

    xs = jax.tree.map(lambda a, lo=lo, hi=hi: a[lo:hi], (q, window, where, out, lse, cotangents[0]))
    start = None if kv is None else jnp.zeros((kv.shape[0], c, kv.shape[2]), jnp.float32)
    (dkv, dsink), piece = jax.lax.scan(body, (start, dsink), xs)
    pieces.append(piece)
    if kv is not None:
      total = total + jnp.pad(dkv, ((0, 0), (0, kv.shape[1] - c), (0, 0)))
  dq, dwindow = jax.tree.map(lambda *a: jnp.concatenate(a), *pieces)
  dq = jnp.moveaxis(dq, 2, -1)
  return dq, dwindow, None if kv is None else total.astype(kv.dtype), dsink, None


_attend.defvjp(_attend_forward, _attend_backward)


def row_kernels(heads: int, channels: int, dtype, implementation: str | None) -> bool:
  """Whether kernels attend rows of decoded keys."""
  refusal = window_op.refusal(heads) or sparse_op.rows_refusal(heads, channels, dtype)
  return dispatch.resolve(implementation, sparse_op.AVAILABLE, refusal) == "pallas"


def decode_kernel(heads: int, k: int, kv: Any, ring: Any, implementation: str | None) -> bool:
  """Whether one kernel attends single rows over the packed entries and ring of a cache."""
  packed = isinstance(kv, Table) and isinstance(ring, Table)
  if not packed or (kv.layout.format, ring.layout.format) != (FP4_MAIN, FP8_WINDOW):
    return False
  refusal = sparse_op.decode_refusal(heads, kv.layout.width, k, ring.layout.rows)
  return dispatch.resolve(implementation, sparse_op.AVAILABLE, refusal) == "pallas"


def _attend_on_kernels(q, rows, window, kv, slots, sink, reach):
  integers = *rows[:3], window.positions, window.segments
  how = dict(window=reach.window, implementation="pallas")
  if kv is None:
    return window_op.window_attention(q, window.kv, *integers, sink, **how), None
  out = sparse_op.sparse_attention(q, kv, slots, window.kv, *integers, sink, mass=reach.mass, **how)
  return out if reach.mass else (out, None)


def attend(
    q: Float[Array, "B T N H"], rows: Rows, window: WindowKeys,
    kv: Float[Array, "B C H"] | Table | None,
    slots: Int[Array, "B T K"] | None, sink: Float[Array, " N"], *, reach: Reach, chunk: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K"] | None]:  # fmt: skip
  """Joint attention of all rows.

  Args:
    q: rotated queries.
    rows: of the queries.
    window: keys; at least W − 1 slots precede the rows' own, in any order. Or the ring of a cache
      with the only row of every line in it, for the kernel that reads it packed.
    kv: entries of the KV source, or None in a window layer. A table has no gradient.
    slots: selected entries of every row, −1 for absent.
    sink: f32 logit per head.
    reach: static facts.
    chunk: rows whose scores exist at one time, without kernels.
    implementation: see `pallas_kernels.dispatch.resolve`.

  Returns:
    The output, and the detached head-summed probability of every selected entry if asked for.
  """
  _, length, n, h = q.shape
  if isinstance(window.kv, Table):
    seen = window_mask(rows, window.positions, window.segments, reach.window)[:, 0]
    out = sparse_op.sparse_attention_decode(
        q[:, 0], kv.data, slots[:, 0], window.kv.data, window.kv.scales, seen.astype(jnp.int32),
        sink, implementation="pallas",
    )  # fmt: skip
    return out[:, None], None
  if not isinstance(kv, Table) and row_kernels(n, h, q.dtype, implementation):
    return _attend_on_kernels(q, rows, window, kv, slots, sink, reach)
  front = window.positions.shape[1] - length
  size = chunks.chunk_rows(length, chunk, front)
  q, rows, slots = chunks.split((q, rows, slots), size)
  keys = chunks.split_overlapping(window, size, front)
  where = Where(rows, keys.positions, keys.segments, slots)
  out, mass = _attend(reach, q, keys.kv, kv, sink, where)
  return chunks.join((out, mass), length)
