"""One pass over the streams: the mix on the MXU, 16 tokens a block-diagonal matrix.

As vector operations, four streams times four weights bind the vector unit (205 modelled cycles a
token on v6e). As products [64, 128] × [128, D] with the weights in two bf16 halves they leave the
pass bound by HBM. Coefficients of a block are normalised while the next block is mixed, some
Sinkhorn rounds a chunk of channels, so that their chain of divisions is never waited for.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.hyper_connections import reference

LANES = 128
GROUP = 16  # tokens a product
SLOT = 32  # rows of logits, Z of them in use
PARTS = 3  # bf16 terms that sum to an f32 of `fn`

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


def _row_sums(x, m):
  """Over the m rows of a matrix row, which repeat 8 / m times."""
  for shift in (1, 2)[: m.bit_length() - 1]:
    x = x + pltpu.roll(x, shift, 0)
  return x


def _row_max(x, m):
  for shift in (1, 2)[: m.bit_length() - 1]:
    x = jnp.maximum(x, pltpu.roll(x, shift, 0))
  return x


def _columns(rows, eps):
  r = 1.0 / (sum(rows[1:], rows[0]) + eps)
  return [x * r for x in rows]


def _start(z, affine, s, gates, mix):
  """Sigmoids, and the matrices after softmax and the first column normalisation."""
  m = s.m
  z = z[: s.z] * affine[:, 0:1] + affine[:, 1:2]
  gate = 1.0 / (1.0 + jnp.exp(-z[: 2 * m]))
  gates[:m], gates[m : 2 * m] = gate[:m] + s.eps, 2.0 * gate[m:]
  rows = []
  for j in range(m):
    x = jnp.concatenate([z[2 * m + j * m : 2 * m + (j + 1) * m]] * (8 // m), 0)
    p = jnp.exp(x - _row_max(x, m))
    rows.append(p / _row_sums(p, m) + s.eps)
  for j, x in enumerate(_columns(rows, s.eps)):
    mix[j] = x


def _round(first, rounds, s, mix):
  """`rounds` rounds of the matrices in `mix`, as far as there are `iterations` − 1 in all."""
  before = [mix[j] for j in range(s.m)]
  for q in range(rounds):
    rows = _columns([x / (_row_sums(x, s.m) + s.eps) for x in before], s.eps)
    if isinstance(first, int):
      before = rows if first + q < s.iterations - 1 else before
    else:
      go = first + q < s.iterations - 1
      before = [jnp.where(go, new, old) for new, old in zip(rows, before)]
  for j in range(s.m):
    mix[j] = before[j]


def _finish(co_ref, s, gates, mix):
  rows = [gates[: 2 * s.m], *(mix[j, : s.m] for j in range(s.m))]
  rows.append(jnp.zeros((SLOT - s.z, s.block), jnp.float32))
  co_ref[...] = jnp.concatenate(rows, 0).T[:, : s.z]


def _body(*refs, s: Sizes, steps: int, update: bool, saves: bool):
  refs = list(refs)
  take = lambda n: [refs.pop(0) for _ in range(n)]
  # Input: [block, MD], [block, D], [block, Z], [Z, MD], [Z, 2], [halves, Z, lanes].
  (x_ref,) = take(1)
  (y_ref,) = take(1) if update else (None,)
  c_ref, fn_ref, affine_ref = take(3)
  (spread_ref,) = take(1) if update else (None,)
  # Output: [block, MD], [block, D], [block, Z] of the block before, [SLOT, block].
  (xo_ref,) = take(1) if update else (x_ref,)
  u_ref, co_ref = take(2)
  (z_ref,) = take(1) if saves else (None,)
  # Scratch: [2M, block, LANES], [groups, M * GROUP, halves * M * GROUP], [PARTS * SLOT, MD],
  # [block, LANES], [PARTS * SLOT, block], [2M, block], [M, 8, block].
  wide, weights, parts, square, logits, gates, mix = refs
  step, m, f32 = pl.program_id(1), s.m, jnp.float32
  exact = x_ref.dtype == f32
  chunks = s.d // s.width
  rounds = -(-(s.iterations - 1) // chunks)

  def stream(k, i, width=s.width, l=0):
    return pl.ds(pl.multiple_of(k * s.d + i * s.width + l * LANES, LANES), width)

  @pl.when(step == 0)
  def _():
    mix[...] = jnp.ones_like(mix)
    gates[...] = jnp.zeros_like(gates)

    @pl.loop(0, m * chunks)
    def _(i):
      at = stream(0, i)
      terms = [fn_ref[:, at]] if exact else split(fn_ref[:, at], PARTS)
      for p, term in enumerate(terms):
        parts[p * SLOT : p * SLOT + s.z, at] = term
        if s.z < SLOT:
          parts[p * SLOT + s.z : (p + 1) * SLOT, at] = jnp.zeros((SLOT - s.z, s.width), parts.dtype)

  @pl.when(step == steps)
  def _():
    @pl.loop(0, chunks)
    def _(i):
      _round(i * rounds, rounds, s, mix)

    _finish(co_ref, s, gates, mix)

  def prepare():
    for e in range(2 * m if update else m):
      wide[e] = jnp.broadcast_to(c_ref[:, e : e + 1], (s.block, LANES))
    square[...] = jnp.zeros_like(square)
    logits[...] = jnp.zeros_like(logits)
    if not update:
      return
    block_diagonal(c_ref, spread_ref, weights, m)

  def mixed(i):
    for g in range(s.block // GROUP):
      rows = slice(g * GROUP, (g + 1) * GROUP)
      if update:
        xs = [x_ref[rows, stream(k, i)] for k in range(m)]
        new = product(weights[g], jnp.concatenate(xs if exact else xs + xs, 0), ((1,), (0,)))
      total = square[rows]
      for l in range(s.width // LANES):
        one = stream(0, i, LANES, l)
        y = y_ref[rows, one].astype(f32) if update else None
        u = 0.0
        for k in range(m):
          at = stream(k, i, LANES, l)
          if update:
            v = wide[m + k, rows] * y
            v = v + new[k * GROUP : (k + 1) * GROUP, l * LANES : (l + 1) * LANES]
            xo_ref[rows, at] = v.astype(xo_ref.dtype)
          else:
            v = x_ref[rows, at].astype(f32)
          total = total + v * v
          u = u + wide[k, rows] * v
        u_ref[rows, one] = u.astype(u_ref.dtype)
      square[rows] = total

  def projected(i):
    each = (
        product(parts[:, at], xo_ref[:, at], ((1,), (1,)))
        for at in (stream(k, i) for k in range(m))
    )
    return functools.reduce(jnp.add, each)

  @pl.when(step < steps)
  def _():
    prepare()
    mixed(0)
    _round(0, rounds, s, mix)

    # The product of the chunk before needs nothing of this one: both units stay busy.
    @pl.loop(1, chunks)
    def _(i):
      z = projected(i - 1)
      mixed(i)
      _round(i * rounds, rounds, s, mix)
      logits[...] += z

    logits[...] += projected(chunks - 1)
    _finish(co_ref, s, gates, mix)
    mean = jnp.sum(square[...].T, axis=0, keepdims=True) / (m * s.d)
    z = sum(logits[p * SLOT : (p + 1) * SLOT] for p in range(logits.shape[0] // SLOT))
    r = jax.lax.rsqrt(mean + s.norm_eps)
    if saves:
      z_ref[: s.z] = (z * r)[: s.z]
      z_ref[s.z :] = jnp.broadcast_to(r, (SLOT - s.z, s.block))
    z = z * r
    _start(z, affine_ref[...], s, gates, mix)


def block_of(tokens: int, dtype) -> int:
  """Tokens a block: 256 keep the projection's 256-wide product full and fit 64 MiB of VMEM."""
  most = 256 if dtype == jnp.bfloat16 else 128
  return most if tokens > most else -(-tokens // GROUP) * GROUP


def run(x, y, c, fn, scale, base, *, iterations, eps, norm_eps, saves):
  """(x', u, c'[, z]) of flat tokens; without y the streams stay and are no output.

  z [SLOT, tokens] holds the logits before `scale` and `base` in its first Z rows, below them
  1 / rms of the streams.

  Tokens are padded to a multiple of GROUP: a product mixes what lies in its 16 rows with zero
  weights, and 0 times the NaN of a row that does not exist is NaN.
  """
  real, md = x.shape
  tokens = -(-real // GROUP) * GROUP
  x, y, c = (
      a if a is None or tokens == real else jnp.pad(a, ((0, tokens - real), (0, 0)))
      for a in (x, y, c)
  )
  m = reference.streams_of(fn)
  s = Sizes(m, md // m, iterations, eps, norm_eps, block_of(tokens, x.dtype))
  update, exact = y is not None, x.dtype == jnp.float32
  counts = np.array([m, m, m * m])
  affine = jnp.stack([jnp.repeat(scale, counts, total_repeat_length=s.z), base], axis=1)
  halves, terms = (1, 1) if exact else (2, PARTS)
  blocks = pl.cdiv(tokens, s.block)
  cores = 2 if blocks % 2 == 0 else 1
  steps = blocks // cores

  now = lambda p, i: p * steps + jnp.minimum(i, steps - 1)
  before = lambda p, i: p * steps + jnp.maximum(i - 1, 0)
  by_block = lambda width, at=now: pl.BlockSpec((s.block, width), lambda p, i: (at(p, i), 0))
  whole = lambda a: pl.BlockSpec(
      a.shape, lambda p, i: (0,) * a.ndim, pipeline_mode=pl.Buffered(buffer_count=1)
  )
  inputs, in_specs = [x], [by_block(md)]
  out_shape, out_specs = [], []
  if update:
    inputs, in_specs = [x, y], [by_block(md), by_block(s.d)]
    out_shape, out_specs = [jax.ShapeDtypeStruct(x.shape, x.dtype)], [by_block(md)]
  inputs += [c, fn, affine]
  in_specs += [by_block(s.z), whole(fn), whole(affine)]
  if update:
    at = jnp.asarray(spread(m, halves), jnp.float32 if exact else jnp.bfloat16)
    inputs, in_specs = [*inputs, at], [*in_specs, whole(at)]
  out_shape += [
      jax.ShapeDtypeStruct((tokens, s.d), x.dtype),
      jax.ShapeDtypeStruct((tokens, s.z), jnp.float32),
  ]
  out_specs += [by_block(s.d), by_block(s.z, before)]
  if saves:
    out_shape.append(jax.ShapeDtypeStruct((SLOT, tokens), jnp.float32))
    out_specs.append(pl.BlockSpec((SLOT, s.block), lambda p, i: (0, now(p, i))))
  vmem = lambda *shape, dtype=jnp.float32: pltpu.VMEM(shape, dtype)
  out = pl.pallas_call(
      functools.partial(_body, s=s, steps=steps, update=update, saves=saves),
      grid=(cores, steps + 1),
      in_specs=in_specs,
      out_specs=out_specs,
      out_shape=out_shape,
      scratch_shapes=[
          vmem(2 * m, s.block, LANES),
          vmem(s.block // GROUP, m * GROUP, halves * m * GROUP, dtype=x.dtype),
          vmem(terms * SLOT, md, dtype=x.dtype),
          vmem(s.block, LANES),
          vmem(terms * SLOT, s.block),
          vmem(2 * m, s.block),
          vmem(m, 8, s.block),
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
      ),
      name="hyper_connections_update" if update else "hyper_connections_enter",
  )(*inputs)
  return out if tokens == real else [*(a[:real] for a in out[: 2 + update]), *out[2 + update :]]
