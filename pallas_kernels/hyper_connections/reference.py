"""Definition of one hyper-connection site; see `op`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def sinkhorn(logits: Float[Array, "M M *n"], iterations: int, eps: float) -> Float[Array, "M M *n"]:
  """Softmax over the second axis, then alternating column and row normalisation, columns last."""
  m = jax.nn.softmax(logits, axis=1) + eps
  m = m / (m.sum(0, keepdims=True) + eps)

  def round_(m, _):
    m = m / (m.sum(1, keepdims=True) + eps)
    return m / (m.sum(0, keepdims=True) + eps), None

  return jax.lax.scan(round_, m, None, length=iterations - 1)[0]


def mixing(z, scale, base, *, streams, iterations, eps):
  """Coefficients from projected logits [..., Z]; tokens on the last axes, where lanes are."""
  m = streams
  z, at = jnp.moveaxis(z, -1, 0), base.reshape(-1, *(1,) * (z.ndim - 1))
  pre = jax.nn.sigmoid(z[:m] * scale[0] + at[:m]) + eps
  post = 2 * jax.nn.sigmoid(z[m : 2 * m] * scale[1] + at[m : 2 * m])
  mix = (z[2 * m :] * scale[2] + at[2 * m :]).reshape(m, m, *z.shape[1:])
  mix = sinkhorn(mix, iterations, eps).reshape(m * m, *z.shape[1:])
  return jnp.moveaxis(jnp.concatenate([pre, post, mix]), 0, -1)


def project(x, fn, norm_eps):
  v = x.astype(jnp.float32)
  r = jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + norm_eps)
  return jnp.einsum("btk,zk->btz", v, fn, precision="highest") * r


def collapse(x, c, streams):
  v = x.astype(jnp.float32).reshape(*x.shape[:2], streams, -1)
  return sum(c[..., k, None] * v[..., k, :] for k in range(streams)).astype(x.dtype)


def expand(x, y, c, streams):
  m, f32 = streams, jnp.float32
  v = x.astype(f32).reshape(*x.shape[:2], m, -1)
  post, mix = c[..., m : 2 * m], c[..., 2 * m :].reshape(*c.shape[:2], m, m)
  total = post[..., None] * y.astype(f32)[..., None, :]
  total = total + sum(mix[..., j, :, None] * v[..., j, None, :] for j in range(m))
  return total.astype(x.dtype).reshape(x.shape)


def enter(x, c, fn, scale, base, *, iterations, eps, norm_eps):
  m = streams_of(fn.shape[0])
  z = project(x, fn, norm_eps)
  how = dict(streams=m, iterations=iterations, eps=eps)
  return collapse(x, c, m), mixing(z, scale, base, **how)


def update(x, y, c, fn, scale, base, **how):
  x = expand(x, y, c, streams_of(fn.shape[0]))
  return x, *enter(x, c, fn, scale, base, **how)


def leave(x, y, c):
  return expand(x, y, c, streams_of(c.shape[2]))


def streams_of(z: int) -> int:
  """M, from Z = (2 + M)·M."""
  return round((1 + z) ** 0.5) - 1
