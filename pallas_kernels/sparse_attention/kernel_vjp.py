"""Attention of many rows as XLA makes it of jnp, and its gradient, some rows at a time.

The part of the selected entries: `extend` merges it with what other keys and the sink gave. The
gradient recomputes scores from the output and one log-sum-exp a row and head, so memory grows
linearly with the rows. Gradients of entries are sorted by slot before they are added: the sum of an
entry has one order, whatever the hardware does with colliding writes.
"""

import functools

import jax
import jax.numpy as jnp

_HIDDEN = -1e30


def _dot(equation, *arrays):
  high = jax.lax.Precision.HIGHEST
  return jnp.einsum(equation, *arrays, precision=high, preferred_element_type=jnp.float32)


def _split(chunk: int, arrays, absent=0):
  """[B, T, ...] as [T/chunk, B, chunk, ...]."""

  def one(a):
    missing = -a.shape[1] % chunk
    a = jnp.pad(
        a, ((0, 0), (0, missing), *((0, 0),) * (a.ndim - 2)), constant_values=absent
    )  # fmt: skip
    return jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0)

  return jax.tree.map(one, arrays)


def _join(a, t: int):
  a = jnp.moveaxis(a, 0, 1)
  return a.reshape(a.shape[0], -1, *a.shape[3:])[:, :t]


def _keys(entries, slots):
  present = slots >= 0
  selected = jax.vmap(lambda e, i: e[i])(entries, jnp.maximum(slots, 0))
  # What nobody sees may be anything, NaN too.
  return jnp.where(present[..., None], selected, jnp.zeros_like(selected)), present


def _scores(q, keys, present, scale):
  x = _dot("btnh,btsh->btns", q, keys) * scale
  return jnp.where(present[:, :, None], x, _HIDDEN)


def forward(chunk, q, entries, slots, near, near_lse):
  """Output, log Σ exp and mass; see `extend`."""

  def of_chunk(x):
    (q, near, near_lse), slots = x
    keys, present = _keys(entries, slots)
    x, before = _scores(q, keys, present, q.shape[-1] ** -0.5), near_lse[..., None]
    top = jnp.maximum(x.max(axis=-1, keepdims=True), before)
    p, weight = jnp.exp(x - top), jnp.exp(before - top)
    total = p.sum(axis=-1, keepdims=True) + weight
    out = _dot("btns,btsh->btnh", p.astype(q.dtype), keys) + near.astype(jnp.float32) * weight
    mass = jnp.sum(p / total, axis=2)
    return (out / total).astype(q.dtype), (top + jnp.log(total))[..., 0], mass

  t = q.shape[1]
  chunk = min(chunk, t)
  pieces = _split(chunk, (q, near, near_lse)), _split(chunk, slots, -1)
  return tuple(_join(a, t) for a in jax.lax.map(of_chunk, pieces))


def _add_sorted(total, slots, values):
  """Adds values [n, H] to total [C, H] at slots; absent ones have slot C."""
  order = jnp.argsort(slots, stable=True)
  count = total.shape[0]
  sums = jax.ops.segment_sum(
      values[order], slots[order], num_segments=count + 1, indices_are_sorted=True
  )
  return total + sums[:count]


def gradients(chunk, scale, q, entries, slots, lse, dout, delta):
  """Gradients of q and entries in f32 from log Σ exp of all keys and Σ d out · out, [B, T, N]."""
  f32 = jnp.float32

  def of_chunk(dentries, x):
    (q, lse, dout, delta), slots = x
    keys, present = _keys(entries, slots)
    p = jnp.exp(_scores(q, keys, present, scale) - lse[..., None])
    dp = _dot("btnh,btsh->btns", dout, keys)
    ds = (p * (dp - delta[..., None])).astype(q.dtype)
    dkeys = _dot("btns,btnh->btsh", ds, q) * scale
    dkeys = dkeys + _dot("btns,btnh->btsh", p.astype(q.dtype), dout)
    b, h = slots.shape[0], q.shape[-1]
    at = jnp.where(present, slots, entries.shape[1])
    dentries = jax.vmap(_add_sorted)(dentries, at.reshape(b, -1), dkeys.reshape(b, -1, h))
    return dentries, _dot("btns,btsh->btnh", ds, keys) * scale

  t = q.shape[1]
  chunk = min(chunk, t)
  pieces = _split(chunk, (q, lse, dout, delta)), _split(chunk, slots, -1)
  dentries, dq = jax.lax.scan(of_chunk, jnp.zeros(entries.shape, f32), pieces)
  return _join(dq, t), dentries


def part_gradients(near, near_lse, out, lse, dout):
  """Gradients of near and near_lse, the merged part, and Σ d out · out."""
  dout = dout.astype(jnp.float32)
  dot = lambda a: jnp.sum(dout * a.astype(jnp.float32), axis=-1)
  delta, weight = dot(out), jnp.exp(near_lse - lse)
  return (dout * weight[..., None]).astype(near.dtype), weight * (dot(near) - delta), delta


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def extend(chunk, q, entries, slots, near, near_lse):
  """Joint attention of the selected entries and a part of which only results are known.

  Args:
    chunk: rows whose gathered keys exist at one time.
    q: [B, T, N, H].
    entries: [B, C, H].
    slots: [B, T, K], −1 for absent.
    near: [B, T, N, H], output of the part.
    near_lse: [B, T, N], f32, its log Σ exp.

  Returns:
    Output in q's dtype; head-summed probabilities f32 [B, T, K], without gradient.
  """
  return _forward(chunk, q, entries, slots, near, near_lse)[0]


def _forward(chunk, q, entries, slots, near, near_lse):
  out, lse, mass = forward(chunk, q, entries, slots, near, near_lse)
  return (out, mass), (q, entries, slots, near, near_lse, out, lse)


def _backward(chunk, saved, cotangents):
  q, entries, slots, near, near_lse, out, lse = saved
  dout = cotangents[0]
  dnear, dnear_lse, delta = part_gradients(near, near_lse, out, lse, dout)
  dq, dentries = gradients(chunk, q.shape[-1] ** -0.5, q, entries, slots, lse, dout, delta)
  return dq.astype(q.dtype), dentries.astype(entries.dtype), None, dnear, dnear_lse


extend.defvjp(_forward, _backward)
