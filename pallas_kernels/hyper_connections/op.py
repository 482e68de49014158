"""Hyper-connections in one pass over the residual streams (report 2.4.1, spec 9).

Streams are flat, [B, T, M·D]: stream k is channels [k·D, (k + 1)·D), as the projection reads them.
A separate stream axis would be tiled, and every call would copy the streams.

Coefficients are flat, [B, T, Z] f32 with Z = (2 + M)·M: pre [M], post [M] and mix [M, M] by rows.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.hyper_connections import kernel_vjp, reference
from pallas_kernels.hyper_connections.coefficients import LANES

AVAILABLE = ("pallas", "reference")


def update(
    x: Float[Array, "B T MD"], y: Float[Array, "B T D"], c: Float[Array, "B T Z"],
    fn: Float[Array, "Z MD"], scale: Float[Array, "3"], base: Float[Array, " Z"], *,
    iterations: int, eps: float, norm_eps: float, implementation: str | None = None,
) -> tuple[Float[Array, "B T MD"], Float[Array, "B T D"], Float[Array, "B T Z"]]:  # fmt: skip
  """Writes a sub-layer's output into the streams and prepares the next sub-layer's.

    x'_k = post_k·y + Σ_j mix[j, k]·x_j     rounded to x's dtype
    u = Σ_k pre_k·x'_k                      input of the next sub-layer, before its norm
    c' = coefficients(fn·x' / rms(x'))      of the next site: Sinkhorn, `iterations` in all

  Each stream is read once and written once. The gradient goes to all six arrays. The kernel keeps
  sums in f32; it projects the rounded x' and collapses the unrounded one. A NaN in one token
  reaches the other tokens of its aligned 16.

  Args:
    x: streams, float32 or bfloat16.
    y: of x's dtype.
    c: f32 coefficients of this site, from the `update` or `enter` before.
    fn: projection of the next site; f32, like the two below.
    scale: of its logits for pre, post and mix.
    base: added to them.
    iterations: Sinkhorn rounds including the first softmax, at least 1.
    eps: added to pre, to the softmax and to every sum that divides.
    norm_eps: added to the mean square.
    implementation: see `dispatch.resolve`. The kernel takes 2 or 4 streams of a multiple of 128
      channels.

  Raises:
    ValueError: shapes or dtypes are not those above.
  """
  how = dict(iterations=iterations, eps=eps, norm_eps=norm_eps)
  _check(x, y, c, fn, scale, base, iterations)
  if _resolve(implementation, x, fn.shape[0]) == "reference":
    return reference.update(x, y, c, fn, scale, base, **how)
  return _kernel(x, y, c, fn, scale, base, how)


def enter(
    x: Float[Array, "B T MD"], c: Float[Array, "B T Z"],
    fn: Float[Array, "Z MD"], scale: Float[Array, "3"], base: Float[Array, " Z"], *,
    iterations: int, eps: float, norm_eps: float, implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T Z"]]:  # fmt: skip
  """`update` for streams that stay as they are: the first site, and the one after an Engram.

  Of `c` only pre is read. Arguments and errors are those of `update`.

  Returns:
    u and c'.
  """
  how = dict(iterations=iterations, eps=eps, norm_eps=norm_eps)
  _check(x, None, c, fn, scale, base, iterations)
  if _resolve(implementation, x, fn.shape[0]) == "reference":
    return reference.enter(x, c, fn, scale, base, **how)
  return _kernel(x, None, c, fn, scale, base, how)[1:]


def leave(
    x: Float[Array, "B T MD"], y: Float[Array, "B T D"], c: Float[Array, "B T Z"], *,
    implementation: str | None = None,
) -> Float[Array, "B T MD"]:  # fmt: skip
  """`update` where no site follows: x' alone. Arguments and errors are those of `update`."""
  z = c.shape[2]
  m = reference.streams_of(z)
  _check_arrays(x, m, c=(c, (*x.shape[:2], (2 + m) * m), jnp.float32), y=_output(x, y, m))
  if _resolve(implementation, x, z) == "reference":
    return reference.leave(x, y, c)

  def run(x, y, c):
    return kernel_vjp.leave(*map(_flat, (x, y, c))).reshape(x.shape)

  return dispatch.over_lines(run, x, y, c)


def refusal(streams: int, width: int) -> str | None:
  """Why the kernel does not take `width` channels of all streams together, or None."""
  if streams in (2, 4) and width % (streams * LANES) == 0:
    return None
  return (
      f"x has {streams} streams of {width // streams} channels: the kernel takes 2 or 4 streams of "
      f"a multiple of {LANES} channels"
  )


def _resolve(implementation, x, z: int):
  refused = refusal(reference.streams_of(z), x.shape[2])
  return dispatch.resolve(implementation, AVAILABLE, refused)


def _flat(a):
  return None if a is None else a.reshape(-1, a.shape[2])


def _kernel(x, y, c, fn, scale, base, how):
  def run(x, y, c, *site):
    out = kernel_vjp.site(tuple(how.items()), *map(_flat, (x, y, c)), *site)
    return tuple(None if a is None else a.reshape(*x.shape[:2], -1) for a in out)

  return dispatch.over_lines(run, x, y, c, fn, scale, base, shared={3, 4, 5})


def _output(x, y, m: int):
  return y, (*x.shape[:2], x.shape[2] // m), x.dtype


def _check(x, y, c, fn, scale, base, iterations):
  z = fn.shape[0]
  m, expected = reference.streams_of(z), {
      "fn": (fn, (z, x.shape[2]), jnp.float32),
      "c": (c, (*x.shape[:2], z), jnp.float32),
      "scale": (scale, (3,), jnp.float32),
      "base": (base, (z,), jnp.float32),
  }
  if y is not None:
    expected["y"] = _output(x, y, m)
  _check_arrays(x, m, **expected)
  if iterations < 1:
    raise ValueError(f"iterations={iterations}: at least 1, the softmax and its column sums")


def _check_arrays(x, m: int, **expected):
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"x has dtype {x.dtype}: allowed are float32 and bfloat16")
  for name, (array, shape, dtype) in expected.items():
    if array.shape != shape or array.dtype != dtype:
      raise ValueError(
          f"{name} is {array.dtype}{list(array.shape)}: with x {list(x.shape)} of {m} streams it "
          f"must be {jnp.dtype(dtype).name}{list(shape)}"
      )
  if x.shape[2] % m:
    raise ValueError(f"x has {x.shape[2]} channels: they must divide into {m} streams")
