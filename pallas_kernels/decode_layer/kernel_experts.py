"""Routing and experts of one row a request: every expert in use is read once and sees all rows.

Affinities, choices and hidden values have rows along lanes: what is reduced or chosen lies along
sublanes, and weights are the streamed operand of every product.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode_layer.kernel_projections import (
    divisor,
    normed,
    of_layer,
    product,
    whole,
)
from pallas_kernels.decode_layer.lanes import LANES

CHOICES = 8  # sublanes that hold the choices of a row
_TILE = 256
_ROWS = 256  # of a step, without a list of experts


def _route(layer_ref, u_ref, norm_ref, gate_ref, bias_ref, live_ref, x_ref, ids_ref, weights_ref,
           list_ref=None, *, eps: float, active: int, scale: float):  # fmt: skip
  # Prefetch: number of the layer, int32 [1]
  # Input: u [S, D], norm [1, D], gate [E, D], bias f32 [E, 1], live int32 [1, S]
  # Output: x [S, D]; ids int32 and weights f32 [8, S]; experts in use and their number [8, A]
  del layer_ref
  x_ref[...] = normed(u_ref[...], norm_ref[...], eps)
  z = product(gate_ref[...], x_ref[...])
  softplus = jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z)))
  affinity = jnp.sqrt(jnp.maximum(softplus, jnp.finfo(jnp.float32).tiny))
  left = affinity + bias_ref[...]
  count, rows = z.shape
  expert = lax.broadcasted_iota(jnp.int32, z.shape, 0)
  used = jnp.zeros(z.shape, jnp.float32)
  live = live_ref[...] > 0
  ids, weights = [], []
  for _ in range(active):
    best = jnp.max(left, axis=0, keepdims=True)
    first = jnp.min(jnp.where(left == best, expert, count), axis=0, keepdims=True)
    mine = expert == first
    ids.append(jnp.where(live, first, count))
    weights.append(jnp.sum(jnp.where(mine, affinity, 0.0), axis=0, keepdims=True))
    left = jnp.where(mine, -jnp.inf, left)
    used = jnp.where(mine, jnp.where(live, 1.0, 0.0), used)
  if active > 1:
    total = sum(weights) + 1e-20
    weights = [w / total for w in weights]
  rest = [jnp.full((1, rows), count, jnp.int32)] * (CHOICES - active)
  ids_ref[...] = jnp.concatenate(ids + rest, axis=0)
  weights = [w * scale for w in weights]
  weights_ref[...] = jnp.concatenate(weights + [jnp.zeros((1, rows))] * (CHOICES - active), axis=0)

  if list_ref is None:
    return
  used = jnp.broadcast_to(jnp.max(used, axis=1, keepdims=True), (count, LANES))
  below = lax.broadcasted_iota(jnp.int32, (count, count), 0)
  below = below > lax.broadcasted_iota(jnp.int32, (count, count), 1)
  rank = lax.dot_general(
      jnp.where(below, 1.0, 0.0), used, (((1,), (0,)), ((), ())),
      preferred_element_type=jnp.float32,
  )  # fmt: skip
  number = lax.broadcasted_iota(jnp.int32, (count, LANES), 0)
  lane = lax.broadcasted_iota(jnp.int32, (count, LANES), 1)
  total = jnp.sum(used, axis=0, keepdims=True).astype(jnp.int32)
  for at in range(list_ref.shape[1] // LANES):
    here = jnp.where(rank.astype(jnp.int32) == lane + at * LANES, used, 0.0)
    found = jnp.sum(jnp.where(here > 0, number, 0), axis=0, keepdims=True)
    both = jnp.concatenate([found, jnp.broadcast_to(total, (7, LANES))], axis=0)
    list_ref[:, at * LANES : (at + 1) * LANES] = both


def _experts(list_ref, layer_ref, x_ref, ids_ref, weights_ref, w1_ref, w2_ref, w3_ref, s1_ref,
             s2_ref, s3_ref, out_ref, total_ref, *, limit: float):  # fmt: skip
  # Prefetch: experts in use and their number [8, A], layer
  # Input: x [S, D], ids and weights [8, S]; w1, w3 [tile, D] and w2 [D, tile] of an expert, and of
  #   the shared one
  # Output: sum of all experts, [S, D]
  # Scratch: total f32 [D, S]
  del layer_ref
  step, j = pl.program_id(0), pl.program_id(1)
  x = x_ref[...]

  def expert(one, two, three, weight):
    g, u = (product(w[...], x).astype(x.dtype).astype(jnp.float32) for w in (one, three))
    if limit:
      g, u = jnp.minimum(g, limit), jnp.clip(u, -limit, limit)
    h = g / (1.0 + jnp.exp(-g)) * u
    h = (h if weight is None else h * weight).astype(x.dtype)
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        two[...], h, (((1,), (0,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )

  @pl.when(step == 0)
  def _():
    new = expert(s1_ref, s2_ref, s3_ref, None)
    total_ref[...] = jnp.where(j == 0, new, total_ref[...] + new)

  @pl.when((step > 0) & (step <= list_ref[1, 0]))
  def _():
    mine = ids_ref[...] == list_ref[0, jnp.maximum(step - 1, 0)]
    weight = jnp.sum(jnp.where(mine, weights_ref[...], 0.0), axis=0, keepdims=True)
    total_ref[...] += expert(w1_ref, w2_ref, w3_ref, weight)

  @pl.when((step == pl.num_programs(0) - 1) & (j == pl.num_programs(1) - 1))
  def _():
    out_ref[...] = total_ref[...].T.astype(out_ref.dtype)


def in_use(rows: int, active: int, experts: int) -> int:
  """Most experts that the rows can choose."""
  return min(rows * active, experts)


def route(layer, u, norm, gate, bias, live, active: int, scale: float, eps: float, vmem_bytes: int,
          listed: bool = True):  # fmt: skip
  """(x, ids, weights, experts in use if `listed`), see `op.mixture` and `op.route`."""
  s, e = u.shape[0], gate.shape[1]
  struct = jax.ShapeDtypeStruct
  tile = s if listed else math.gcd(s, _ROWS)
  outs = [
      struct(u.shape, u.dtype),
      struct((CHOICES, s), jnp.int32),
      struct((CHOICES, s), jnp.float32),
  ]
  rows = pl.BlockSpec((tile, u.shape[1]), lambda i, _: (i, 0))
  along = lambda height: pl.BlockSpec((height, tile), lambda i, _: (0, i))
  specs = [rows, along(CHOICES), along(CHOICES)]
  if listed:
    outs.append(struct((CHOICES, -(-in_use(s, active, e) // LANES) * LANES), jnp.int32))
    specs.append(whole(outs[-1]))
  return pl.pallas_call(
      functools.partial(_route, eps=eps, active=active, scale=scale),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          grid=(s // tile,),
          in_specs=[rows, of_layer(norm), of_layer(gate), of_layer(bias), along(1)],
          out_specs=specs,
      ),
      out_shape=outs,
      compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes),
      name="decode_route" if listed else "route",
  )(layer, u, norm, gate, bias, live)


def experts(layer, x, ids, weights, found, bank, shared, active: int, limit: float,
            vmem_bytes: int):  # fmt: skip
  """Routed and shared sum [S, D], see `op.mixture`."""
  s, d = x.shape
  _, count, f, _ = bank[0].shape
  tile = divisor(f, _TILE)
  steps = f // tile

  def at(i, j, found, layer):
    number = jnp.clip(i - 1, 0, jnp.maximum(found[1, 0] - 1, 0))
    inside = jnp.where(i <= found[1, 0], j, steps - 1)
    return layer[0], found[0, number], jnp.where(i == 0, 0, inside)

  def shared_at(i, j, found, layer):
    return layer[0], jnp.where(i == 0, j, steps - 1)

  up = pl.BlockSpec((None, None, tile, d), lambda *a: (*at(*a), 0))
  down = pl.BlockSpec((None, None, d, tile), lambda *a: (*at(*a)[:2], 0, at(*a)[2]))
  shared_up = pl.BlockSpec((None, tile, d), lambda *a: (*shared_at(*a), 0))
  shared_down = pl.BlockSpec((None, d, tile), lambda *a: (shared_at(*a)[0], 0, shared_at(*a)[1]))
  return pl.pallas_call(
      functools.partial(_experts, limit=limit),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2,
          grid=(1 + in_use(s, active, count), steps),
          in_specs=[whole(x), whole(ids), whole(weights), up, down, up, shared_up, shared_down,
                    shared_up],
          out_specs=whole(x),
          scratch_shapes=[pltpu.VMEM((d, s), jnp.float32)],
      ),
      out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vmem_bytes
      ),
      name="decode_experts",
  )(found, layer, x, ids, weights, *bank, *shared)  # fmt: skip
