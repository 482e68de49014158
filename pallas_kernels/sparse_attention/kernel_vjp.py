"""Attention of many rows and its gradient, some rows at a time.

The gradient recomputes scores from the output and one log-sum-exp a row and head, so memory grows
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


def _split(a, chunk: int):
  """[B, T, ...] as [T/chunk, B, chunk, ...]."""
  return jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0)


def _join(a):
  a = jnp.moveaxis(a, 0, 1)
  return a.reshape(a.shape[0], -1, *a.shape[3:])


def _keys(entries, window, rows):
  """Keys and masks of a chunk: window latents [B, S, H], gathered entries [B, t, K, H]."""
  slots, first, last = rows
  place = jnp.arange(window.shape[1])
  seen = (first[..., None] <= place) & (place <= last[..., None])
  # What nobody sees may be anything, NaN too.
  used = jnp.any(seen, axis=1)
  near = jnp.where(used[..., None], window, jnp.zeros_like(window))
  present = slots >= 0
  selected = jax.vmap(lambda e, i: e[i])(entries, jnp.maximum(slots, 0))
  selected = jnp.where(present[..., None], selected, jnp.zeros_like(selected))
  return (("bsh", near, seen), ("btsh", selected, present))


def _scores(q, part):
  axes, keys, seen = part
  x = _dot(f"btnh,{axes}->btns", q, keys) * q.shape[-1] ** -0.5
  return jnp.where(seen[:, :, None], x, _HIDDEN)


def _forward(chunk, q, entries, slots, window, first, last, sink):
  def of_chunk(x):
    q, *rows = x
    parts = _keys(entries, window, rows)
    scores = [_scores(q, part) for part in parts]
    highest = [x.max(axis=-1, keepdims=True) for x in scores]
    top = functools.reduce(jnp.maximum, highest, sink[:, None])
    total, out = jnp.exp(sink[:, None] - top), 0.0
    for (axes, keys, _), x in zip(parts, scores):
      p = jnp.exp(x - top)
      total = total + p.sum(axis=-1, keepdims=True)
      out = out + _dot(f"btns,{axes}->btnh", p.astype(q.dtype), keys)
    return (out / total).astype(q.dtype), (top + jnp.log(total))[..., 0]

  pieces = tuple(_split(a, chunk) for a in (q, slots, first, last))
  out, lse = map(_join, jax.lax.map(of_chunk, pieces))
  return out, (q, entries, slots, window, first, last, sink, out, lse)


def _add_sorted(total, slots, values):
  """Adds values [n, H] to total [C, H] at slots; absent ones have slot C."""
  order = jnp.argsort(slots, stable=True)
  count = total.shape[0]
  sums = jax.ops.segment_sum(
      values[order], slots[order], num_segments=count + 1, indices_are_sorted=True
  )
  return total + sums[:count]


def _backward(chunk, saved, dout):
  q, entries, slots, window, first, last, sink, out, lse = saved
  scale, f32 = q.shape[-1] ** -0.5, jnp.float32
  delta = jnp.sum(dout.astype(f32) * out.astype(f32), axis=-1)

  def of_chunk(total, x):
    dentries, dwindow, dsink = total
    q, slots, first, last, dout, lse, delta = x
    dq, dkeys = 0.0, []
    for part in _keys(entries, window, (slots, first, last)):
      axes, keys, _ = part
      p = jnp.exp(_scores(q, part) - lse[..., None])
      dp = _dot(f"btnh,{axes}->btns", dout, keys)
      ds = (p * (dp - delta[..., None])).astype(q.dtype)
      dq = dq + _dot(f"btns,{axes}->btnh", ds, keys) * scale
      dkeys.append(
          _dot(f"btns,btnh->{axes}", ds, q) * scale
          + _dot(f"btns,btnh->{axes}", p.astype(q.dtype), dout)
      )
    dnear, dselected = dkeys
    at = jnp.where(slots < 0, entries.shape[1], slots)
    b, h = at.shape[0], q.shape[-1]
    dentries = jax.vmap(_add_sorted)(dentries, at.reshape(b, -1), dselected.reshape(b, -1, h))
    dsink = dsink - jnp.sum(jnp.exp(sink - lse) * delta, axis=(0, 1))
    return (dentries, dwindow + dnear, dsink), dq.astype(q.dtype)

  pieces = tuple(_split(a, chunk) for a in (q, slots, first, last, dout, lse, delta))
  zeros = lambda a: jnp.zeros(a.shape, f32)
  total, dq = jax.lax.scan(of_chunk, (zeros(entries), zeros(window), zeros(sink)), pieces)
  dentries, dwindow, dsink = total
  dentries, dwindow = dentries.astype(entries.dtype), dwindow.astype(window.dtype)
  return _join(dq), dentries, None, dwindow, None, None, dsink


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(chunk, q, entries, slots, window, first, last, sink):
  return _forward(chunk, q, entries, slots, window, first, last, sink)[0]


_attend.defvjp(_forward, _backward)


def sparse_attention(chunk, q, entries, slots, window, first, last, sink):
  t = q.shape[1]
  chunk = min(chunk, t)
  missing = -t % chunk
  pad = lambda a, value=0: jnp.pad(
      a, ((0, 0), (0, missing), *((0, 0),) * (a.ndim - 2)), constant_values=value
  )
  out = _attend(chunk, pad(q), entries, pad(slots, -1), window, pad(first), pad(last, -1), sink)
  return out[:, :t]
