"""Unpacked bf16 weights: JAX's own megablox, which reads each group's matrix in place.

`jax.lax.ragged_dot` copies all weights into another layout on every call when it is compiled for a
TPU: 9.1 GB for one released matrix, which makes 27 GB of traffic where megablox has 9.3.
"""

import importlib

import jax
import jax.numpy as jnp

# The package has a function of this name too, which hides the module.
megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

_TILE = 128  # rows
_WIDEST = 1024


def takes(x, weights) -> bool:
  """Whether the shapes and dtypes are those of megablox; its f32 products round to bf16."""
  return x.dtype == jnp.bfloat16 and not any(n % 128 for n in weights.shape[1:])


def _tiling(m: int, k: int, n: int) -> tuple[int, int, int]:
  widest = lambda size: max(w for w in range(128, _WIDEST + 1, 128) if size % w == 0)
  return min(_TILE, m), widest(k), widest(n)


def grouped_matmul(x, weights, group_sizes):
  """See `op.grouped_matmul`; differentiable in x and weights."""
  rows = x.shape[0]
  return _product(jnp.pad(x, ((0, -rows % _TILE), (0, 0))), weights, group_sizes)[:rows]


def _inside(a, group_sizes):
  """The array with zeros behind the last group: tiles that no group visits are left unwritten."""
  return jnp.where((jnp.arange(a.shape[0]) < jnp.sum(group_sizes))[:, None], a, 0)


@jax.custom_vjp
def _product(x, weights, group_sizes):
  out = megablox.gmm(x, weights, group_sizes, x.dtype, _tiling, transpose_rhs=True)
  return _inside(out, group_sizes)


def _save(x, weights, group_sizes):
  return _product(x, weights, group_sizes), (x, weights, group_sizes)


def _pull(saved, cotangent):
  x, weights, group_sizes = saved
  # Its own gradient mixes dtypes and leaves d weights to be transposed.
  with jax.numpy_dtype_promotion("standard"):
    dx = megablox.gmm(cotangent, weights, group_sizes, x.dtype, _tiling)
    dw = megablox.tgmm(cotangent.T, x, group_sizes, weights.dtype, _tiling)
  return _inside(dx, group_sizes), dw, None


_product.defvjp(_save, _pull)
