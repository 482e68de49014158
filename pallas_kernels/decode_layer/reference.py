"""The definition: one layer's projections and experts of a few rows, weights [out, in]."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_layer.lanes import LANES

ROWS = 32  # whose words of scales fill a row of 128


def _dot(x, weight):
  exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jnp.einsum("si,oi->so", x, weight, precision=exact)


def normed(x, weight, eps: float):
  v = x.astype(jnp.float32)
  scale = lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
  return (weight.astype(jnp.float32) * (v * scale)).astype(x.dtype)


def turned(x, cos, sin, width: int):
  """Every head of `width` channels with its last 128 rotated as neighbouring pairs."""
  heads = x.reshape(x.shape[0], -1, width)
  v = heads[..., -LANES:].astype(jnp.float32)
  other = jnp.flip(v.reshape(*v.shape[:2], -1, 2), -1).reshape(v.shape)
  end = (v * cos[:, None] + other * sin[:, None]).astype(x.dtype)
  return jnp.concatenate([heads[..., :-LANES], end], axis=-1).reshape(x.shape)


def project(u, norm, wq_a, q_norm, wkv, kv_norm, wq_b, sink, cos, sin, eps: float, unit: int):
  x = normed(u, norm, eps)
  kv = normed(_dot(x, wkv), kv_norm, eps)
  c_q, width = normed(_dot(x, wq_a), q_norm, eps), kv.shape[1]
  q = turned(_dot(c_q, wq_b), cos, sin, width).reshape(u.shape[0], -1, width)
  kv = jnp.pad(turned(kv, cos, sin, width), ((0, -len(kv) % unit), (0, 0)))
  return c_q, kv, q, sink


def outputs(x, wo_a, wo_b, cos, sin):
  s, n, h = x.shape
  groups = n * h // wo_a.shape[1]
  x = turned(x.reshape(s, -1), cos, sin, h).reshape(s, groups, -1)
  z = jnp.einsum("sgi,gri->sgr", x, wo_a.reshape(groups, -1, wo_a.shape[1]))
  return _dot(z.reshape(s, -1), wo_b)


def ring(slots, codes, scales, rings, ring_scales):
  b, rows, words = len(slots), rings.shape[1], scales.shape[1] // ROWS
  own = slots[:, None] == jnp.arange(rows)[None]
  rings = jnp.where(own[..., None], codes[:b, None], rings)
  new = scales.reshape(-1, 1, words)[:b]
  old = ring_scales.reshape(b, -1, words)
  return rings, jnp.where(own[..., None], new, old).reshape(ring_scales.shape)


def route(u, norm, gate, bias, active, scale, eps):
  x = normed(u, norm, eps)
  z = _dot(x.astype(jnp.float32), gate.astype(jnp.float32))
  affinity = jnp.sqrt(jnp.maximum(jax.nn.softplus(z), jnp.finfo(jnp.float32).tiny))
  ids = lax.top_k(affinity + bias, active)[1]
  weights = jnp.take_along_axis(affinity, ids, axis=-1)
  if active > 1:
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
  return x, ids, weights * scale


def mixture(u, live, norm, gate, bias, bank, shared, active, scale, limit, eps):
  x, ids, weights = route(u, norm, gate, bias, active, scale, eps)
  chosen = jax.nn.one_hot(ids, gate.shape[0]) * live.astype(jnp.float32)[:, None, None]
  combine = jnp.sum(chosen * weights[..., None], axis=1)

  def expert(w1, w2, w3, weight):
    g, u = _dot(x, w1).astype(jnp.float32), _dot(x, w3).astype(jnp.float32)
    if limit:
      g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
    h = (jax.nn.silu(g) * u * weight[:, None]).astype(x.dtype)
    return _dot(h, w2).astype(jnp.float32)

  routed = jax.vmap(expert, in_axes=(0, 0, 0, 1))(*bank, combine).sum(0)
  return (routed + expert(*shared, jnp.ones(x.shape[0]))).astype(x.dtype)
