"""Gradient of window attention from q, keys, log-sum-exp and the cotangent: the output is not read.

Scores are recomputed with keys on sublanes: sums over keys then cost no lane reduction, and one of
the two transposes for the keys' gradient goes away. Each block of rows writes the gradient of all
its keys; the overlap is added up outside, in a fixed order.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.window_attention import kernel
from pallas_kernels.window_attention.kernel import Operands, Sizes, product


def _body(*refs, s: Sizes):
  # Input: [1, block, N, H] twice, [1, keys, H], [1, keys, 2]; lanes (row, head) of each step
  # [1, steps, 3, rows * N] and [1, steps, 2, rows * N].
  q_ref, do_ref, kv_ref, key_ref, row_ref, lse_ref = refs[:6]
  # Output: [1, block, N, H], [1, keys, H], [1, steps, rows * N].
  dq_ref, dkv_ref, delta_ref = refs[6:9]
  # Scratch: probabilities beside score gradients, [2, keys, 2 * rows * N].
  (both,) = refs[9:]
  n, r = s.heads, s.rows
  wide = r * n

  def take(ref, i):
    return ref[0, pl.ds(i * r, r)].reshape(wide, -1)

  def scores(i, slot):
    rows = row_ref[0, i]
    position, segment = key_ref[0, :, 0:1], key_ref[0, :, 1:2]
    x = product(kv_ref[0], take(q_ref, i), ((1,), (1,))) * s.scale - lse_ref[0, i, 0:1]
    hidden = jnp.where(position < rows[0:1], 1, 0) + jnp.where(position > rows[1:2], 1, 0)
    hidden = hidden + jnp.where(segment != rows[2:3], 1, 0) + jnp.where(segment <= 0, 1, 0)
    p = jnp.where(hidden == 0, jnp.exp(x), 0.0)
    dp = product(kv_ref[0], take(do_ref, i), ((1,), (1,)))
    delta = jnp.sum(p * dp, axis=0, keepdims=True) - lse_ref[0, i, 1:2]
    delta_ref[0, pl.ds(i, 1)] = delta
    both[slot, :, wide:] = p.astype(both.dtype)
    both[slot, :, :wide] = (p * (dp - delta) * s.scale).astype(both.dtype)

  def gradients(i, slot):
    dq = product(both[slot, :, :wide], kv_ref[0], ((0,), (0,)))
    dq_ref[0, pl.ds(i * r, r)] = dq.reshape(r, n, -1).astype(dq_ref.dtype)
    own = jnp.concatenate([take(q_ref, i), take(do_ref, i)], axis=0)
    dkv_ref[0] += product(both[slot], own, ((1,), (0,)))

  dkv_ref[...] = jnp.zeros_like(dkv_ref)
  scores(0, 0)
  pairs = (s.steps - 1) // 2

  @pl.loop(0, pairs)
  def _(j):
    for slot in range(2):
      gradients(2 * j + slot, slot)
      scores(2 * j + slot + 1, 1 - slot)

  for i in range(2 * pairs, s.steps):
    gradients(i, i % 2)
    if i + 1 < s.steps:
      scores(i + 1, (i + 1) % 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(s, q, kv, first, last, segments, key_positions, key_segments, sink):
  """`kernel.attend` of the arrays that `kernel.operands` prepares."""
  return _forward(s, q, kv, first, last, segments, key_positions, key_segments, sink)[0]


def _forward(s, q, kv, *integers_and_sink):
  *integers, sink = integers_and_sink
  forward, _ = s
  out, lse = kernel.attend(forward, q, kernel.operands(forward, kv, *integers), sink)
  return (out, lse), (q, kv, integers, sink, lse)


def _backward(s, saved, cotangents):
  q, kv, integers, sink, lse = saved
  _, s = s
  t = q.shape[1]
  o = kernel.operands(s, kv, *integers)
  pad = lambda a: jnp.pad(a, ((0, 0), (0, -t % s.block)) + ((0, 0),) * (a.ndim - 2))
  dq, dkv, delta = gradients(s, *(pad(q), o), *(pad(a) for a in (lse, *cotangents)))
  dq, delta = dq[:, :t], delta[:, :t]
  before = s.front - (kv.shape[1] - t)
  dkv = dkv[:, before : before + kv.shape[1]].astype(kv.dtype)
  dsink = -jnp.sum(jnp.exp(sink - lse) * delta, axis=(0, 1))
  return dq, dkv, None, None, None, None, None, dsink


attend.defvjp(_forward, _backward)


def _lanes(s: Sizes, a, t):
  """[B, n, T] or [B, T, N] per row as [B, T / rows, n, rows * N]: rows and heads on lanes."""
  return a.reshape(a.shape[0], t // s.rows, s.rows * s.heads)


@functools.partial(jax.jit, static_argnums=0)
def gradients(s: Sizes, q, o: Operands, lse, dout, dlse):
  """(d q, d kv of o.kv in f32, Σ_keys p·dp − dlse [B, T, N]); T a multiple of the block."""
  b, t, n, h = q.shape
  nb, wide = t // s.block, s.rows * n
  per_row = jnp.stack(
      [_lanes(s, jnp.repeat(a, n, axis=1), t) for a in (o.rows[:, 0], o.rows[:, 1], o.rows[:, 2])],
      axis=2,
  )
  stats = jnp.stack([_lanes(s, lse, t), _lanes(s, dlse, t)], axis=2)
  steps = kernel.by_block(s.steps, wide)
  in_steps = lambda k: kernel.by_block(s.steps, k, wide)
  dq, parts, delta = pl.pallas_call(
      functools.partial(_body, s=s),
      grid=(b, nb),
      in_specs=[
          kernel.by_block(s.block, n, h),
          kernel.by_block(s.block, n, h),
          kernel.overlapping(s, h, nb),
          pl.BlockSpec((1, s.keys, 2), lambda b, i: (b * nb + i, 0, 0)),
          in_steps(3),
          in_steps(2),
      ],
      out_specs=[
          kernel.by_block(s.block, n, h),
          pl.BlockSpec((1, s.keys, h), lambda b, i: (b * nb + i, 0, 0)),
          steps,
      ],
      out_shape=[
          jax.ShapeDtypeStruct(q.shape, q.dtype),
          jax.ShapeDtypeStruct((b * nb, s.keys, h), jnp.float32),
          jax.ShapeDtypeStruct((b, t // s.rows, wide), jnp.float32),
      ],
      scratch_shapes=[pltpu.VMEM((2, s.keys, 2 * wide), q.dtype)],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=kernel.VMEM_LIMIT
      ),
      name="window_attention_gradient",
  )(q, dout, o.kv, o.keys.swapaxes(1, 2), per_row, stats)
  return dq, _overlap_add(s, parts.reshape(b, nb, s.keys, h)), delta.reshape(b, t, n)


def _overlap_add(s: Sizes, parts):
  """Sums [B, nb, keys, H], part i beginning at slot i * block, to [B, front + nb * block, H]."""
  b, nb, keys, h = parts.shape
  pieces = -(-keys // s.block)
  parts = jnp.pad(parts, ((0, 0), (0, 0), (0, pieces * s.block - keys), (0, 0)))
  parts = parts.reshape(b, nb, pieces, s.block, h)
  total = sum(
      jnp.pad(parts[:, :, p], ((0, 0), (p, pieces - 1 - p), (0, 0), (0, 0))) for p in range(pieces)
  )
  return total.reshape(b, -1, h)[:, : s.front + nb * s.block]
