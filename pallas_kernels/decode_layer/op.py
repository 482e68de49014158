"""A layer's projections and experts of one row a request (report 2.3; spec 3, 9 and 10).

Weights come as the stacks of a run of equal layers, [n, ...], with the number of a layer: a kernel
reads that layer's in place, where a slice in front of it would be a copy. Vectors have an axis of 1
where a block of a layer needs it. Without gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, dispatch
from pallas_kernels.decode_layer import kernel_experts, kernel_projections, reference
from pallas_kernels.decode_layer.lanes import LANES

AVAILABLE = ("pallas", "reference")
MOST_ROWS = 128
_VMEM_BYTES = 60 << 20


class Turn(NamedTuple):
  """Of `lanes.rotation`."""

  cos: Float[Array, "S 128"]
  sin: Float[Array, "S 128"]


class Bank(NamedTuple):
  """Weights of routed experts [n, E, ...] or of the shared one [n, ...]."""

  w1: Float[Array, "n *E F D"]
  w2: Float[Array, "n *E D F"]
  w3: Float[Array, "n *E F D"]


class Projected(NamedTuple):
  """What attention reads of rows: query latents, window latents, rotated queries, the sink."""

  c_q: Float[Array, "S L"]
  kv: Float[Array, "S1 H"]
  q: Float[Array, "S N H"]
  sink: Float[Array, " N"]


def project(
    u: Float[Array, "S D"], layer: Int[Array, ""], norm: Float[Array, "n 1 D"],
    wq_a: Float[Array, "n L D"], q_norm: Float[Array, "n 1 L"], wkv: Float[Array, "n H D"],
    kv_norm: Float[Array, "n 1 H"], wq_b: Float[Array, "n NH L"], sink: Float[Array, "n 1 N"],
    turn: Turn, *, eps: float, unit: int = 1, implementation: str | None = None,
) -> Projected:  # fmt: skip
  """Everything before attention: norms, products, rotations of queries and window latents.

  Args:
    u: rows as they enter the sub-layer, float32 or bfloat16; weights are of its dtype.
    layer: which one of the n.
    norm: of u.
    wq_a: to the query latent.
    q_norm: of the query latent.
    wkv: to the window latent.
    kv_norm: of the window latent.
    wq_b: to the queries.
    sink: f32 logits, passed on: a kernel that takes a layer's slice would wait for a copy.
    turn: rotation of the rows.
    eps: of the norms.
    unit: window latents are padded with rows of 0 to a multiple of it.
    implementation: see `dispatch.resolve`.

  Raises:
    ValueError: what `refusal` refuses; implementation.
  """
  refused = refusal(u.shape[0], u.dtype, wq_a.shape[1], wkv.shape[1], u.shape[1])
  weights = norm, wq_a, q_norm, wkv, kv_norm, wq_b, sink
  if dispatch.resolve(implementation, AVAILABLE, refused) == "reference":
    return Projected(*reference.project(u, *_flat(_of(layer, weights)), *turn, eps, unit))
  args = *weights, *turn, eps, unit, _vmem_bytes()
  *found, sink = kernel_projections.project(_prefetched(layer), u, *args)
  return Projected(*found, sink[0])


def outputs(
    x: Float[Array, "S N H"], layer: Int[Array, ""], wo_a: Float[Array, "n GR I"],
    wo_b: Float[Array, "n D GR"], turn: Turn, *, implementation: str | None = None,
) -> Float[Array, "S D"]:  # fmt: skip
  """Everything behind attention: heads turned back, projected in groups of I channels, joined.

  `turn` is an inverse rotation. The rest is that of `project`.
  """
  s, n, h = x.shape
  rank = wo_a.shape[1] * wo_a.shape[2] // (n * h)
  refused = refusal(s, x.dtype, rank, h, wo_b.shape[1])
  if dispatch.resolve(implementation, AVAILABLE, refused) == "reference":
    return reference.outputs(x, *_of(layer, (wo_a, wo_b)), *turn)
  return kernel_projections.outputs(_prefetched(layer), x, wo_a, wo_b, *turn, _vmem_bytes())


def ring(
    slots: Int[Array, " B"], layer: Int[Array, ""], codes: Int[Array, "S1 128"],
    scales: Int[Array, "R 128"], rings: Int[Array, "n B W 128"],
    ring_scales: Int[Array, "n B R1 128"], *, implementation: str | None = None,
) -> tuple[Int[Array, "B W 128"], Int[Array, "B R1 128"]]:  # fmt: skip
  """The window rings of a layer with a new row of each line.

  Args:
    slots: of the rows, in their rings; a slot behind the ring writes nothing.
    layer: which one of the n.
    codes: rows in the stored layout `quantize.stored.WINDOW`, S1 ≥ B of them.
    scales: theirs.
    rings: codes of the rings in the same layout, a row of 128 words a slot.
    ring_scales: theirs, four words a slot.
    implementation: see `dispatch.resolve`.

  Raises:
    ValueError: implementation.
  """
  if dispatch.resolve(implementation, AVAILABLE) == "reference":
    return reference.ring(slots, codes, scales, *_of(layer, (rings, ring_scales)))
  args = slots, codes, scales, rings, ring_scales, _vmem_bytes()
  return kernel_projections.ring(_prefetched(layer), *args)


class Route(NamedTuple):
  """Normed rows; experts (E for none) and f32 weights of choice k of row s at [k, s]."""

  x: Float[Array, "S D"]
  ids: Int[Array, "X S"]
  weights: Float[Array, "X S"]


def route(
    u: Float[Array, "S D"], live: Int[Array, " S"], layer: Int[Array, ""],
    norm: Float[Array, "n 1 D"], gate: Float[Array, "n E D"], bias: Float[Array, "n E 1"], *,
    active: int, scale: float, eps: float, implementation: str | None = None,
) -> Route:  # fmt: skip
  """Norm and router of any number of rows in whole hundred-and-twenty-eights; see `mixture`."""
  refused = route_refusal(u.shape, u.dtype, gate.shape[1], active)
  if dispatch.resolve(implementation, AVAILABLE, refused) == "reference":
    args = _flat(_of(layer, (norm, gate, bias)))
    x, ids, weights = reference.route(u, *args, active, scale, eps)
    return Route(x, jnp.where(live != 0, ids.T, gate.shape[1]), weights.T)
  args = norm, gate, bias, live[None].astype(jnp.int32), active, scale, eps, _vmem_bytes()
  x, ids, weights = kernel_experts.route(_prefetched(layer), u, *args, listed=False)
  return Route(x, ids[:active], weights[:active])


def mixture(
    u: Float[Array, "S D"], live: Int[Array, " S"], layer: Int[Array, ""],
    norm: Float[Array, "n 1 D"], gate: Float[Array, "n E D"], bias: Float[Array, "n E 1"],
    bank: Bank, shared: Bank, *, active: int, scale: float, limit: float, eps: float,
    implementation: str | None = None,
) -> Float[Array, "S D"]:  # fmt: skip
  """Norm, router, routed experts and the shared one, in two kernels.

  Every expert that a live row chose is read once and multiplies all rows; a row takes it with the
  weight of its choice or 0, applied before w2. Sums are f32 and are rounded once.

  Args:
    u: as in `project`.
    live: not 0 where a row visits routed experts.
    layer: as in `project`.
    norm: of u.
    gate: of the router; affinity √softplus.
    bias: f32, of the choice alone; ties go to the lowest expert.
    bank: routed experts.
    shared: the expert of all rows.
    active: experts a row, at most 8.
    scale: of the weights, normalised to a sum of 1 if `active` is above 1.
    limit: of `swiglu`; 0 is none.
    eps: of the norm.
    implementation: see `dispatch.resolve`.

  Raises:
    ValueError: what `refusal` refuses; implementation.
  """
  s, d = u.shape
  refused = refusal(s, u.dtype, d, bank.w1.shape[2], experts=gate.shape[1], active=active)
  if dispatch.resolve(implementation, AVAILABLE, refused) == "reference":
    norm, gate, bias, bank, shared = _flat(_of(layer, (norm, gate, bias, bank, shared)))
    return reference.mixture(
        u, live != 0, norm, gate, bias, bank, shared, active, scale, limit, eps
    )
  at, most = _prefetched(layer), _vmem_bytes()
  route = norm, gate, bias, live[None].astype(jnp.int32)
  x, ids, weights, found = kernel_experts.route(at, u, *route, active, scale, eps, most)
  return kernel_experts.experts(at, x, ids, weights, found, bank, shared, active, limit, most)


def refusal(rows: int, dtype, *widths: int, experts: int = 1, active: int = 1) -> str | None:
  """Why the kernels do not take these sizes, or None."""
  if not 1 <= rows <= MOST_ROWS:
    return f"decode_layer: {rows} rows; the kernels take 1 to {MOST_ROWS}"
  if dtype not in (jnp.float32, jnp.bfloat16):
    return f"decode_layer: rows of {dtype}; the kernels take float32 and bfloat16"
  if any(width % LANES for width in widths):
    return f"decode_layer: widths {list(widths)}; the kernels take multiples of {LANES}"
  if active > min(experts, kernel_experts.CHOICES):
    return (
        f"decode_layer: {active} of {experts} experts a row; the kernels take at most"
        f" {kernel_experts.CHOICES}, and no more than there are"
    )
  return None


def route_refusal(shape: tuple[int, int], dtype, experts: int, active: int) -> str | None:
  """Why the kernel of `route` does not take these sizes, or None."""
  if shape[0] % LANES:
    return f"decode_layer: {shape[0]} rows; the router's kernel takes multiples of {LANES}"
  return refusal(1, dtype, shape[1], experts=experts, active=active)


def _of(layer, weights):
  return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, layer, keepdims=False), weights)


def _flat(weights):
  """Vectors without the axis of 1 that makes blocks of them."""
  return jax.tree.map(lambda a: a.reshape(-1) if 1 in a.shape else a, weights)


def _prefetched(layer):
  return jnp.asarray(layer, jnp.int32).reshape(1)


def _vmem_bytes() -> int:
  return min(_VMEM_BYTES, block_sizes.current_chip().vmem_bytes)
