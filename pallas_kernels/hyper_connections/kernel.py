"""One pass over the streams: the mix on the MXU, 16 tokens a block-diagonal matrix.

As vector operations, four streams times four weights bind the vector unit (205 modelled cycles a
token on v6e). As products [64, 128] × [128, D] with the weights in two bf16 halves they leave the
pass bound by HBM. Coefficients of a block are normalised while the next block is mixed, some
Sinkhorn rounds a chunk of channels, so that their chain of divisions is never waited for.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.hyper_connections import coefficients, kernel_few, reference
from pallas_kernels.hyper_connections.coefficients import (
    GROUP,
    LANES,
    SLOT,
    TERMS,
    Sizes,
    product,
    split,
)


def _body(*refs, s: Sizes, steps: int, update: bool, project: bool, saves: bool):
  refs = list(refs)
  take = lambda n, there=True: [refs.pop(0) if there else None for _ in range(n)]
  # Input: [block, MD], [block, D], [block, Z], [halves, Z, lanes]; [Z, MD], [Z, 2].
  (x_ref,), (y_ref,), (c_ref,), (spread_ref,) = take(1), take(1, update), take(1), take(1, update)
  fn_ref, affine_ref = take(2, project)
  # Output: [block, MD]; [block, D], [block, Z] of the block before; [SLOT, block].
  (xo_ref,), (u_ref, co_ref), (z_ref,) = take(1, update), take(2, project), take(1, saves)
  xo_ref = xo_ref if update else x_ref
  # Scratch: [2M, block, LANES], [groups, M * GROUP, halves * M * GROUP]; [TERMS * SLOT, MD],
  # [block, LANES], [TERMS * SLOT, block], [2M, block], [M, 8, block].
  wide, weights = take(2)
  parts, square, logits, gates, mix = take(5, project)
  step, m = pl.program_id(1), s.m
  exact = x_ref.dtype == jnp.float32
  chunks = s.d // s.width
  count = -(-(s.iterations - 1) // chunks)

  def stream(k, i, width=s.width, l=0):
    return pl.ds(pl.multiple_of(k * s.d + i * s.width + l * LANES, LANES), width)

  def prepare():
    for e in range(0 if project else m, 2 * m if update else m):
      wide[e] = jnp.broadcast_to(c_ref[:, e : e + 1], (s.block, LANES))
    if update:
      coefficients.block_diagonal(c_ref, spread_ref, weights, m)
    if project:
      square[...] = jnp.zeros_like(square)
      logits[...] = jnp.zeros_like(logits)

  refs = coefficients.Streams(x_ref, y_ref, xo_ref, u_ref, wide, weights, square)

  def mixed(i):
    coefficients.mix_chunk(refs, stream, i, s.width, m)

  def projected(i):
    each = (
        product(parts[:, at], xo_ref[:, at], ((1,), (1,)))
        for at in (stream(k, i) for k in range(m))
    )
    return functools.reduce(jnp.add, each)

  if not project:
    prepare()
    pl.loop(0, chunks)(mixed)
    return

  @pl.when(step == 0)
  def _():
    mix[...] = jnp.ones_like(mix)
    gates[...] = jnp.zeros_like(gates)

    @pl.loop(0, m * chunks)
    def _(i):
      at = stream(0, i)
      terms = [fn_ref[:, at]] if exact else split(fn_ref[:, at], TERMS)
      for p, term in enumerate(terms):
        parts[p * SLOT : p * SLOT + s.z, at] = term
        if s.z < SLOT:
          parts[p * SLOT + s.z : (p + 1) * SLOT, at] = jnp.zeros((SLOT - s.z, s.width), parts.dtype)

  @pl.when(step == steps)
  def _():
    @pl.loop(0, chunks)
    def _(i):
      coefficients.rounds(i * count, count, s, mix)

    coefficients.finish(co_ref, s, gates, mix)

  @pl.when(step < steps)
  def _():
    prepare()
    mixed(0)
    coefficients.rounds(0, count, s, mix)

    # The product of the chunk before needs nothing of this one: both units stay busy.
    @pl.loop(1, chunks)
    def _(i):
      z = projected(i - 1)
      mixed(i)
      coefficients.rounds(i * count, count, s, mix)
      logits[...] += z

    logits[...] += projected(chunks - 1)
    coefficients.finish(co_ref, s, gates, mix)
    mean = jnp.sum(square[...].T, axis=0, keepdims=True) / (m * s.d)
    z = sum(logits[p * SLOT : (p + 1) * SLOT] for p in range(logits.shape[0] // SLOT))
    r = jax.lax.rsqrt(mean + s.norm_eps)
    if saves:
      z_ref[: s.z] = (z * r)[: s.z]
      z_ref[s.z :] = jnp.broadcast_to(r, (SLOT - s.z, s.block))
    z = z * r
    coefficients.start(z, affine_ref[...], s, gates, mix)


def block_of(tokens: int, dtype) -> int:
  """Tokens a block: 256 keep the projection's 256-wide product full and fit 64 MiB of VMEM."""
  most = 256 if dtype == jnp.bfloat16 else 128
  return most if tokens > most else -(-tokens // GROUP) * GROUP


@functools.partial(jax.jit, static_argnames=("iterations", "eps", "norm_eps", "saves"))
def run(x, y, c, site, *, iterations, eps, norm_eps, saves):
  """[x'], [u, c'], [z] of flat tokens, as a list.

  Without y the streams stay and are no output; without a site (fn, scale, base) only the streams
  are. z [SLOT, tokens] holds the logits before `scale` and `base` in its first Z rows, below them
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
  m = reference.streams_of(c.shape[1])
  s = Sizes(m, md // m, iterations, eps, norm_eps, block_of(tokens, x.dtype))
  out = (kernel_few.run if tokens == s.block else _run)(x, y, c, site, s, saves)
  by_token = (y is not None) + 2 * (site is not None)
  return [a if tokens == real or i >= by_token else a[:real] for i, a in enumerate(out)]


def _run(x, y, c, site, s: Sizes, saves: bool):
  tokens, md = x.shape
  update, project, exact = y is not None, site is not None, x.dtype == jnp.float32
  halves, terms = (1, 1) if exact else (2, TERMS)
  blocks = pl.cdiv(tokens, s.block)
  cores = 2 if blocks % 2 == 0 else 1
  steps = blocks // cores

  now = lambda p, i: p * steps + jnp.minimum(i, steps - 1)
  before = lambda p, i: p * steps + jnp.maximum(i - 1, 0)
  by_block = lambda width, at=now: pl.BlockSpec((s.block, width), lambda p, i: (at(p, i), 0))
  whole = lambda a: pl.BlockSpec(
      a.shape, lambda p, i: (0,) * a.ndim, pipeline_mode=pl.Buffered(buffer_count=1)
  )
  struct, scratch = jax.ShapeDtypeStruct, pltpu.VMEM
  inputs, in_specs = [x, c], [by_block(md), by_block(s.z)]
  out_shape, out_specs = [], []
  if update:
    at = jnp.asarray(coefficients.spread(s.m, halves), jnp.float32 if exact else jnp.bfloat16)
    inputs, in_specs = [x, y, c, at], [by_block(md), by_block(s.d), by_block(s.z), whole(at)]
    out_shape, out_specs = [struct(x.shape, x.dtype)], [by_block(md)]
  scratches = [
      scratch((2 * s.m, s.block, LANES), jnp.float32),
      scratch((s.block // GROUP, s.m * GROUP, halves * s.m * GROUP), x.dtype),
  ]
  if project:
    fn, scale, base = site
    counts = np.array([s.m, s.m, s.m * s.m])
    affine = jnp.stack([jnp.repeat(scale, counts, total_repeat_length=s.z), base], axis=1)
    inputs, in_specs = [*inputs, fn, affine], [*in_specs, whole(fn), whole(affine)]
    out_shape += [struct((tokens, s.d), x.dtype), struct((tokens, s.z), jnp.float32)]
    out_specs += [by_block(s.d), by_block(s.z, before)]
    scratches.append(scratch((terms * SLOT, md), x.dtype))
    small = (s.block, LANES), (terms * SLOT, s.block), (2 * s.m, s.block), (s.m, 8, s.block)
    scratches += [scratch(shape, jnp.float32) for shape in small]
  if saves:
    out_shape.append(struct((SLOT, tokens), jnp.float32))
    out_specs.append(pl.BlockSpec((SLOT, s.block), lambda p, i: (0, now(p, i))))
  return pl.pallas_call(
      functools.partial(_body, s=s, steps=steps, update=update, project=project, saves=saves),
      grid=(cores, steps + 1 if project else steps),
      in_specs=in_specs,
      out_specs=out_specs,
      out_shape=out_shape,
      scratch_shapes=scratches,
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=coefficients.VMEM_LIMIT
      ),
      name=coefficients.name_of(update, project),
  )(*inputs)
