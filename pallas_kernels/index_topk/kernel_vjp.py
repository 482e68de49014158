"""Gradient of the index scores over keys that are not packed, for the index loss."""

import jax
import jax.numpy as jnp

from pallas_kernels.index_topk import reference


@jax.custom_vjp
def index_scores(q, weights, keys):
  return reference.index_scores(q, weights, keys)


def _forward(q, weights, keys):
  return index_scores(q, weights, keys), (q, weights, keys)


def _backward(residuals, d_scores):
  q, weights, keys = residuals
  f32 = jnp.float32
  dots = jnp.einsum("btij,bcj->btic", q, keys, preferred_element_type=f32)
  active = jnp.where(dots > 0, d_scores[:, :, None].astype(f32), 0.0)
  d_weights = jnp.einsum("btic,btic->bti", active, dots)
  d_dots = active * weights.astype(f32)[..., None]
  d_q = jnp.einsum("btic,bcj->btij", d_dots, keys.astype(f32))
  d_keys = jnp.einsum("btic,btij->bcj", d_dots, q.astype(f32))
  return d_q.astype(q.dtype), d_weights.astype(weights.dtype), d_keys.astype(keys.dtype)


index_scores.defvjp(_forward, _backward)
