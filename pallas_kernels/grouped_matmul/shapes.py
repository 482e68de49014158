"""Real shapes of grouped products; see `pallas_kernels.shape`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import op
from pallas_kernels.grouped_matmul.layout import Fp4, Fp8, scale_rows
from pallas_kernels.grouped_matmul.visits import visits
from pallas_kernels.shape import Shape

_EXPERTS, _ACTIVE = 384, 6
_WIDTHS = {"up": (5120, 2304), "down": (2304, 5120)}  # inputs and outputs of w1 and w3, of w2
_BYTES = {"fp4": 0.5 + 1 / 32, "fp8": 1 + 1 / 32, "bf16": 2.0}


def group_sizes(tokens: int, experts: int = _EXPERTS) -> np.ndarray:
  """Rows of every expert with a balanced router: each token picks 6 different ones at random."""
  picks = np.random.default_rng(0).random((tokens, experts)).argpartition(_ACTIVE)[:, :_ACTIVE]
  return np.bincount(picks.ravel(), minlength=experts).astype(np.int32)


def _shape(kind: str, tokens: int, layer: str = "up", transposed: bool = False) -> Shape:
  k, n = _WIDTHS[layer]
  experts = 1 if kind == "fp8" else _EXPERTS
  rows = tokens if kind == "fp8" else tokens * _ACTIVE
  used = 1 if kind == "fp8" else np.count_nonzero(group_sizes(tokens))
  name = f"grouped_matmul_{kind}" + ("_transposed" if transposed else "")
  sizes = dict(kind=kind, experts=experts, rows=rows, tokens=tokens, k=k, n=n)
  return Shape(
      kernel=name,
      per="call",
      units=1,
      hbm_bytes=int(used * k * n * _BYTES[kind]) + 2 * rows * (k + n),
      flops=2 * rows * k * n,
      sizes={**sizes, "transposed": transposed},
      operands=functools.partial(_operands, name, transposed=transposed, **sizes),
      # All FP4 weights decoded are 61 GB of temporaries. Megablox is its own reference.
      reference=kind == "fp8",
  )


def _operands(name, kind, experts, rows, tokens, k, n, transposed):
  if kind == "bf16":
    return {}
  sizes = np.array([rows], np.int32) if experts == 1 else group_sizes(tokens)
  tile = op.sizes_of(rows, _weights(kind, experts, k, n), jnp.bfloat16, transposed).tile
  at = visits(jnp.asarray(sizes), rows, tile)
  values = {i: np.asarray(each) for i, each in enumerate(at)}
  return {name: values, f"transpose_jvp_{name}__": values}


SHAPES = {
    "grouped_fp4_up_16": _shape("fp4", 16),
    "grouped_fp4_up_128": _shape("fp4", 128),
    "grouped_fp4_up_2k": _shape("fp4", 2048),
    "grouped_fp4_down_128": _shape("fp4", 128, "down"),
    "grouped_fp4_down_2k": _shape("fp4", 2048, "down"),
    "grouped_fp4_up_transposed_2k": _shape("fp4", 2048, "up", transposed=True),
    "grouped_fp8_up_128": _shape("fp8", 128),
    "grouped_bf16_up_128": _shape("bf16", 128),
    "grouped_bf16_up_2k": _shape("bf16", 2048),
}


def _weights(kind, experts, k, n):
  struct = jax.ShapeDtypeStruct
  if kind == "bf16":
    return struct((experts, n, k), jnp.bfloat16)
  scales = struct((experts, scale_rows(k), n), jnp.int32)
  if kind == "fp4":
    return Fp4(struct((experts, k // 8, n), jnp.int32), scales)
  return Fp8(struct((experts, k // 4, n), jnp.int32), scales)


def build(name: str, implementation: str = "pallas") -> tuple:
  """The program of a shape: the product, or the gradient of its rows alone."""
  sizes = dict(SHAPES[name].sizes)
  kind, experts, rows, k, n = (sizes[key] for key in ("kind", "experts", "rows", "k", "n"))
  x = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
  y = jax.ShapeDtypeStruct((rows, n), jnp.bfloat16)
  weights = _weights(kind, experts, k, n)
  groups = jax.ShapeDtypeStruct((experts,), jnp.int32)
  product = functools.partial(op.grouped_matmul, implementation=implementation)
  if not sizes["transposed"]:
    return product, (x, weights, groups)

  def gradient(y, weights, groups):
    rows = jnp.zeros(x.shape, x.dtype)
    return jax.vjp(lambda rows: product(rows, weights, groups), rows)[1](y)[0]

  return gradient, (y, weights, groups)
