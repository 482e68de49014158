"""Real shapes of sparse attention of many rows; see `pallas_kernels.shape`."""

import jax
import jax.numpy as jnp

from pallas_kernels.shape import Shape
from pallas_kernels.sparse_attention import op

_HEADS, _CHANNELS, _CHOSEN, _WINDOW = 64, 512, 512, 128


def _shape(context: int, gradient: bool = False, rows: int = 2048) -> Shape:
  # Every second token closes an entry.
  entries, latent = context // 2, 2 * _CHANNELS
  row, keys = _HEADS * latent, entries + rows + _WINDOW - 1
  return Shape(
      kernel="sparse_attention_gradient" if gradient else "sparse_attention_rows",
      per="row",
      units=rows,
      # q and the output; in the gradient the cotangent and d q too; keys and their gradient.
      hbm_bytes=(rows * row * 5 if gradient else rows * row * 2) + keys * latent * (1 + gradient),
      flops=2 * (7 if gradient else 2) * rows * _HEADS * (_CHOSEN + _WINDOW) * _CHANNELS,
      sizes={"rows": rows, "entries": entries, "gradient": gradient},
      reference=context <= 65_536,
  )


SHAPES = {
    "rows_64k": _shape(65_536),
    "rows_256k": _shape(262_144),
    "rows_1m": _shape(1_048_576),
    "rows_gradient_8k": _shape(8192, gradient=True),
    "rows_gradient_64k": _shape(65_536, gradient=True),
}


def build(name: str, implementation: str = "pallas") -> tuple:
  """The program of a shape: the output, or with the gradient of q, entries, kv and sink."""
  sizes = SHAPES[name].sizes
  t, c = sizes["rows"], sizes["entries"]
  s = t + _WINDOW - 1
  bf16 = lambda *shape: jax.ShapeDtypeStruct((1, *shape), jnp.bfloat16)
  integers = lambda *shape: jax.ShapeDtypeStruct((1, *shape), jnp.int32)
  q, sink = bf16(t, _HEADS, _CHANNELS), jax.ShapeDtypeStruct((_HEADS,), jnp.float32)
  floats = q, bf16(c, _CHANNELS), bf16(s, _CHANNELS), sink
  rest = integers(t, _CHOSEN), *(integers(t),) * 3, *(integers(s),) * 2

  def forward(q, entries, kv, sink, slots, *integers):
    return op.sparse_attention(
        q, entries, slots, kv, *integers, sink, window=_WINDOW, implementation=implementation
    )

  def gradient(q, entries, kv, sink, dout, *integers):
    out, pull = jax.vjp(lambda *a: forward(*a, *integers), q, entries, kv, sink)
    return out, pull(dout)

  if sizes["gradient"]:
    return gradient, (*floats, q, *rest)
  return forward, (*floats, *rest)
