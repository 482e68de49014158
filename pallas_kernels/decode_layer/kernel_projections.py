"""Attention's projections of one row a request, weights read in place from a stack of layers.

Weights are the streamed operand of every product and the few rows the stationary one: rows of
weights then come out along sublanes, and a small transpose puts them back along lanes.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode_layer.lanes import LANES

_TILE = 256
_HEADS = 8  # heads of a step
_RANK = 512  # output rows of a step of the grouped projection
_LINES = 8  # of a step over rings
WORDS = 4  # of the scales of a window latent


def product(weights, x):
  """f32 [N, S] of weights [N, K] and rows [S, K]."""
  exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return lax.dot_general(
      weights, x, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
  )


def normed(x, weight, eps: float):
  """RMSNorm of rows [S, K] with weight [1, K], in x's dtype."""
  v = x.astype(jnp.float32)
  scale = lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
  return (weight.astype(jnp.float32) * (v * scale)).astype(x.dtype)


def turned(x, cos, sin):
  """The last 128 channels of rows, neighbours rotated as pairs; `sin` has the sign of each lane."""
  v = x.astype(jnp.float32)
  even = (lax.broadcasted_iota(jnp.int32, v.shape, 1) & 1) == 0
  other = jnp.where(even, pltpu.roll(v, LANES - 1, 1), pltpu.roll(v, 1, 1))
  return (v * cos + other * sin).astype(x.dtype)


def _rotate_head(x, cos, sin):
  """Rows [S, H] of one head, the end rotated."""
  end = turned(x[:, -LANES:], cos, sin)
  return end if x.shape[1] == LANES else jnp.concatenate([x[:, :-LANES], end], axis=1)


def _project(layer_ref, u_ref, norm_ref, wq_a_ref, q_norm_ref, wkv_ref, kv_norm_ref, wq_b_ref,
             sink_ref, cos_ref, sin_ref, c_ref, kv_ref, q_ref, own_sink_ref, x_ref, apart_ref, *,
             eps: float):  # fmt: skip
  # Prefetch: number of the layer, int32 [1]
  # Input: u [S, D], norms [1, ·], wq_a [tile, D], wkv [H, D], wq_b [heads·H, L], sink [1, N], cos
  #   and sin f32 [S, 128]
  # Output: c_q [S, L], kv [S', H], rotated queries [S, heads, H], the layer's sink [1, N]
  # Scratch: x [S, D], u normed; apart f32 [S, heads, H]
  del layer_ref
  size = wq_a_ref.shape[0]
  j, last = pl.program_id(0), c_ref.shape[1] // size

  @pl.when(j == 0)
  def _():
    x_ref[...] = normed(u_ref[...], norm_ref[...], eps)
    own_sink_ref[...] = sink_ref[...]

  @pl.when(j < last)
  def _():
    tile = product(wq_a_ref[...], x_ref[...]).T.astype(c_ref.dtype)
    c_ref[:, pl.ds(pl.multiple_of(j * size, size), size)] = tile

  @pl.when(j == last)
  def _():
    c_ref[...] = normed(c_ref[...], q_norm_ref[...], eps)
    kv = product(wkv_ref[...], x_ref[...]).T.astype(kv_ref.dtype)
    kv = normed(kv, kv_norm_ref[...], eps)
    kv_ref[...] = jnp.zeros_like(kv_ref)
    kv_ref[: kv.shape[0], :] = _rotate_head(kv, cos_ref[...], sin_ref[...])

  @pl.when(j > last)
  def _():
    width = q_ref.shape[2]
    q = product(wq_b_ref[...], c_ref[...]).T.astype(q_ref.dtype)
    for head in range(q_ref.shape[1]):
      own = q[:, head * width : (head + 1) * width]
      apart_ref[:, head, :] = _rotate_head(own, cos_ref[...], sin_ref[...]).astype(jnp.float32)
    q_ref[...] = apart_ref[...].astype(q_ref.dtype)


def _outputs(layer_ref, x_ref, wo_a_ref, wo_b_ref, cos_ref, sin_ref, y_ref, z_ref, turned_ref,
             apart_ref, *, steps: int):  # fmt: skip
  # Prefetch: number of the layer, int32 [1]
  # Input: attention's output [S, heads, H] of a group, wo_a [tile, I], wo_b [tile, G·R], cos and
  #   sin f32 [S, 128]
  # Output: of all rows, [S, tile]
  # Scratch: z [S, G·R], turned [S, I], apart f32 [S, heads, H]
  del layer_ref
  j, size = pl.program_id(0), wo_a_ref.shape[0]
  first = z_ref.shape[1] // size

  @pl.when((j < first) & (lax.rem(j, steps) == 0))
  def _():
    apart_ref[...] = x_ref[...].astype(jnp.float32)
    width = x_ref.shape[2]
    for head in range(x_ref.shape[1]):
      own = apart_ref[:, head, :].astype(x_ref.dtype)
      own = _rotate_head(own, cos_ref[...], sin_ref[...])
      turned_ref[:, head * width : (head + 1) * width] = own

  @pl.when(j < first)
  def _():
    tile = product(wo_a_ref[...], turned_ref[...]).T.astype(z_ref.dtype)
    z_ref[:, pl.ds(pl.multiple_of(j * size, size), size)] = tile

  @pl.when(j >= first)
  def _():
    y_ref[...] = product(wo_b_ref[...], z_ref[...]).T.astype(y_ref.dtype)


def _ring(layer_ref, slot_ref, codes_ref, scales_ref, old_ref, old_scales_ref, new_ref,
          new_scales_ref):  # fmt: skip
  # Prefetch: number of the layer, int32 [1]; slot of each line's row, int32 [B]
  # Input: rows as they are stored, codes [S', 128] and scales [S'/32, 128]; codes of the rings
  #   [lines, 128, 128] and their scales [lines, 4, 128]
  # Output: rings that hold the rows
  del layer_ref
  lines, words = new_ref.shape[0], WORDS
  for i in range(lines):
    line = pl.program_id(0) * lines + i
    slot = slot_ref[line]
    row = lax.broadcasted_iota(jnp.int32, new_ref.shape[1:], 0)
    new_ref[i] = jnp.where(row == slot, codes_ref[pl.ds(line, 1), :], old_ref[i])
    # Words of a row lie at lanes 4·(line mod 32); in a ring at lanes 4·(slot mod 32).
    own = scales_ref[pl.ds(line >> 5, 1), :]
    own = pltpu.roll(own, (words * (slot - line)) & (LANES - 1), 1)
    at = lax.broadcasted_iota(jnp.int32, new_scales_ref.shape[1:], 0) << 5
    at += lax.broadcasted_iota(jnp.int32, new_scales_ref.shape[1:], 1) >> 2
    new_scales_ref[i] = jnp.where(at == slot, own, old_scales_ref[i])


def whole(a):
  """All of an array, at every step."""
  return pl.BlockSpec(a.shape, lambda *_: (0,) * a.ndim)


def of_layer(a):
  """One layer [1, K] of a stack [n, 1, K], or [N, K] of [n, N, K]; the layer is prefetched."""
  last = lambda *at: (at[-1][0], 0, 0)
  return pl.BlockSpec((None, *a.shape[1:]), last)


def divisor(size: int, at_most: int, unit: int = LANES) -> int:
  """The largest multiple of `unit` up to `at_most` that divides `size`."""
  return max(w for w in range(unit, at_most + 1, unit) if size % w == 0)


def _call(body, name, grid, prefetched, specs, outs, out_specs, scratch, vmem_bytes, *args):
  return pl.pallas_call(
      body,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=prefetched,
          grid=grid,
          in_specs=specs,
          out_specs=out_specs,
          scratch_shapes=scratch,
      ),
      out_shape=outs,
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("arbitrary",) * len(grid), vmem_limit_bytes=vmem_bytes
      ),
      name=name,
  )(*args)


def project(layer, u, norm, wq_a, q_norm, wkv, kv_norm, wq_b, sink, cos, sin, eps: float,
            unit: int, vmem_bytes: int):  # fmt: skip
  """(c_q [S, L], kv [S', H], queries [S, N, H], sink [1, N]), see `op.project`."""
  s, d = u.shape
  l, h, n = wq_a.shape[1], wkv.shape[1], sink.shape[2]
  tile, heads = divisor(l, _TILE), divisor(n, _HEADS, 1)
  steps = l // tile
  after = lambda j: jnp.maximum(j - steps - 1, 0)
  tiles = pl.BlockSpec((None, tile, d), lambda j, at: (at[0], jnp.minimum(j, steps - 1), 0))
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, u.dtype)
  outs = (
      shape(s, l),
      shape(s + -s % unit, h),
      shape(s, n, h),
      jax.ShapeDtypeStruct((1, n), sink.dtype),
  )
  return _call(
      functools.partial(_project, eps=eps), "decode_project", (steps + 1 + n // heads,), 1,
      [whole(u), of_layer(norm), tiles, of_layer(q_norm), of_layer(wkv), of_layer(kv_norm),
       pl.BlockSpec((None, heads * h, l), lambda j, at: (at[0], after(j), 0)), of_layer(sink),
       whole(cos), whole(sin)],
      outs,
      (whole(outs[0]), whole(outs[1]),
       pl.BlockSpec((s, heads, h), lambda j, at: (0, after(j), 0)), whole(outs[3])),
      [pltpu.VMEM((s, d), u.dtype), pltpu.VMEM((s, heads, h), jnp.float32)],
      vmem_bytes, layer, u, norm, wq_a, q_norm, wkv, kv_norm, wq_b, sink, cos, sin,
  )  # fmt: skip


def outputs(layer, x, wo_a, wo_b, cos, sin, vmem_bytes: int):
  """Projected outputs [S, D], see `op.outputs`."""
  (s, n, h), i, d = x.shape, wo_a.shape[2], wo_b.shape[1]
  heads = i // h
  groups = n // heads
  width = wo_a.shape[1]
  tile, last = divisor(width // groups, _RANK), divisor(d, _TILE)
  steps, first = width // groups // tile, width // tile
  before = lambda j: jnp.minimum(j, first - 1)
  after = lambda j: jnp.maximum(j - first, 0)
  return _call(
      functools.partial(_outputs, steps=steps), "decode_outputs", (first + d // last,), 1,
      [pl.BlockSpec((s, heads, h), lambda j, at: (0, lax.div(before(j), steps), 0)),
       pl.BlockSpec((None, tile, i), lambda j, at: (at[0], before(j), 0)),
       pl.BlockSpec((None, last, width), lambda j, at: (at[0], after(j), 0)), whole(cos),
       whole(sin)],
      jax.ShapeDtypeStruct((s, d), x.dtype),
      pl.BlockSpec((s, last), lambda j, at: (0, after(j))),
      [pltpu.VMEM((s, width), x.dtype), pltpu.VMEM((s, i), x.dtype),
       pltpu.VMEM((s, heads, h), jnp.float32)],
      vmem_bytes, layer, x, wo_a, wo_b, cos, sin,
  )  # fmt: skip


def ring(layer, slots, codes, scales, rings, ring_scales, vmem_bytes: int):
  """Rings of a layer with new rows, see `op.ring`."""
  lines = math.gcd(slots.shape[0], _LINES)
  of = lambda a: pl.BlockSpec((None, lines, *a.shape[2:]), lambda j, at, _: (at[0], j, 0, 0))
  out = lambda a: pl.BlockSpec((lines, *a.shape[2:]), lambda j, *_: (j, 0, 0))
  outs = tuple(jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (rings, ring_scales))
  return _call(
      _ring, "decode_ring", (slots.shape[0] // lines,), 2,
      [whole(codes), whole(scales), of(rings), of(ring_scales)], outs,
      (out(rings), out(ring_scales)), [], vmem_bytes, layer, slots, codes, scales, rings,
      ring_scales,
  )  # fmt: skip
