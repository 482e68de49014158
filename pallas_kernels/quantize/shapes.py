"""Real shapes of packing and unpacking; see `pallas_kernels.shape`."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantize import op
from pallas_kernels.quantize.stored import INDEX, LAYOUTS, MAIN, WINDOW, Stored
from pallas_kernels.shape import Shape


def _shape(kernel: str, stored: Stored, rows: int, pairs: int = 0) -> Shape:
  words = sum(stored.words)
  return Shape(
      kernel=kernel,
      per="entry",
      units=rows,
      hbm_bytes=rows * (4 * words + 2 * stored.width + 8 * pairs),
      sizes={"layout": stored.name, "rows": rows, "pairs": pairs},
  )


_MILLION = 1 << 20
_PAIRS = 32  # Of channels that are rotated.

SHAPES = {
    "unpack_main_1m": _shape("unpack_main", MAIN, _MILLION),
    "unpack_index_1m": _shape("unpack_index", INDEX, _MILLION),
    "unpack_window_128": _shape("unpack_window", WINDOW, 128),
    "pack_main_2k": _shape("pack_main", MAIN, 2048),
    "pack_main_1m": _shape("pack_main", MAIN, _MILLION),
    "pack_index_2k": _shape("pack_index", INDEX, 2048),
    "pack_index_1m": _shape("pack_index", INDEX, _MILLION),
    "pack_window_128": _shape("pack_window", WINDOW, 128),
    "rotate_pack_main_2k": _shape("rotate_pack_main", MAIN, 2048, _PAIRS),
    "rotate_pack_index_2k": _shape("rotate_pack_index", INDEX, 2048, _PAIRS),
    "rotate_pack_window_128": _shape("rotate_pack_window", WINDOW, 128, _PAIRS),
}


def build(name: str, implementation: str = "pallas") -> tuple:
  """The program of a shape: rows to stored arrays, or back."""
  shape = SHAPES[name]
  stored, rows = LAYOUTS[shape.sizes["layout"]], shape.sizes["rows"]
  if shape.kernel.startswith("unpack"):
    arguments = [jax.ShapeDtypeStruct(each, jnp.int32) for each in stored.shapes(rows)]
    unpack = lambda *buffers: op.unpack(buffers, stored, implementation=implementation)
    return unpack, tuple(arguments)
  x = jax.ShapeDtypeStruct((rows, stored.width), jnp.bfloat16)
  if not shape.sizes["pairs"]:
    return (lambda x: op.pack(x, stored, implementation=implementation)), (x,)
  table = jax.ShapeDtypeStruct((rows, shape.sizes["pairs"]), jnp.float32)

  def rotate_and_pack(x, cos, sin):
    return op.pack(x, stored, rotation=(cos, sin), implementation=implementation)

  return rotate_and_pack, (x, table, table)
