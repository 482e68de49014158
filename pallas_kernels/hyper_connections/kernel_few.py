"""The same pass over few tokens, one block: streams and weights arrive in chunks of channels.

All copies are started at once and awaited chunk by chunk, so that what is bound by HBM in the end
computes while it waits; results leave chunk by chunk. The chunks lie in one straight line of code,
which lets the compiler split the weights of one, project a second and mix a third at one time.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.hyper_connections import coefficients
from pallas_kernels.hyper_connections.coefficients import GROUP, LANES, SLOT, TERMS, Sizes, product

STRAIGHT = 40  # groups of tokens times chunks; more of them lie in a loop, as code would be long


def _column(row, n: int):
  """A row [1, n] as a column."""
  at = lambda axis: jax.lax.broadcasted_iota(jnp.int32, (n, n), axis)
  return jnp.sum(jnp.where(at(0) == at(1), row, 0.0), axis=1, keepdims=True)


def _affine(scale_ref, base_ref, s: Sizes):
  """Factors and summands of the logits, [Z, 2]."""
  row = jax.lax.broadcasted_iota(jnp.int32, (s.z, 1), 0)
  by_kind = jnp.where(row < 2 * s.m, scale_ref[1], scale_ref[2])
  factor = jnp.where(row < s.m, scale_ref[0], by_kind)
  return jnp.concatenate([factor, _column(base_ref[...], s.z)], axis=1)


def _body(*refs, s: Sizes, width: int, update: bool, project: bool, saves: bool):
  refs = list(refs)
  take = lambda n, there=True: [refs.pop(0) if there else None for _ in range(n)]
  # Input: [T, MD] and [T, D] in HBM, [T, Z], [halves, Z, lanes]; [Z, MD] in HBM, [3] in SMEM,
  # [1, Z].
  (x_hbm,), (y_hbm,), (c_ref,), (spread_ref,) = take(1), take(1, update), take(1), take(1, update)
  fn_hbm, scale_ref, base_ref = take(3, project)
  # Output: [T, MD] in HBM; [T, D] in HBM, [T, Z]; [SLOT, T].
  (xo_hbm,), (u_hbm, co_ref), (z_ref,) = take(1, update), take(2, project), take(1, saves)
  # Scratch: a semaphore a chunk; in VMEM what lies in HBM; [2M, T, LANES], [groups, M * GROUP,
  # halves * M * GROUP]; [T, LANES], [terms * Z, T], [2M, T], [M, 8, T].
  arrived, left, x_ref = take(3)
  y_ref, xo_ref = take(2, update)
  xo_ref = xo_ref if update else x_ref
  u_ref, fn_ref = take(2, project)
  wide, weights = take(2)
  square, logits, gates, mix = take(4, project)
  m, exact = s.m, x_ref.dtype == jnp.float32
  chunks, groups = s.d // width, s.block // GROUP

  def at(k, i, size=width, l=0):
    start = k * s.d + i * width + l * LANES
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, LANES), size)

  def copies(pairs, i, semaphores):
    return [
        pltpu.make_async_copy(a.at[:, at(k, i)], b.at[:, at(k, i)], semaphores.at[i])
        for a, b, streams in pairs
        if a is not None and b is not None
        for k in range(streams)
    ]

  def arrivals(i):
    return copies([(x_hbm, x_ref, m), (y_hbm, y_ref, 1), (fn_hbm, fn_ref, m)], i, arrived)

  def departures(i):
    return copies([(u_ref, u_hbm, 1), (xo_ref if update else None, xo_hbm, m)], i, left)

  def each(first, last, function):
    if groups * chunks > STRAIGHT:
      pl.loop(first, last)(function)
    else:
      for i in range(first, last):
        function(i)

  streams = coefficients.Streams(x_ref, y_ref, xo_ref, u_ref, wide, weights, square)

  def projected(i):
    total = 0.0
    for k in range(m):
      fn = fn_ref[:, at(k, i)]
      terms = fn if exact else jnp.concatenate(coefficients.split(fn, TERMS), 0)
      total = total + product(terms, xo_ref[:, at(k, i)], ((1,), (1,)))
    logits[...] += total

  @functools.partial(each, 0, chunks)
  def _(i):
    for copy in arrivals(i):
      copy.start()

  if project:
    square[...] = jnp.zeros_like(square)
    logits[...] = jnp.zeros_like(logits)
    affine = _affine(scale_ref, base_ref, s)
  for e in range(0 if project else m, 2 * m if update else m):
    wide[e] = jnp.broadcast_to(c_ref[:, e : e + 1], (s.block, LANES))
  if update:
    coefficients.block_diagonal(c_ref, spread_ref, weights, m)

  def chunk(i, before: bool = True):
    for copy in arrivals(i):
      copy.wait()
    coefficients.mix_chunk(streams, at, i, width, m)
    # The product of the chunk before needs nothing of this one.
    if before and project:
      projected(i - 1)
    for copy in departures(i):
      copy.start()

  chunk(0, before=False)
  each(1, chunks, chunk)
  if project:
    projected(chunks - 1)
    mean = jnp.sum(square[...].T, axis=0, keepdims=True) / (m * s.d)
    z = sum(logits[p * s.z : (p + 1) * s.z] for p in range(logits.shape[0] // s.z))
    r = jax.lax.rsqrt(mean + s.norm_eps)
    z = z * r
    if saves:
      z_ref[: s.z] = z
      z_ref[s.z :] = jnp.broadcast_to(r, (SLOT - s.z, s.block))
    coefficients.start(z, affine, s, gates, mix)
    coefficients.rounds(0, s.iterations - 1, s, mix)
    coefficients.finish(co_ref, s, gates, mix)

  @functools.partial(each, 0, chunks)
  def _(i):
    for copy in departures(i):
      copy.wait()


def width_of(s: Sizes) -> int:
  """Channels of a chunk: some 16K values of a stream, not less than 512 channels where possible."""
  fitting = [w for w in range(LANES, s.d + 1, LANES) if s.d % w == 0]
  return max(w for w in fitting if w <= max(512, 2**14 // s.block))


def run(x, y, c, site, s: Sizes, saves: bool):
  """See `kernel.run`; tokens are a multiple of GROUP."""
  tokens, md = x.shape
  update, project, exact = y is not None, site is not None, x.dtype == jnp.float32
  halves, terms = (1, 1) if exact else (2, TERMS)
  width = width_of(s)
  hbm, vmem = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.VMEM))
  struct, scratch = jax.ShapeDtypeStruct, pltpu.VMEM
  inputs, in_specs = [x, c], [hbm, vmem]
  out_shape, out_specs = [], []
  scratches = [pltpu.SemaphoreType.DMA((s.d // width,))] * 2 + [scratch((tokens, md), x.dtype)]
  if update:
    at = jnp.asarray(coefficients.spread(s.m, halves), jnp.float32 if exact else jnp.bfloat16)
    inputs, in_specs = [x, y, c, at], [hbm, hbm, vmem, vmem]
    out_shape, out_specs = [struct(x.shape, x.dtype)], [hbm]
    scratches += [scratch((tokens, s.d), x.dtype), scratch((tokens, md), x.dtype)]
  if project:
    fn, scale, base = site
    inputs += [fn, scale, base[None]]
    in_specs += [hbm, pl.BlockSpec(memory_space=pltpu.SMEM), vmem]
    out_shape += [struct((tokens, s.d), x.dtype), struct((tokens, s.z), jnp.float32)]
    out_specs += [hbm, vmem]
    scratches += [scratch((tokens, s.d), x.dtype), scratch((s.z, md), jnp.float32)]
  if saves:
    out_shape.append(struct((SLOT, tokens), jnp.float32))
    out_specs.append(vmem)
  scratches += [
      scratch((2 * s.m, tokens, LANES), jnp.float32),
      scratch((tokens // GROUP, s.m * GROUP, halves * s.m * GROUP), x.dtype),
  ]
  if project:
    small = [(tokens, LANES), (terms * s.z, tokens), (2 * s.m, tokens), (s.m, 8, tokens)]
    scratches += [scratch(shape, jnp.float32) for shape in small]
  return pl.pallas_call(
      functools.partial(_body, s=s, width=width, update=update, project=project, saves=saves),
      in_specs=in_specs,
      out_specs=out_specs,
      out_shape=out_shape,
      scratch_shapes=scratches,
      compiler_params=pltpu.CompilerParams(vmem_limit_bytes=coefficients.VMEM_LIMIT),
      name=coefficients.name_of(update, project),
  )(*inputs)
