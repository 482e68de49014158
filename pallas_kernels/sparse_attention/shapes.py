"""Real shapes of sparse attention; see `pallas_kernels.shape`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.shape import Shape
from pallas_kernels.sparse_attention import op, shapes_rows

_HEADS, _WIDTH, _CHOSEN, _WINDOW = 64, 512, 512, 128
_ENTRIES = 1 << 20


def _decode(queries: int, channels: str = "natural") -> Shape:
  # Two rows of 512 bytes an entry, the window of 528 bytes a slot, queries and outputs in bf16.
  caches = _CHOSEN * 1024 + _WINDOW * 528
  return Shape(
      kernel="sparse_attention_decode",
      per="query",
      units=queries,
      hbm_bytes=queries * (caches + 4 * _HEADS * _WIDTH),
      flops=queries * 4 * _HEADS * (_CHOSEN + _WINDOW) * _WIDTH,
      sizes={"queries": queries, "entries": _ENTRIES, "channels": channels},
      peer="sparse_decode",
  )


SHAPES = {f"decode_{queries}": _decode(queries) for queries in (16, 64, 128)}
SHAPES |= {"decode_planes_64": _decode(64, "planes")} | shapes_rows.SHAPES


def build(name: str, implementation: str = "pallas") -> tuple:
  """The program of a shape."""
  if name in shapes_rows.SHAPES:
    return shapes_rows.build(name, implementation)
  sizes = SHAPES[name].sizes
  b, entries = sizes["queries"], sizes["entries"]
  words = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
  arguments = (
      jax.ShapeDtypeStruct((b, _HEADS, _WIDTH), jnp.bfloat16),
      words(entries * 72 // 128, 128),
      words(b, _CHOSEN),
      words(b, _WINDOW, 128),
      words(b, _WINDOW // 32, 128),
      words(b, _WINDOW),
      jax.ShapeDtypeStruct((_HEADS,), np.float32),
  )
  how = dict(channels=sizes["channels"], implementation=implementation)
  return functools.partial(op.sparse_attention_decode, **how), arguments
