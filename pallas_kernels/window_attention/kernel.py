"""Rows in blocks; the keys of a block are its own rows' and those of the slots before them.

All heads share the key, so that a block is one product of [rows × heads, H] with [keys, H], and all
keys of a row are there at once: one softmax, no running maximum.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
VMEM_LIMIT = 60 * 2**20  # of the 64 MiB of v5p and TPU7x
BLOCK_BYTES = 40 * 2**20  # of them for blocks of q, out and their gradients
HIDDEN = -1e30  # logit of a key that a row does not see; finite, below any sink
HIGHEST = jax.lax.Precision.HIGHEST


class Sizes(NamedTuple):
  """Static facts of one call.

  Attributes:
    block: rows a grid step; their q, out and, in the gradient, d q are in VMEM twice.
    rows: rows a step of the inner loop. Four rows of 64 heads fill a 256-wide product; eight spill.
    keys: slots a block reads, a multiple of LANES: its own rows' and those before them.
    heads: N.
    scale: of the logits.
  """

  block: int
  rows: int
  keys: int
  heads: int
  scale: float

  @property
  def steps(self) -> int:
    return self.block // self.rows

  @property
  def front(self) -> int:
    return self.keys - self.block


def product(a, b, contract):
  exact = HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(
      a, b, (contract, ((), ())), precision=exact, preferred_element_type=jnp.float32
  )


def seen(row_ref, at, key_ref):
  """[1, keys] of row `at`: rows are (first, last, segment), keys (position, segment)."""
  position, segment = key_ref[0, 0:1], key_ref[0, 1:2]
  in_reach = jnp.where(position >= row_ref[0, 0, at], 1, 0) * jnp.where(
      position <= row_ref[0, 1, at], 1, 0
  )
  return in_reach * jnp.where(segment == row_ref[0, 2, at], 1, 0) * jnp.where(segment > 0, 1, 0)


def _body(*refs, s: Sizes):
  # Input: SMEM [1, 3, block]; [1, block, N, H], [1, keys, H], [1, 2, keys], [N, 1].
  row_ref, q_ref, kv_ref, key_ref, sink_ref = refs[:5]
  # Output: [1, block, N, H], [1, block, N].
  out_ref, lse_ref = refs[5:7]
  # Scratch, two steps each: logits and probabilities [2, rows * N, keys], then columns spread over
  # lanes [2, rows * N, LANES]; and the keys transposed [H, keys].
  x_s, p_s, top_s, inverse, kt = refs[7:]
  n, r = s.heads, s.rows
  steps = s.steps
  sink = jnp.broadcast_to(sink_ref[...], (s.heads, LANES))
  lane = jax.lax.broadcasted_iota(jnp.int32, (n, n), 1)
  diagonal = jax.lax.broadcasted_iota(jnp.int32, (n, n), 0) == lane

  def scores(i, slot):
    q = q_ref[0, pl.ds(i * r, r)].reshape(r * n, -1)
    x = product(q, kt[...], ((1,), (0,)))
    for t in range(r):
      at = slice(t * n, (t + 1) * n)
      mask = seen(row_ref, i * r + t, key_ref)
      row = jnp.where(mask == 1, x[at] * s.scale, HIDDEN)
      x_s[slot, at] = row
      top = jnp.maximum(jnp.max(row, axis=1, keepdims=True), sink[:, :1])
      top_s[slot, at] = jnp.broadcast_to(top, (n, LANES))

  def softmax(i, slot):
    for t in range(r):
      at = slice(t * n, (t + 1) * n)
      top = top_s[slot, at]
      total = jnp.zeros((n, LANES), jnp.float32)
      for l in range(s.keys // LANES):
        lanes = slice(l * LANES, (l + 1) * LANES)
        p = jnp.exp(x_s[slot, at, lanes] - top)
        p_s[slot, at, lanes] = p.astype(p_s.dtype)
        total = total + p
      total = jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), (n, LANES)) + jnp.exp(
          sink - top
      )
      inverse[slot, at] = 1.0 / total
      # The column of heads, turned into lanes through the diagonal.
      lse = jnp.where(diagonal, (top + jnp.log(total))[:, :n], 0.0)
      lse_ref[0, pl.ds(i * r + t, 1)] = jnp.sum(lse, axis=0, keepdims=True)

  def values(i, slot):
    out = product(p_s[slot], kv_ref[0], ((1,), (0,)))
    for t in range(r):
      at = slice(t * n, (t + 1) * n)
      for l in range(out.shape[1] // LANES):
        lanes = slice(l * LANES, (l + 1) * LANES)
        out_ref[0, i * r + t, :, lanes] = (out[at, lanes] * inverse[slot, at]).astype(out_ref.dtype)

  kt[...] = kv_ref[0].T
  # Three steps in flight: nothing waits for the chain of product, softmax, product.
  scores(0, 0)
  softmax(0, 0)
  if steps > 1:
    scores(1, 1)
  pairs = max(steps - 2, 0) // 2

  @pl.loop(0, pairs)
  def _(j):
    for slot in range(2):
      i = 2 * j + slot
      values(i, slot)
      softmax(i + 1, 1 - slot)
      scores(i + 2, slot)

  for i in range(2 * pairs, steps):
    values(i, i % 2)
    if i + 1 < steps:
      softmax(i + 1, (i + 1) % 2)
    if i + 2 < steps:
      scores(i + 2, i % 2)


def sizes_of(
    rows: int, front: int, window: int, heads: int, channels: int, dtype, blocks: int, scale: float
) -> Sizes:  # fmt: skip
  """Of `rows` rows whose keys start `front` slots before them.

  Args:
    rows: T.
    front: slots before the rows, at least window − 1.
    window: W.
    heads: N.
    channels: H.
    dtype: of q.
    blocks: arrays of [block, N, H] that the kernel keeps in VMEM, each twice.
    scale: of the logits.

  Raises:
    ValueError: not even one step of rows fits.
  """
  a_step = min(rows, 4)
  row_bytes = 2 * blocks * heads * channels * jnp.dtype(dtype).itemsize
  block = a_step
  while block < min(rows, 128) and 2 * block * row_bytes <= BLOCK_BYTES:
    block *= 2
  if block * row_bytes > BLOCK_BYTES:
    raise ValueError(
        f"{heads} heads of {channels} channels: {a_step} rows need {block * row_bytes} bytes of "
        f"VMEM, and the budget is {BLOCK_BYTES}"
    )
  # Every block with a row that reaches back before the first reads all slots there, in any order.
  last = min(-(-(window - 1) // block), -(-rows // block)) - 1
  keys = -(-(front + block * (1 + max(last, 0))) // LANES) * LANES
  return Sizes(block, a_step, keys, heads, scale)


class Operands(NamedTuple):
  """Arrays in the shapes that the kernels read.

  Attributes:
    rows: [B, 3, nb * block], first and last position and segment of each row; 0 where padded.
    kv: [B, front + nb * block, H].
    keys: [B * nb, 2, keys], position and segment.
  """

  rows: jax.Array
  kv: jax.Array
  keys: jax.Array


def operands(s: Sizes, kv, first, last, segments, key_positions, key_segments) -> Operands:
  b, t = segments.shape
  nb = -(-t // s.block)
  before, after = s.front - (kv.shape[1] - t), nb * s.block - t
  kv = jnp.where((key_segments > 0)[..., None], kv, jnp.zeros((), kv.dtype))  # may hold NaN
  pad = lambda a: jnp.pad(a, ((0, 0), (before, after)) + ((0, 0),) * (a.ndim - 2))
  keys = jnp.stack([pad(key_positions), pad(key_segments)], axis=1)
  at = np.arange(nb)[:, None] * s.block + np.arange(s.keys)
  keys = jnp.moveaxis(keys[:, :, at], 1, 2)
  rows = jnp.pad(jnp.stack([first, last, segments], axis=1), ((0, 0), (0, 0), (0, after)))
  return Operands(rows, pad(kv), keys.reshape(b * nb, 2, s.keys))


def by_block(*shape):
  """Of arrays [B, T, ...], one block of rows."""
  return pl.BlockSpec((1, *shape), lambda b, i: (b, i) + (0,) * (len(shape) - 1))


def overlapping(s: Sizes, channels: int, blocks: int):
  """The block's keys: they begin `front` slots before its rows."""
  shape = (pl.Element(1), pl.Element(s.keys), pl.Element(channels))
  # Mosaic cannot prove that the start of an only block of one row is aligned.
  return pl.BlockSpec(shape, lambda b, i: (b, i * s.block if blocks > 1 else 0, 0))


@functools.partial(jax.jit, static_argnums=0)
def attend(s: Sizes, q, o: Operands, sink):
  """The output and log Σ exp [B, T, N], f32."""
  b, t, n, h = q.shape
  nb = o.keys.shape[0] // b
  vmem = lambda *shape, dtype=jnp.float32: pltpu.VMEM(shape, dtype)
  rows = o.rows.reshape(b, 3, nb, s.block).swapaxes(1, 2).reshape(b * nb, 3, s.block)
  return pl.pallas_call(
      functools.partial(_body, s=s),
      grid=(b, nb),
      in_specs=[
          pl.BlockSpec((1, 3, s.block), lambda b, i: (b * nb + i, 0, 0), memory_space=pltpu.SMEM),
          by_block(s.block, n, h),
          overlapping(s, h, nb),
          pl.BlockSpec((1, 2, s.keys), lambda b, i: (b * nb + i, 0, 0)),
          pl.BlockSpec((n, 1), lambda b, i: (0, 0)),
      ],
      out_specs=[by_block(s.block, n, h), by_block(s.block, n)],
      out_shape=[
          jax.ShapeDtypeStruct(q.shape, q.dtype),
          jax.ShapeDtypeStruct((b, t, n), jnp.float32),
      ],
      scratch_shapes=[
          vmem(2, s.rows * n, s.keys),
          vmem(2, s.rows * n, s.keys, dtype=q.dtype),
          vmem(2, s.rows * n, LANES),
          vmem(2, s.rows * n, LANES),
          vmem(h, s.keys, dtype=q.dtype),
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_LIMIT
      ),
      name="window_attention",
  )(rows, q, o.kv, o.keys, sink[:, None])
