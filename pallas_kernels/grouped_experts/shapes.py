"""Real shapes of grouped experts; see `pallas_kernels.shape`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_experts import kernel, op
from pallas_kernels.grouped_matmul.shapes import group_sizes
from pallas_kernels.grouped_matmul.visits import visits
from pallas_kernels.shape import Shape

_D, _F = 5120, 2304
_EXPERTS, _ACTIVE, _TOKENS = 128, 6, 2048  # a third of the experts, to fit every generation


def _operands() -> dict:
  """Layer 0, and where rows of a balanced router lie."""
  at = visits(jnp.asarray(group_sizes(_TOKENS, _EXPERTS)), _TOKENS * _ACTIVE, kernel.TILE)
  return {"grouped_experts": {i + 1: np.asarray(each) for i, each in enumerate(at)}}


SHAPES = {
    "grouped_experts_2k": Shape(
        kernel="grouped_experts",
        per="call",
        units=1,
        hbm_bytes=2 * (3 * _EXPERTS * _D * _F + 2 * _TOKENS * _ACTIVE * _D),
        flops=2 * 3 * _TOKENS * _ACTIVE * _D * _F,
        operands=_operands,
        # XLA's `ragged_dot` copies all weights first.
        reference=False,
    ),
}


def build(name: str, implementation: str = "pallas") -> tuple:
  """The program of the shape, over a stack of one layer."""
  del name
  rows, struct = _TOKENS * _ACTIVE, jax.ShapeDtypeStruct
  bank = (struct((1, _EXPERTS, *s), jnp.bfloat16) for s in ((_F, _D), (_D, _F), (_F, _D)))
  integers = struct((_EXPERTS,), jnp.int32), struct((), jnp.int32)
  fn = functools.partial(op.grouped_experts, limit=10.0, implementation=implementation)
  return fn, (struct((rows, _D), jnp.bfloat16), struct((rows,), jnp.float32), *integers, *bank)
