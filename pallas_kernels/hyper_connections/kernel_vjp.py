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
  out = list(kernel.run(x, y, c, fn, scale, base, saves=saves, **dict(how)))
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
      reference.mixing, streams=reference.streams_of(fn), iterations=dict(how)["iterations"],
      eps=dict(how)["eps"],
  )  # fmt: skip
  dz, dscale, dbase = jax.vjp(mixing, z, scale, base)[1](dco)
  pull = jnp.sum(dz * z, axis=1, keepdims=True) * r * r / md
  if y is None:
    x, xo = None, x
  dx, dy, dfn, dc = kernel_gradient.run(x, y, xo, c, fn, dxo, du, dz * r, pull, **dict(how))
  return dx, dy, dc, dfn, dscale, dbase


site.defvjp(_forward, _backward)
