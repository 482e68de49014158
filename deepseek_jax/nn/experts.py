"""Routed experts over rows grouped by expert, without dropping any (spec 10).

Assignments are sorted by expert and every expert's rows padded to whole blocks. A loop over experts
takes each one's matrices once, a loop inside over its blocks in use multiplies them: `expert_sum`.
`jax.lax.ragged_dot`, the other way, does the work of every expert on every row when compiled for a
CPU; on a TPU it is the way, `grouped_sum`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from deepseek_jax.nn import exchange
from deepseek_jax.sharding import EXPERTS, axis_size
from pallas_kernels.grouped_experts.op import grouped_experts
from pallas_kernels.grouped_matmul.op import grouped_matmul


class ExpertWeights(NamedTuple):
  """The routed bank, in the dtype of the rows."""

  w1: Float[Array, "E F D"]
  w2: Float[Array, "E D F"]
  w3: Float[Array, "E F D"]


class Blocks(NamedTuple):
  """Layout of the assignments in blocks of b slots, each block of one expert.

  `slot` sends an assignment to its slot, `row` a slot to its row; `used` is 0 in slots that hold no
  assignment. Expert e owns the blocks from `first[e]` up to `first[e + 1]`.
  """

  slot: Int[Array, "R X"]
  row: Int[Array, " S"]
  used: Float[Array, " S"]
  first: Int[Array, " E1"]


def block_size(assignments: int, experts: int) -> int:
  """A quarter of the mean load as a power of two in 8..64: padding costs half a block an expert.

  16 experts, 4,096 assignments, 512 → 256, forward and backward on two cores: 48 ms with blocks of
  32, 42 with 64, 50 with 128, 56 with 256; two experts side by side are slower (50 with 64).
  """
  return int(min(64, max(8, 2 ** (assignments // experts // 4).bit_length() // 2)))


def group(ids: Int[Array, "R X"], experts: int, b: int) -> Blocks:
  """Blocks of b slots for assignments to `ids`; an id equal to `experts` is no assignment."""
  rows, x = ids.shape
  n = rows * x // b + experts
  flat = ids.reshape(-1)
  order = jnp.argsort(flat, stable=True)
  load = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)
  start = jnp.cumsum(load) - load
  first = jnp.pad(jnp.cumsum(-(-load[:-1] // b)), (1, 0)).astype(jnp.int32)
  place = jnp.zeros(rows * x, jnp.int32).at[order].set(jnp.arange(rows * x, dtype=jnp.int32))
  slot = jnp.where(flat < experts, first[flat] * b + place - start[flat], n * b)
  s = jnp.arange(n * b)
  of = jnp.minimum(jnp.searchsorted(first[1:], s // b, side="right"), experts - 1)
  rank = s - first[of] * b
  used = (rank < load[of]) & (s // b < first[-1])
  row = order[jnp.where(used, start[of] + rank, 0)] // x
  return Blocks(slot.reshape(rows, x), row, used.astype(jnp.float32), first)


def _slice(a: Array, i: Array, b: int) -> Array:
  return lax.dynamic_slice_in_dim(a, i * b, b)


def _pick(a: Array, i: Array) -> Array:
  return lax.dynamic_index_in_dim(a, i, keepdims=False)


def swiglu(g: Array, u: Array, limit: float) -> Array:
  """silu(g) · u in f32 with the released clamps: g from above, u on both sides; limit 0 is none."""
  g, u = g.astype(jnp.float32), u.astype(jnp.float32)
  if limit:
    g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
  return jax.nn.silu(g) * u


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def expert_sum(
    limit: float, b: int, x: Float[Array, "R D"], weights: Float[Array, "R X"],
    ids: Int[Array, "R X"], w: ExpertWeights,
) -> Float[Array, "R D"]:  # fmt: skip
  """Σ_x weights · expert(x) over each row's experts; f32, the routing weight applied before w2."""
  return _forward(limit, b, x, weights, ids, w)[0]


def _forward(limit, b, x, weights, ids, w):
  at = group(ids, w.w1.shape[0], b)
  scale = jnp.zeros(at.row.shape[0] + 1).at[at.slot].set(weights)[:-1] * at.used
  f = w.w1.shape[1]

  def expert(e, state):
    w1, w2, w3 = (_pick(a, e) for a in w)

    def block(i, state):
      y, g, u = state
      rows = x[_slice(at.row, i, b)]
      gi, ui = rows @ w1.T, rows @ w3.T
      h = swiglu(gi, ui, limit) * _slice(scale, i, b)[:, None]
      put = lambda a, v: lax.dynamic_update_slice_in_dim(a, v, i * b, 0)
      return put(y, h.astype(x.dtype) @ w2.T), put(g, gi), put(u, ui)

    return lax.fori_loop(at.first[e], at.first[e + 1], block, state)

  slots = at.row.shape[0]
  y = jnp.zeros((slots + 1, x.shape[1]), x.dtype)
  g, u = jnp.zeros((slots, f), x.dtype), jnp.zeros((slots, f), x.dtype)
  y, g, u = lax.fori_loop(0, w.w1.shape[0], expert, (y, g, u))
  return _combine(y, at.slot), (x, at, scale, w, g, u)


def _combine(y: Float[Array, "S1 D"], slot: Int[Array, "R X"]) -> Float[Array, "R D"]:
  """Sum of each row's slots in f32; the slot past the end holds zeros."""
  return sum(y[slot[:, k]].astype(jnp.float32) for k in range(slot.shape[1]))


def _backward(limit, b, saved, dout):
  x, at, scale, w, g, u = saved

  def expert(e, state):
    dx, dscale, *dws = state
    w1, w2, w3 = (_pick(a, e) for a in w)

    def block(i, state):
      dx, dscale, dw1, dw2, dw3 = state
      row, si = _slice(at.row, i, b), _slice(scale, i, b)[:, None]
      rows = x[row]
      act, pull = jax.vjp(lambda g, u: swiglu(g, u, limit), _slice(g, i, b), _slice(u, i, b))
      dy = (dout[row] * _slice(at.used, i, b)[:, None]).astype(x.dtype)
      dh = (dy @ w2).astype(jnp.float32)
      dg, du = pull(dh * si)
      put = lambda a, v: lax.dynamic_update_slice_in_dim(a, v, i * b, 0)
      return (
          put(dx, dg @ w1 + du @ w3),
          put(dscale, jnp.sum(dh * act, axis=-1)),
          dw1 + dg.T @ rows,
          dw2 + dy.T @ (act * si).astype(x.dtype),
          dw3 + du.T @ rows,
      )

    state = (dx, dscale, *(jnp.zeros_like(a) for a in (w1, w2, w3)))
    dx, dscale, *own = lax.fori_loop(at.first[e], at.first[e + 1], block, state)
    return dx, dscale, *(lax.dynamic_update_index_in_dim(a, v, e, 0) for a, v in zip(dws, own))

  slots = at.row.shape[0]
  zeros = jax.tree.map(jnp.zeros_like, w)
  state = (jnp.zeros((slots + 1, x.shape[1]), x.dtype), jnp.zeros(slots + 1), *zeros)
  dx, dscale, dw1, dw2, dw3 = lax.fori_loop(0, w.w1.shape[0], expert, state)
  dx = _combine(dx, at.slot).astype(x.dtype)
  return dx, dscale[at.slot], None, ExpertWeights(dw1, dw2, dw3)


expert_sum.defvjp(_forward, _backward)


def grouped_sum(
    limit: float, x: Float[Array, "R D"], weights: Float[Array, "R X"], ids: Int[Array, "R X"],
    w: ExpertWeights,
) -> Float[Array, "R D"]:  # fmt: skip
  """`expert_sum` as products of rows sorted by expert, the way of a TPU.

  The backward pass is that of the parts: a gather for each permutation, `ragged_dot` for products.
  """
  experts, chosen = w.w1.shape[0], ids.shape[1]
  flat = ids.reshape(-1)
  sizes = _sizes(flat, experts)
  order = jnp.argsort(flat, stable=True)
  places = jnp.argsort(order)
  rows = x[order // chosen]
  product = functools.partial(grouped_matmul, group_sizes=sizes)
  h = swiglu(product(rows, w.w1), product(rows, w.w3), limit)
  h = h * weights.reshape(-1)[order][:, None]
  y = product(h.astype(x.dtype), w.w2)[places].reshape(*ids.shape, -1)
  return jnp.sum(y.astype(jnp.float32), axis=1)


class Way(NamedTuple):
  """How experts multiply: clamp of `swiglu`, and whether kernels do it (`grouped_sum`)."""

  limit: float
  kernels: bool


def routed_sum(
    way: Way, x: Float[Array, "R D"], weights: Float[Array, "R X"], ids: Int[Array, "R X"],
    w: ExpertWeights,
) -> Float[Array, "R D"]:  # fmt: skip
  """Σ_x weights · expert(x) in f32; an id equal to the number of experts is none."""
  if way.kernels:
    return grouped_sum(way.limit, x, weights, ids, w)
  return expert_sum(way.limit, block_size(ids.size, w.w1.shape[0]), x, weights, ids, w)


def _host(way: Way, w: ExpertWeights, payload, valid: Bool[Array, " S"]) -> Float[Array, "S D"]:
  """One expert of this device for each row that visits it."""
  x, weight, number = payload
  number = jnp.where(valid, number, w.w1.shape[0])
  return routed_sum(way, x, weight[:, None], number[:, None], w).astype(x.dtype)


def visited_sum(
    way: Way, x: Float[Array, "R D"], weights: Float[Array, "R X"], ids: Int[Array, "R X"],
    w: ExpertWeights,
) -> Float[Array, "R D"]:  # fmt: skip
  """`routed_sum` where every device holds the next E / devices experts: rows go to them.

  As few rows as a single round's room are shown to all devices instead, each of which adds up what
  its own experts make of them.
  """
  own, devices, chosen = w.w1.shape[0], axis_size(EXPERTS), ids.shape[1]
  if x.shape[0] <= exchange.room(ids.size, devices):
    every = lambda a: lax.all_gather(a, EXPERTS, axis=0, tiled=True)
    local = every(ids) - lax.axis_index(EXPERTS) * own
    local = jnp.where((local >= 0) & (local < own), local, own)
    total = routed_sum(way, every(x), every(weights), local, w)
    return lax.psum_scatter(total, EXPERTS, scatter_dimension=0, tiled=True)
  flat = ids.reshape(-1)
  payload = x, weights.reshape(-1), flat % own
  y = exchange.visit(functools.partial(_host, way), w, payload, flat // own, EXPERTS)
  return jnp.sum(y.reshape(x.shape[0], chosen, -1).astype(jnp.float32), axis=1)


def _sizes(flat: Int[Array, " S"], experts: int) -> Int[Array, " E"]:
  number = jnp.arange(experts, dtype=jnp.int32)
  return jnp.sum(flat[:, None] == number, axis=0, dtype=jnp.int32)


def stacked_sum(
    limit: float, x: Float[Array, "R D"], ids: Int[Array, "X R"], weights: Float[Array, "X R"],
    w: ExpertWeights, layer: Int[Array, ""],
) -> Float[Array, "R D"]:  # fmt: skip
  """`grouped_sum` of one layer of a run, whose weights [n, E, ...] are read in place.

  Choices lead, so that the rows of a choice are neighbours. Without gradient.
  """
  number = jnp.arange(ids.size, dtype=jnp.int32)
  flat = ids.reshape(-1)
  _, order, scale = lax.sort((flat, number, weights.reshape(-1)), num_keys=1)
  places = lax.sort((order, number), num_keys=1)[1]
  y = grouped_experts(
      x[order % x.shape[0]], scale, _sizes(flat, w.w1.shape[1]), layer, *w, limit=limit,
      implementation="pallas",
  )  # fmt: skip
  return jnp.sum(y[places].reshape(*ids.shape, -1).astype(jnp.float32), axis=0)
