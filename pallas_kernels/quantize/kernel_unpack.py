"""Stored rows to bf16, one grid step a block of rows."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import (
    kernel_unpack_index,
    kernel_unpack_main,
    kernel_unpack_window,
    stored,
)

_KERNELS = {
    "main": kernel_unpack_main,
    "index": kernel_unpack_index,
    "window": kernel_unpack_window,
}


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def unpack(buffers, which: stored.Stored, arithmetic: str, block: int | None = None):
  """See `op.unpack`; `arithmetic` is one of those in `decode`, `block` rows a grid step."""
  rows = buffers[0].size // (sum(which.words) if which.interleaved else which.words[0])
  module = _KERNELS[which.name]
  # A last block reaches beyond the rows: what it computes there is dropped.
  block = min(rows, block or module.BLOCK)
  block -= block % module.CHUNK if block > module.CHUNK else 0
  spec = lambda shape: pl.BlockSpec(shape, lambda i: (i, 0))
  return pl.pallas_call(
      functools.partial(module.kernel, arithmetic=arithmetic),
      grid=(pl.cdiv(rows, block),),
      in_specs=[spec(shape) for shape in which.shapes(block)],
      out_specs=spec((block, which.width)),
      out_shape=jax.ShapeDtypeStruct((rows, which.width), jnp.bfloat16),
      scratch_shapes=module.scratch(block, arithmetic),
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
      name=f"unpack_{which.name}",
  )(*buffers)
