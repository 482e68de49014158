"""Real shapes of a layer's projections and mixture; see `pallas_kernels.shape`.

A third of the released experts, so that a layer's fit every generation; rows choose 6 at random.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_layer import op
from pallas_kernels.decode_layer.lanes import LANES
from pallas_kernels.grouped_matmul.shapes import group_sizes
from pallas_kernels.quantize.stored import WINDOW
from pallas_kernels.shape import Shape

_D, _L, _H, _N, _F = 5120, 1280, 512, 64, 2304
_RANK, _GROUPS = 1024, 8
_EXPERTS, _ACTIVE = 128, 6


def _shape(part: str, rows: int, values: int, operands=dict) -> Shape:
  """Of `rows` rows that read `values` weights in bf16."""
  return Shape(
      kernel=f"decode_{part}",
      per="call",
      units=1,
      hbm_bytes=2 * values,
      flops=2 * rows * values,
      sizes=dict(part=part, rows=rows),
      operands=operands,
  )


def _found(rows: int) -> dict:
  """Experts in use and, below, their number, as `decode_route` hands them to `decode_experts`."""
  used = np.flatnonzero(group_sizes(rows, _EXPERTS))
  table = np.zeros((8, LANES), np.int32)
  table[0, : used.size], table[1:] = used, used.size
  return {"decode_experts": {0: table.reshape(-1)}}


SHAPES = {}
for _rows in (16, 128):
  _used = int(np.count_nonzero(group_sizes(_rows, _EXPERTS)))
  SHAPES |= {
      f"decode_project_{_rows}": _shape("project", _rows, _D * (_L + _H) + _L * _N * _H),
      f"decode_outputs_{_rows}": _shape("outputs", _rows, _RANK * (_N * _H + _GROUPS * _D)),
      f"decode_mixture_{_rows}": _shape(
          "mixture", _rows, _D * (_EXPERTS + 3 * _F * (1 + _used)),
          operands=functools.partial(_found, _rows),
      ),
  }  # fmt: skip


def build(name: str, implementation: str = "pallas") -> tuple:
  """The program of a shape, over a stack of one layer."""
  part, rows = SHAPES[name].sizes["part"], SHAPES[name].sizes["rows"]
  bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  layer, turn = jax.ShapeDtypeStruct((), jnp.int32), op.Turn(f32(rows, LANES), f32(rows, LANES))
  how = dict(implementation=implementation)
  if part == "project":
    weights = bf16(1, 1, _D), bf16(1, _L, _D), bf16(1, 1, _L), bf16(1, _H, _D), bf16(1, 1, _H)
    weights = *weights, bf16(1, _N * _H, _L), f32(1, 1, _N)
    fn = functools.partial(op.project, eps=1e-20, unit=WINDOW.unit, **how)
    return fn, (bf16(rows, _D), layer, *weights, turn)
  if part == "outputs":
    weights = bf16(1, _GROUPS * _RANK, _N * _H // _GROUPS), bf16(1, _D, _GROUPS * _RANK)
    return functools.partial(op.outputs, **how), (bf16(rows, _N, _H), layer, *weights, turn)
  bank = op.Bank(*(bf16(1, _EXPERTS, *shape) for shape in ((_F, _D), (_D, _F), (_F, _D))))
  shared = op.Bank(bf16(1, _F, _D), bf16(1, _D, _F), bf16(1, _F, _D))
  live = jax.ShapeDtypeStruct((rows,), jnp.int32)
  router = bf16(1, 1, _D), bf16(1, _EXPERTS, _D), f32(1, _EXPERTS, 1)
  fn = functools.partial(op.mixture, active=_ACTIVE, scale=1.5, limit=10.0, eps=1e-20, **how)
  return fn, (bf16(rows, _D), live, layer, *router, bank, shared)
