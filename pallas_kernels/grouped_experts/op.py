"""Routed experts over rows sorted by expert, in place in the stack of a run (spec 10)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, dispatch
from pallas_kernels.grouped_experts import kernel, reference
from pallas_kernels.grouped_matmul.visits import visits

AVAILABLE = ("pallas", "reference")
_VMEM_BYTES = 60 << 20


def grouped_experts(
    x: Float[Array, "S D"], scale: Float[Array, " S"], group_sizes: Int[Array, " E"],
    layer: Int[Array, ""], w1: Float[Array, "n E F D"], w2: Float[Array, "n E D F"],
    w3: Float[Array, "n E F D"], *, limit: float, implementation: str | None = None,
) -> Float[Array, "S D"]:  # fmt: skip
  """W2 (scale · swiglu(W1 x, W3 x)) of each row's expert.

  Rows stand in the order of their experts, the first group_sizes[0] rows are expert 0's, and so on;
  rows behind the last group give exactly 0. Sums are f32. Without gradient.

  Args:
    x: float32 or bfloat16; weights are of its dtype.
    scale: f32, applied before w2.
    group_sizes: rows of every expert, 0 included; their sum is at most S.
    layer: which one of the n layers.
    w1: of all layers of a run.
    w2: likewise.
    w3: likewise.
    limit: of `swiglu`: g is clamped from above, u on both sides; 0 is none.
    implementation: see `dispatch.resolve`.

  Raises:
    ValueError: what `refusal` refuses; implementation.
  """
  refused = refusal(x.dtype, x.shape[1], w1.shape[2])
  if dispatch.resolve(implementation, AVAILABLE, refused) == "reference":
    own = (jax.lax.dynamic_index_in_dim(w, layer, keepdims=False) for w in (w1, w2, w3))
    return reference.grouped_experts(x, scale, group_sizes, *own, limit)
  rows = x.shape[0]
  missing = -rows % kernel.TILE
  x, scale = jnp.pad(x, ((0, missing), (0, 0))), jnp.pad(scale, (0, missing))[None]
  at = visits(group_sizes, rows + missing, kernel.TILE)
  most = min(_VMEM_BYTES, block_sizes.current_chip().vmem_bytes)
  layer = jnp.asarray(layer, jnp.int32).reshape(1)
  return kernel.run(layer, at, x, scale, w1, w2, w3, limit, most)[:rows]


def refusal(dtype, *widths: int) -> str | None:
  """Why the kernel does not take these, or None."""
  if dtype not in (jnp.float32, jnp.bfloat16):
    return f"grouped_experts: rows of {dtype}; the kernel takes float32 and bfloat16"
  if any(width % kernel.LANES for width in widths):
    return f"grouped_experts: widths {list(widths)}; the kernel takes multiples of {kernel.LANES}"
  return None
