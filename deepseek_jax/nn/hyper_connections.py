"""Single-pass manifold-constrained hyper-connections (spec 9): M residual streams and their mixing.

Every collapse uses the coefficients of the sub-layer before; `post` and `mix` are the current ones.

The streams travel flat, [B, T, M·D], and a site's coefficients flat, [B, T, (2 + M)·M]: so does the
kernel take them, and on a TPU an axis of M = 4 streams would be padded to eight.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.hyper_connections import op


class Coefficients(NamedTuple):
  """f32. `pre` collapses the streams for the next sub-layer, `post` and `mix` write this one's."""

  pre: Float[Array, "B T M"]
  post: Float[Array, "B T M"]
  mix: Float[Array, "B T M M"]

  @classmethod
  def of(cls, flat: Float[Array, "B T Z"], streams: int) -> "Coefficients":
    mix = flat[..., 2 * streams :].reshape(*flat.shape[:2], streams, streams)
    return cls(flat[..., :streams], flat[..., streams : 2 * streams], mix)

  @property
  def flat(self) -> Float[Array, "B T Z"]:
    return jnp.concatenate([self.pre, self.post, self.mix.reshape(*self.pre.shape[:2], -1)], -1)


class Site(NamedTuple):
  """Parameters of one site, f32; a run of layers stacks them."""

  fn: Float[Array, "*n Z MD"]
  scale: Float[Array, "*n 3"]
  base: Float[Array, "*n Z"]


class Stream(NamedTuple):
  """The residual state between sub-layers.

  Attributes:
    x: M streams, flat.
    pre: coefficients that collapse them for the sub-layer that comes (f32).
    u: Σ_k pre_k X_k: what that sub-layer reads, before its norm.
    c: flat coefficients of the site that writes its result (f32).
  """

  x: Float[Array, "B T MD"]
  pre: Float[Array, "B T M"]
  u: Float[Array, "B T D"]
  c: Float[Array, "B T Z"]


def sinkhorn(
    logits: Float[Array, "M M ..."], iterations: int, eps: float
) -> Float[Array, "M M ..."]:
  """Softmax over the second axis, then alternating column and row normalisation, columns last.

  Matrices lie on the leading axes so that tokens fill the vector lanes. With large logits twenty
  rounds do not converge: the result is not doubly stochastic, as released.
  """
  m = jax.nn.softmax(logits, axis=1) + eps
  m = m / (m.sum(0, keepdims=True) + eps)

  def round_(m, _):
    m = m / (m.sum(1, keepdims=True) + eps)
    return m / (m.sum(0, keepdims=True) + eps), None

  return jax.lax.scan(round_, m, None, length=iterations - 1)[0]


def mixing(
    z: Float[Array, "B T Z"], scale: Float[Array, "3"], base: Float[Array, " Z"], *,
    streams: int, iterations: int, eps: float,
) -> Coefficients:  # fmt: skip
  """Coefficients from the projected logits z (Z = (2 + M)·M)."""
  m = streams
  z = jnp.moveaxis(z, -1, 0)
  at = base[:, None, None]
  pre = jax.nn.sigmoid(z[:m] * scale[0] + at[:m]) + eps
  post = 2 * jax.nn.sigmoid(z[m : 2 * m] * scale[1] + at[m : 2 * m])
  mix = (z[2 * m :] * scale[2] + at[2 * m :]).reshape(m, m, *z.shape[1:])
  mix = sinkhorn(mix, iterations, eps)
  return Coefficients(
      jnp.moveaxis(pre, 0, -1), jnp.moveaxis(post, 0, -1), jnp.moveaxis(mix, (0, 1), (-2, -1))
  )


def coefficients(
    x: Float[Array, "B T M D"], fn: Float[Array, "Z MD"], scale: Float[Array, "3"],
    base: Float[Array, " Z"], *, iterations: int, eps: float, norm_eps: float,
) -> Coefficients:  # fmt: skip
  """Coefficients of one site: projection of all streams together, then one RMS over them (f32)."""
  v = x.astype(jnp.float32).reshape(*x.shape[:2], -1)
  r = jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + norm_eps)
  z = jnp.einsum("btk,zk->btz", v, fn) * r
  return mixing(z, scale, base, streams=x.shape[2], iterations=iterations, eps=eps)


@jax.custom_vjp
def collapse(x: Float[Array, "B T M D"], pre: Float[Array, "B T M"]) -> Float[Array, "B T D"]:
  """Σ_c pre_c X_c in f32, in the streams' dtype."""
  total = sum(pre[..., c, None] * x[..., c, :].astype(jnp.float32) for c in range(x.shape[2]))
  return total.astype(x.dtype)


@jax.custom_vjp
def expand(
    y: Float[Array, "B T D"], x: Float[Array, "B T M D"], c: Coefficients
) -> Float[Array, "B T M D"]:
  """X_k ← post_k y + Σ_j mix[j, k] X_j: the mix is summed over its first index."""
  total = c.post[..., None] * y.astype(jnp.float32)[..., None, :]
  return (total + _mixed(c.mix, x)).astype(x.dtype)


def _mixed(mix: Float[Array, "B T M M"], x: Float[Array, "B T M D"]) -> Float[Array, "B T M D"]:
  """Σ_j mix[j, k] X_j in f32; as sums, because a matrix product of 4 × 4 a token is slower."""
  parts = (mix[..., j, :, None] * x[..., j, None, :].astype(jnp.float32) for j in range(x.shape[2]))
  return sum(parts)


# Own gradients, because those of autodiff keep every broadcast product of the sums above: four
# copies of the streams a site.


def _collapse_forward(x, pre):
  return collapse(x, pre), (x, pre)


def _collapse_backward(saved, d):
  x, pre = saved
  d = d.astype(jnp.float32)
  dpre = jnp.einsum("btmd,btd->btm", x.astype(jnp.float32), d)
  return (pre[..., None] * d[..., None, :]).astype(x.dtype), dpre


def _expand_forward(y, x, c):
  return expand(y, x, c), (y, x, c)


def _expand_backward(saved, d):
  y, x, c = saved
  d = d.astype(jnp.float32)
  # dy and dx from one product, so that dy exists: XLA would fuse the sum that makes it into the
  # strided transpose which the next weight gradient needs.
  weights = jnp.concatenate([c.post[..., None, :], c.mix], axis=-2)
  both = jnp.einsum("btjk,btkd->btjd", weights, d)
  dpost = jnp.einsum("btd,btkd->btk", y.astype(jnp.float32), d)
  dmix = jnp.einsum("btjd,btkd->btjk", x.astype(jnp.float32), d)
  dc = Coefficients(jnp.zeros_like(c.pre), dpost, dmix)
  return both[..., 0, :].astype(y.dtype), both[..., 1:, :].astype(x.dtype), dc


collapse.defvjp(_collapse_forward, _collapse_backward)
expand.defvjp(_expand_forward, _expand_backward)


@dataclasses.dataclass(frozen=True)
class HyperConnections:
  """What all sites of a model have in common.

  Attributes:
    streams: M.
    iterations: Sinkhorn rounds, the softmax included.
    eps: of the coefficients.
    norm_eps: of the RMS over all streams.
    implementation: see `pallas_kernels.dispatch.resolve`.
  """

  streams: int
  iterations: int
  eps: float
  norm_eps: float
  implementation: str | None = None

  @property
  def _how(self) -> dict:
    return dict(iterations=self.iterations, eps=self.eps, norm_eps=self.norm_eps)

  def _kernel(self, width: int) -> bool:
    refusal = op.refusal(self.streams, width)
    return dispatch.resolve(self.implementation, op.AVAILABLE, refusal) == "pallas"

  def _apart(self, x: Float[Array, "B T MD"]) -> Float[Array, "B T M D"]:
    return x.reshape(*x.shape[:2], self.streams, -1)

  def enter(self, x: Float[Array, "B T MD"], pre: Float[Array, "B T M"], site: Site) -> Stream:
    """Streams that no update prepared: the first site, and the one after an Engram."""
    if self._kernel(x.shape[-1]):
      c = jnp.pad(pre, ((0, 0), (0, 0), (0, site.fn.shape[0] - self.streams)))
      return Stream(x, pre, *op.enter(x, c, *site, implementation="pallas", **self._how))
    c = coefficients(self._apart(x), *site, **self._how)
    return Stream(x, pre, collapse(self._apart(x), pre), c.flat)

  def update(self, s: Stream, y: Float[Array, "B T D"], site: Site) -> Stream:
    """Writes a sub-layer's result and prepares the one that `site` belongs to."""
    pre = s.c[..., : self.streams]
    if self._kernel(s.x.shape[-1]):
      x, u, c = op.update(s.x, y, s.c, *site, implementation="pallas", **self._how)
      return Stream(x, pre, u, c)
    x = expand(y, self._apart(s.x), Coefficients.of(s.c, self.streams)).reshape(s.x.shape)
    return self.enter(x, pre, site)
