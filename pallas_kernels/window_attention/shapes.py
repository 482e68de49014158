"""Real shapes of window attention; see `pallas_kernels.shape`."""

import jax
import jax.numpy as jnp

from pallas_kernels.shape import Shape
from pallas_kernels.window_attention import op

_HEADS, _CHANNELS, _WINDOW = 64, 512, 128


def _shape(rows: int, gradient: bool = False, batch: int = 1) -> Shape:
  slot = 2 * _CHANNELS
  row = slot * _HEADS  # of q, of the output, of each of their gradients
  keys = batch * (rows + _WINDOW - 1) * slot
  total, matrices = batch * rows, 7 if gradient else 2
  return Shape(
      kernel="window_attention_gradient" if gradient else "window_attention",
      per="row",
      units=total,
      # The gradient runs forward first; it reads q and the cotangent, and writes d q.
      hbm_bytes=total * row * (5 if gradient else 2) + keys * (3 if gradient else 1),
      flops=2 * matrices * total * _HEADS * _WINDOW * _CHANNELS,
      sizes={"batch": batch, "rows": rows, "gradient": gradient},
      peer="window_decode_128" if rows == 1 else None,
      reference=rows <= 2048,
  )


SHAPES = {
    "window_2k": _shape(2048),
    "window_64k": _shape(65_536),
    "window_decode_128": _shape(1, batch=128),
    "window_gradient_2k": _shape(2048, gradient=True),
    # With 65,536 rows q, output and both gradients exceed the 16 GB of v5e.
    "window_gradient_32k": _shape(32_768, gradient=True),
}


def build(name: str, implementation: str = "pallas") -> tuple:
  """The program of a shape: the output, or with the gradient of q, kv and sink."""
  sizes = SHAPES[name].sizes
  b, t = sizes["batch"], sizes["rows"]
  s = t + _WINDOW - 1
  rows, keys = (jax.ShapeDtypeStruct((b, n), jnp.int32) for n in (t, s))
  q = jax.ShapeDtypeStruct((b, t, _HEADS, _CHANNELS), jnp.bfloat16)
  kv = jax.ShapeDtypeStruct((b, s, _CHANNELS), jnp.bfloat16)
  sink = jax.ShapeDtypeStruct((_HEADS,), jnp.float32)

  def forward(q, kv, sink, *integers):
    return op.window_attention(
        q, kv, *integers, sink, window=_WINDOW, implementation=implementation
    )

  def gradient(q, kv, sink, dout, *integers):
    out, pull = jax.vjp(lambda *a: forward(*a, *integers), q, kv, sink)
    return out, pull(dout)

  integers = rows, rows, rows, keys, keys
  if sizes["gradient"]:
    return gradient, (q, kv, sink, q, *integers)
  return forward, (q, kv, sink, *integers)
