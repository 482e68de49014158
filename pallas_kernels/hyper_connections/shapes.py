"""Real shapes of hyper-connections; see `pallas_kernels.shape`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.hyper_connections import op
from pallas_kernels.shape import Shape

_STREAMS, _CHANNELS = 4, 5120
_Z = (2 + _STREAMS) * _STREAMS


def _shape(tokens: int, what: str = "update") -> Shape:
  # The report's (2n + 2)·d: streams in and out, y and u. `enter` writes no streams and reads no y;
  # `leave` writes no u; the gradient runs forward and reads x, x', y and both cotangents to write
  # those of x and y.
  width = {
      "update": 2 * _STREAMS + 2,
      "enter": _STREAMS + 1,
      "leave": 2 * _STREAMS + 1,
      "gradient": 6 * _STREAMS + 5,
  }[what]
  site = 0 if what == "leave" else 4 * _Z * _STREAMS * _CHANNELS
  return Shape(
      kernel=f"hyper_connections_{what}",
      per="token",
      units=tokens,
      hbm_bytes=2 * tokens * width * _CHANNELS + site,
      flops=0 if what == "leave" else 2 * tokens * _Z * _STREAMS * _CHANNELS,
      sizes={"tokens": tokens, "what": what},
      peer=f"hyper_5120_{tokens}" if what == "update" else None,
      reference=tokens <= 2048,
  )


SHAPES = {
    "hyper_connections_16": _shape(16),
    "hyper_connections_128": _shape(128),
    "hyper_connections_2k": _shape(2048),
    "hyper_connections_enter_2k": _shape(2048, "enter"),
    "hyper_connections_leave_16": _shape(16, "leave"),
    "hyper_connections_leave_2k": _shape(2048, "leave"),
    "hyper_connections_gradient_2k": _shape(2048, "gradient"),
}


def build(name: str, implementation: str = "pallas") -> tuple:
  """The program of a shape."""
  sizes = SHAPES[name].sizes
  struct = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  x = struct(1, sizes["tokens"], _STREAMS * _CHANNELS, dtype=jnp.bfloat16)
  y = struct(1, sizes["tokens"], _CHANNELS, dtype=jnp.bfloat16)
  c = struct(1, sizes["tokens"], _Z)
  site = struct(_Z, _STREAMS * _CHANNELS), struct(3), struct(_Z)
  how = dict(iterations=20, eps=1e-6, norm_eps=1e-20, implementation=implementation)
  if sizes["what"] == "leave":
    return functools.partial(op.leave, implementation=implementation), (x, y, c)
  if sizes["what"] == "enter":
    return functools.partial(op.enter, **how), (x, c, *site)
  update = functools.partial(op.update, **how)
  if sizes["what"] == "update":
    return update, (x, y, c, *site)

  def gradient(arguments, cotangents):
    out, pull = jax.vjp(update, *arguments)
    return out, pull(cotangents)

  return gradient, ((x, y, c, *site), (x, y, c))
