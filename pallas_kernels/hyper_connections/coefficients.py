"""Coefficients of a block of tokens: as weights of the mix on the MXU, and from their logits."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

LANES = 128
GROUP = 16  # tokens a product
SLOT = 32  # rows of logits, Z of them in use
TERMS = 2  # bf16 terms of an f32 of `fn`: they lose 2^-17 of it; streams of bf16 lost 2^-9

VMEM_LIMIT = 62 * 2**20  # of the 64 MiB of v5p and TPU7x

HIGHEST = jax.lax.Precision.HIGHEST


class Sizes(NamedTuple):
  """Static facts: streams, channels a stream, rounds, small numbers, tokens a block."""

  m: int
  d: int
  iterations: int
  eps: float
  norm_eps: float
  block: int

  @property
  def z(self) -> int:
    return (2 + self.m) * self.m

  @property
  def width(self) -> int:
    """Channels a step of the inner loop."""
    return next(w for w in (512, 256, 128) if self.d % w == 0)


def spread(m: int, halves: int) -> np.ndarray:
  """0/1 [halves, Z, m * halves * m * GROUP]: lane (k, half, j, token) takes mix[j, k]."""
  at = np.zeros((halves, (2 + m) * m, m, halves, m, GROUP), np.float32)
  for half in range(halves):
    for j in range(m):
      for k in range(m):
        at[half, 2 * m + j * m + k, k, half, j] = 1
  return at.reshape(halves, (2 + m) * m, -1)


def split(x, parts):
  """Bf16 terms, largest first, that sum to the f32 x."""
  out = []
  for _ in range(parts):
    out.append(x.astype(jnp.bfloat16))
    x = x - out[-1].astype(jnp.float32)
  return out


def product(a, b, contract):
  """f32 product; exact of f32 operands."""
  exact = HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(
      a, b, (contract, ((), ())), precision=exact, preferred_element_type=jnp.float32
  )


def block_diagonal(c_ref, spread_ref, weights, outputs):
  """Fills `weights` [groups, outputs * GROUP, halves * M * GROUP]: one token a diagonal."""
  depth = weights.shape[2]
  row = jax.lax.broadcasted_iota(jnp.int32, (GROUP, depth), 0)
  lane = jax.lax.broadcasted_iota(jnp.int32, (GROUP, depth), 1)
  diagonal = row == (lane & (GROUP - 1))
  halves = [c_ref[...]] if weights.dtype == jnp.float32 else split(c_ref[...], 2)
  for k in range(outputs):
    lanes = slice(k * depth, (k + 1) * depth)
    a = sum(product(h, spread_ref[i, :, lanes], ((1,), (0,))) for i, h in enumerate(halves))
    for g in range(weights.shape[0]):
      own = jnp.where(diagonal, a[g * GROUP : (g + 1) * GROUP], 0.0)
      weights[g, k * GROUP : (k + 1) * GROUP] = own.astype(weights.dtype)


class Streams(NamedTuple):
  """What `mix_chunk` reads and writes, refs of a block of tokens; None where a pass has none.

  Attributes:
    x: streams, [block, MD].
    y: result of the sub-layer, [block, D]; None: streams stay.
    xo: new streams.
    u: their collapse, [block, D]; None: no sub-layer follows.
    wide: coefficients over lanes, [2M, block, LANES].
    weights: of `block_diagonal`.
    square: sums of squares, [block, LANES].
  """

  x: jax.Array
  y: jax.Array | None
  xo: jax.Array
  u: jax.Array | None
  wide: jax.Array
  weights: jax.Array
  square: jax.Array | None


def mix_chunk(r: Streams, at, i, width: int, m: int):
  """Chunk i of `width` channels: new streams, their collapse and squares.

  `at(k, i, size, l)` are `size` channels of stream k from tile l of the chunk on.
  """
  f32 = jnp.float32
  for g in range(r.weights.shape[0]):
    rows = slice(g * GROUP, (g + 1) * GROUP)
    if r.y is not None:
      xs = [r.x[rows, at(k, i)] for k in range(m)]
      xs = xs if r.x.dtype == f32 else xs + xs
      new = product(r.weights[g], jnp.concatenate(xs, 0), ((1,), (0,)))
    total = None if r.u is None else r.square[rows]
    for l in range(width // LANES):
      one = at(0, i, LANES, l)
      y = None if r.y is None else r.y[rows, one].astype(f32)
      u = 0.0
      for k in range(m):
        here = at(k, i, LANES, l)
        if r.y is not None:
          v = r.wide[m + k, rows] * y
          v = v + new[k * GROUP : (k + 1) * GROUP, l * LANES : (l + 1) * LANES]
          r.xo[rows, here] = v.astype(r.xo.dtype)
        else:
          v = r.x[rows, here].astype(f32)
        if r.u is not None:
          total = total + v * v
          u = u + r.wide[k, rows] * v
      if r.u is not None:
        r.u[rows, one] = u.astype(r.u.dtype)
    if r.u is not None:
      r.square[rows] = total


def _row_sums(x, m, eps):
  """Over the m rows of a matrix row, which repeat 8 / m times, and eps."""
  for shift in (2, 1)[2 - (m.bit_length() - 1) : -1]:
    x = x + pltpu.roll(x, shift, 0)
  # Beside the rotation, not behind it: this is the longest chain of the kernel.
  return (x + eps) + pltpu.roll(x, 1, 0)


def _row_max(x, m):
  for shift in (1, 2)[: m.bit_length() - 1]:
    x = jnp.maximum(x, pltpu.roll(x, shift, 0))
  return x


def _columns(rows, eps):
  pairs = [a + b for a, b in zip(rows[::2], rows[1::2])]
  r = 1.0 / functools.reduce(jnp.add, [pairs[0] + eps, *pairs[1:]])
  return [x * r for x in rows]


def start(z, affine, s, gates, mix):
  """Sigmoids, and the matrices after softmax and the first column normalisation."""
  m = s.m
  z = z[: s.z] * affine[:, 0:1] + affine[:, 1:2]
  gate = 1.0 / (1.0 + jnp.exp(-z[: 2 * m]))
  gates[:m], gates[m : 2 * m] = gate[:m] + s.eps, 2.0 * gate[m:]
  rows = []
  for j in range(m):
    x = jnp.concatenate([z[2 * m + j * m : 2 * m + (j + 1) * m]] * (8 // m), 0)
    p = jnp.exp(x - _row_max(x, m))
    rows.append(p / _row_sums(p, m, 0.0) + s.eps)
  for j, x in enumerate(_columns(rows, s.eps)):
    mix[j] = x


def rounds(first, count, s, mix):
  """`count` rounds of the matrices in `mix`, as far as there are `iterations` − 1 in all."""
  before = [mix[j] for j in range(s.m)]
  for q in range(count):
    rows = _columns([x / _row_sums(x, s.m, s.eps) for x in before], s.eps)
    if isinstance(first, int):
      before = rows if first + q < s.iterations - 1 else before
    else:
      go = first + q < s.iterations - 1
      before = [jnp.where(go, new, old) for new, old in zip(rows, before)]
  for j in range(s.m):
    mix[j] = before[j]


def finish(co_ref, s, gates, mix):
  """Writes the coefficients [block, Z]."""
  rows = [gates[: 2 * s.m], *(mix[j, : s.m] for j in range(s.m))]
  rows.append(jnp.zeros((SLOT - s.z, s.block), jnp.float32))
  co_ref[...] = jnp.concatenate(rows, 0).T[:, : s.z]


def name_of(update: bool, project: bool) -> str:
  """Name of the kernel."""
  what = ("update" if project else "leave") if update else "enter"
  return f"hyper_connections_{what}"
