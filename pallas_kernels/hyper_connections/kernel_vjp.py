"""Gradient of the kernel: one pass over the streams, and XLA for the coefficients."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.hyper_connections import kernel, kernel_gradient, reference


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def site(how, x, y, c, fn, scale, base):
  """(x', u, c') of flat tokens; y and x' are None where the streams stay as they are."""
  return _forward(how, x, y, c, fn, scale, base, saves=False)[0]


def _forward(how, x, y, c, fn, scale, base, saves=True):
  out = kernel.run(x, y, c, (fn, scale, base), saves=saves, **dict(how))
  z = out.pop() if saves else None
  if y is None:
    out = [None, *out]
  return tuple(out), (x, y, c, out[0], z, fn, scale, base)


def _backward(how, saved, cotangents):
  x, y, c, xo, z, fn, scale, base = saved
  dxo, du, dco = cotangents
  n, (tokens, md) = fn.shape[0], x.shape
  r, z = z[n:][0, :tokens, None], z[:n, :tokens].T
  mixing = functools.partial(
      reference.mixing,
      streams=reference.streams_of(fn.shape[0]),
      iterations=dict(how)["iterations"],
      eps=dict(how)["eps"],
  )
  dz, dscale, dbase = jax.vjp(mixing, z, scale, base)[1](dco)
  pull = jnp.sum(dz * z, axis=1, keepdims=True) * r * r / md
  if y is None:
    x, xo = None, x
  dx, dy, dfn, dc = kernel_gradient.run(x, y, xo, c, fn, dxo, du, dz * r, pull, **dict(how))
  return dx, dy, dc, dfn, dscale, dbase


site.defvjp(_forward, _backward)


@jax.custom_vjp
def leave(x, y, c):
  """Streams of flat tokens after the last site."""
  how = dict(iterations=1, eps=0.0, norm_eps=0.0)
  return kernel.run(x, y, c, None, saves=False, **how)[0]


def _leave_backward(saved, dxo):
  x, y, c = saved
  # Nothing is projected: the pass for a whole site, without what a projection sends back.
  tokens, md = x.shape
  fn, du = jnp.zeros((c.shape[1], md)), jnp.zeros_like(y)
  g, pull = jnp.zeros_like(c), jnp.zeros((tokens, 1))
  how = dict(iterations=1, eps=0.0, norm_eps=0.0)
  dx, dy, _, dc = kernel_gradient.run(x, y, x, c, fn, dxo, du, g, pull, **how)
  return dx, dy, dc


leave.defvjp(lambda x, y, c: (leave(x, y, c), (x, y, c)), _leave_backward)
