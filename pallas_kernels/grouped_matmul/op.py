"""Products of rows grouped by expert, with plain or released weights (spec 10 and 13)."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.block_sizes import current_chip
from pallas_kernels.chips import CHIPS
from pallas_kernels.grouped_matmul import kernel, kernel_vjp, plain, reference
from pallas_kernels.grouped_matmul.layout import GROUP, LANES, UNIT, Fp4, Fp8, scale_rows
from pallas_kernels.grouped_matmul.visits import visits

_AVAILABLE = ("pallas", "reference")
_SPARE_BYTES = 6 << 20
_FEW = 4  # rows of a mean group up to which chunks of 8 rows are faster
_TILES = (768, 512, 384, 256, 128, 64, 32, 16)


def grouped_matmul(
    x: Float[Array, "S K"],
    weights: Float[Array, "E N K"] | Fp4 | Fp8,
    group_sizes: Int[Array, " E"],
    outputs: int | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "S N"]:
  """Row s times the transposed matrix of its group: x_s · W_e^T, the experts' linear layers.

  Rows stand in the order of their groups; the first group_sizes[0] rows are group 0, and so on.
  Rows behind the last group give exactly 0 whatever they hold. Sums are f32, the result x's dtype.

  Plain weights are differentiable: JAX's megablox in bf16 with K and N multiples of 128, else
  `jax.lax.ragged_dot`. Packed ones (`layout.pack_fp4`, `pack_fp8`) are decoded in the kernel, so
  that HBM holds and moves the released bytes alone; the gradient goes to x, from the packed words,
  and the weights are constants. Weights are multiplied as released, all of which bfloat16 holds;
  scale byte 255 is NaN. The kernel may read FP4 weights with a scale byte below 17 as 0.

  Args:
    x: float32 or bfloat16.
    weights: of x's dtype, or packed.
    group_sizes: rows of every group, 0 included; their sum is at most S.
    outputs: N of packed weights, if not a multiple of 128.
    implementation: see `dispatch.resolve`; plain weights that megablox refuses have none.

  Raises:
    ValueError: dtypes or shapes are not those above; implementation; the VMEM budget is too small.
  """
  packed = isinstance(weights, Fp4 | Fp8)
  _check(x, weights, group_sizes, outputs, packed)
  kernels = packed or plain.takes(x, weights)
  choice = dispatch.resolve(implementation, _AVAILABLE if kernels else ("reference",))
  if not packed:
    if choice == "pallas":
      return plain.grouped_matmul(x, weights, group_sizes)
    return reference.ragged(x, jnp.swapaxes(weights, 1, 2), group_sizes)
  width = weights.words.shape[2]
  outputs = width if outputs is None else outputs
  if choice == "reference":
    return reference.grouped_matmul(x, weights, group_sizes, outputs)
  return _kernel(x, weights, group_sizes)[: x.shape[0], :outputs]


def _kernel(x, weights, group_sizes):
  inputs = _inputs(weights)
  rows, k = x.shape
  if rows % kernel.ALIGN or k != inputs:
    x = jnp.pad(x, ((0, -rows % kernel.ALIGN), (0, inputs - k)))
  sizes = [sizes_of(x.shape[0], weights, x.dtype, t) for t in (False, True)]
  at = [visits(group_sizes, x.shape[0], s.tile) for s in sizes]
  return kernel_vjp.product(*sizes, x, weights, *at)


def _inputs(weights) -> int:
  return weights.words.shape[1] * (8 if isinstance(weights, Fp4) else 4)


def sizes_of(rows: int, weights, dtype, transposed: bool) -> kernel.Sizes:
  """Blocks that fit half of the smallest VMEM, so that tiles are the same on every chip.

  A chunk is about twice the mean group: longer ones multiply rows of others, shorter ones decode
  the same words again.
  """
  experts, _, n = weights.words.shape
  k = _inputs(weights)
  chip = current_chip()
  item = jnp.dtype(dtype).itemsize
  halves = chip.cores if not transposed and n % (chip.cores * LANES) == 0 else 1
  per_core = n // halves
  width = next(w for w in (256, 128) if per_core % w == 0)
  step = max(s for s in range(width, per_core + 1, width) if per_core % s == 0 and s <= 1280)
  word_bytes = 4 * (weights.words.shape[1] + weights.scales.shape[1])
  fixed = step * (2 * word_bytes + k // GROUP * 4) + _SPARE_BYTES

  def needed(tile):
    per_row = 2 * item * (k + n) + (4 * k if transposed else 0)
    return tile * per_row + fixed

  budget = min(each.vmem_bytes for each in CHIPS.values()) // 2
  tiles = [tile for tile in _TILES if tile <= rows and needed(tile) <= budget]
  if not tiles:
    raise ValueError(
        f"grouped_matmul: 16 rows of {k} inputs and {n} outputs with the words of {step}"
        f" outputs need {needed(16)} bytes of VMEM; the budget is {budget}"
    )
  together = step // width
  unroll = next(u for u in (3, 5, 2, 1) if together % u == 0)
  packed = chip.bf16_vectors and item == 2
  mean = max(1, 2 * rows // experts)
  chunk = min(256, tiles[0] & -tiles[0], max(kernel.ALIGN, 1 << math.ceil(math.log2(mean))))
  few = isinstance(weights, Fp4) and item == 2 and not transposed and rows <= _FEW * experts
  return kernel.Sizes(
      tiles[0], chunk, halves, step, width, unroll, few, packed, needed(tiles[0]) + budget // 2
  )


def _check(x, weights, group_sizes, outputs, packed):
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"x has dtype {x.dtype}: allowed are float32 and bfloat16")
  if group_sizes.dtype != jnp.int32:
    raise ValueError(f"group_sizes has dtype {group_sizes.dtype}: allowed is int32")
  if x.shape[0] < 1:
    raise ValueError("x has no rows: at least 1 is needed")
  if not packed:
    if weights.dtype != x.dtype or weights.shape[2] != x.shape[1]:
      raise ValueError(
          f"weights are {weights.dtype}{list(weights.shape)}: with x {x.dtype}{list(x.shape)} they"
          f" must be {x.dtype}[E, N, {x.shape[1]}]"
      )
    count = weights.shape[0]
  else:
    count, words, width = weights.words.shape
    inputs = _inputs(weights)
    if inputs % UNIT or width % LANES or weights.scales.shape != (count, scale_rows(inputs), width):
      raise ValueError(
          f"words have shape {[count, words, width]} and scales {list(weights.scales.shape)}:"
          " allowed is what layout.pack_fp4 or pack_fp8 returns, with one expert axis"
      )
    if not inputs - UNIT < x.shape[1] <= inputs:
      raise ValueError(f"x has {x.shape[1]} inputs: the words hold {inputs}, padded to {UNIT}")
    if outputs is not None and not width - LANES < outputs <= width:
      raise ValueError(f"outputs={outputs}: the words hold {width}, padded to {LANES}")
  if group_sizes.shape != (count,):
    raise ValueError(f"group_sizes has shape {group_sizes.shape}: {count} experts need ({count},)")
