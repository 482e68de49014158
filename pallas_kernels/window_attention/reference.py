"""Definition of window attention; see `op`."""

import jax.numpy as jnp


def seen(positions, floors, segments, key_positions, key_segments, window):
  """[B, T, S]: same segment, position in [max(floor, i − window + 1), i]."""
  at, key = positions[..., None], key_positions[:, None]
  same = (segments[..., None] == key_segments[:, None]) & (key_segments > 0)[:, None]
  return same & (jnp.maximum(floors[..., None], at - window + 1) <= key) & (key <= at)


def attend(q, kv, positions, floors, segments, key_positions, key_segments, sink, *, window):
  f32 = jnp.float32
  kv = jnp.where((key_segments > 0)[..., None], kv, jnp.zeros((), kv.dtype))
  dot = lambda s, a, b: jnp.einsum(s, a, b, precision="highest", preferred_element_type=f32)
  x = dot("btnh,bsh->btns", q, kv) * q.shape[-1] ** -0.5
  mask = seen(positions, floors, segments, key_positions, key_segments, window)
  x = jnp.where(mask[:, :, None], x, -1e30)
  top = jnp.maximum(x.max(-1), sink)
  p = jnp.exp(x - top[..., None])  # exactly 0 where masked: top is at least the sink
  total = p.sum(-1) + jnp.exp(sink - top)
  out = dot("btns,bsh->btnh", p.astype(q.dtype), kv) / total[..., None]
  return out.astype(q.dtype), top + jnp.log(total)
