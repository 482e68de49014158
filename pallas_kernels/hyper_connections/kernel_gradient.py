"""Gradient of one pass, in one pass: (4n + 3)·d values a token read and written.

What is summed over channels for a token (d pre, d post, d mix) is the diagonal of products of 16
tokens with themselves; what is summed over streams is a block-diagonal product as in `kernel`. Both
take the score s_k, the whole gradient of x'_k, rounded to the streams' dtype.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.hyper_connections import coefficients, reference
from pallas_kernels.hyper_connections.coefficients import GROUP, LANES, SLOT, Sizes, product, split


def spread(m: int, halves: int) -> np.ndarray:
  """As `coefficients.spread`: outputs x_0.., y of inputs s_k; lane (output, half, k, token)."""
  at = np.zeros((halves, (2 + m) * m, m + 1, halves, m, GROUP), np.float32)
  for half in range(halves):
    for k in range(m):
      at[half, m + k, m, half, k] = 1
      for j in range(m):
        at[half, 2 * m + j * m + k, j, half, k] = 1
  return at.reshape(halves, (2 + m) * m, -1)


def _body(*refs, s: Sizes, update: bool):
  refs = list(refs)
  take = lambda n: [refs.pop(0) for _ in range(n)]
  # Input: x' [block, MD], d u [block, D], c [block, Z], pull [block, 1], terms of g [block, LANES],
  # fn [Z, MD]; then x [block, MD], y [block, D], d x' [block, MD], spread [halves, Z, lanes].
  xo_ref, du_ref, c_ref, pull_ref, g_ref, fn_ref = take(6)
  x_ref, y_ref, dxo_ref, spread_ref = take(4) if update else [None] * 4
  # Output: d x [block, MD], d fn of this core [1, SLOT, MD], pairs [groups, left * GROUP, right *
  # GROUP]; d y [block, D].
  dx_ref, dfn_ref, pairs_ref = take(3)
  dy_ref = refs.pop(0) if update else None
  # Scratch: [M + 1, block, LANES], [LANES, MD], scores [block, M * width]; [groups,
  # (M + 1) * GROUP, halves * M * GROUP].
  wide, parts, score = take(3)
  weights = refs.pop(0) if update else None
  m, f32, w = s.m, jnp.float32, s.width
  exact = xo_ref.dtype == f32
  groups = s.block // GROUP

  @pl.when(pl.program_id(1) == 0)
  def _():
    dfn_ref[...] = jnp.zeros_like(dfn_ref)
    parts[...] = jnp.zeros_like(parts)

    @pl.loop(0, m * s.d // w)
    def _(i):
      at = pl.ds(pl.multiple_of(i * w, w), w)
      if exact:
        parts[: s.z, at] = fn_ref[:, at]
      else:
        high, low = split(fn_ref[:, at], 2)
        for p, term in enumerate((high, high, low)):
          parts[p * SLOT : p * SLOT + s.z, at] = term

  for k in range(m):
    wide[k] = jnp.broadcast_to(c_ref[:, k : k + 1], (s.block, LANES))
  wide[m] = jnp.broadcast_to(pull_ref[...], (s.block, LANES))
  pairs_ref[...] = jnp.zeros_like(pairs_ref)
  if update:
    coefficients.block_diagonal(c_ref, spread_ref, weights, m + 1)

  @pl.loop(0, s.d // w)
  def _(i):
    at = [pl.ds(pl.multiple_of(k * s.d + i * w, LANES), w) for k in range(m)]
    for k in range(m):
      through = product(g_ref[...], parts[:, at[k]], ((1,), (0,)))
      for l in range(w // LANES):
        lanes = slice(l * LANES, (l + 1) * LANES)
        here = pl.ds(pl.multiple_of(k * s.d + i * w + l * LANES, LANES), LANES)
        du = du_ref[:, pl.ds(pl.multiple_of(i * w + l * LANES, LANES), LANES)].astype(f32)
        v = through[:, lanes] + wide[k] * du - wide[m] * xo_ref[:, here].astype(f32)
        if update:
          v = v + dxo_ref[:, here].astype(f32)
        score[:, k * w + l * LANES : k * w + (l + 1) * LANES] = v.astype(score.dtype)
      d = product(g_ref[...], xo_ref[:, at[k]], ((0,), (0,)))
      dfn_ref[0, :, at[k]] += d[:SLOT] if exact else d[:SLOT] + d[SLOT : 2 * SLOT]
      if not update:
        dx_ref[:, at[k]] = score[:, k * w : (k + 1) * w]
    for g in range(groups):
      rows = slice(g * GROUP, (g + 1) * GROUP)
      du, xos = du_ref[rows, at[0]], [xo_ref[rows, a] for a in at]
      if not update:
        pairs_ref[g] += product(du, jnp.concatenate(xos, 0), ((1,), (1,)))
        continue
      scores = [score[rows, k * w : (k + 1) * w] for k in range(m)]
      right = [x_ref[rows, a] for a in at] + [y_ref[rows, at[0]]] + xos
      pairs_ref[g] += product(
          jnp.concatenate([*scores, du], 0), jnp.concatenate(right, 0), ((1,), (1,))
      )
      out = product(weights[g], jnp.concatenate(scores if exact else scores * 2, 0), ((1,), (0,)))
      for j in range(m):
        dx_ref[rows, at[j]] = out[j * GROUP : (j + 1) * GROUP].astype(dx_ref.dtype)
      dy_ref[rows, at[0]] = out[m * GROUP :].astype(dy_ref.dtype)


@functools.partial(jax.jit, static_argnames=("iterations", "eps", "norm_eps"))
def run(x, y, xo, c, fn, dxo, du, g, pull, *, iterations, eps, norm_eps):
  """(d x, d y or None, d fn, d c) of flat tokens; without y, x' is x.

  Args:
    x: streams before the update, or None.
    y: sub-layer's output, or None.
    xo: x'.
    c: coefficients.
    fn: of the projection.
    dxo: cotangent of x', or None.
    du: cotangent of u.
    g: [T, Z], cotangent of fn·x'.
    pull: [T, 1], what the mean square takes off: s_k = … − pull·x'_k.
    iterations: unused here, like `eps` and `norm_eps`.
    eps: see `iterations`.
    norm_eps: see `iterations`.
  """
  tokens, md = xo.shape
  m, exact, update = reference.streams_of(fn.shape[0]), xo.dtype == jnp.float32, y is not None
  block = min(64 if not exact else 32, -(-tokens // GROUP) * GROUP)
  s = Sizes(m, md // m, iterations, eps, norm_eps, block)
  after = -tokens % block
  pad = lambda a: jnp.pad(a, ((0, after), (0, 0))) if after else a
  halves = 1 if exact else 2
  terms = [g] if exact else [(t := split(g, 2))[0], t[1], t[0]]
  terms = [jnp.pad(t, ((0, 0), (0, SLOT - s.z))) for t in terms]
  terms = jnp.pad(jnp.concatenate(terms, 1), ((0, 0), (0, LANES - SLOT * len(terms))))
  inputs = [xo, du, c, pull, terms]
  if update:
    at = jnp.asarray(spread(m, halves), xo.dtype)
    inputs = [*map(pad, inputs), fn, *map(pad, (x, y, dxo)), at]
  else:
    inputs = [*map(pad, inputs), fn]
  blocks = (tokens + after) // block
  cores = 2 if blocks % 2 == 0 else 1
  steps, groups = blocks // cores, block // GROUP
  by_block = lambda width: pl.BlockSpec((block, width), lambda p, i: (p * steps + i, 0))
  whole = lambda a: pl.BlockSpec(
      a.shape, lambda p, i: (0,) * a.ndim, pipeline_mode=pl.Buffered(buffer_count=1)
  )
  in_specs = [whole(a) if a is fn or a.ndim == 3 else by_block(a.shape[1]) for a in inputs]
  left, right = (m + 1, 2 * m + 1) if update else (1, m)
  struct = jax.ShapeDtypeStruct
  out_shape = [
      struct((tokens + after, md), xo.dtype),
      struct((cores, SLOT, md), jnp.float32),
      struct((blocks * groups, left * GROUP, right * GROUP), jnp.float32),
  ]
  out_specs = [
      by_block(md),
      pl.BlockSpec((1, SLOT, md), lambda p, i: (p, 0, 0)),
      pl.BlockSpec((groups, left * GROUP, right * GROUP), lambda p, i: (p * steps + i, 0, 0)),
  ]
  scratch = [
      pltpu.VMEM((m + 1, block, LANES), jnp.float32),
      pltpu.VMEM((LANES, md), xo.dtype),
      pltpu.VMEM((block, m * s.width), xo.dtype),
  ]
  if update:
    out_shape.append(struct((tokens + after, s.d), y.dtype))
    out_specs.append(by_block(s.d))
    scratch.append(pltpu.VMEM((groups, (m + 1) * GROUP, halves * m * GROUP), xo.dtype))
  dx, dfn, pairs, *dy = pl.pallas_call(
      functools.partial(_body, s=s, update=update),
      grid=(cores, steps),
      in_specs=in_specs,
      out_specs=out_specs,
      out_shape=out_shape,
      scratch_shapes=scratch,
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=coefficients.VMEM_LIMIT
      ),
      name="hyper_connections_gradient",
  )(*inputs)
  pairs = pairs.reshape(-1, left, GROUP, right, GROUP)
  pairs = jnp.einsum("galbl->glab", pairs).reshape(-1, left, right)[:tokens]
  dpre = pairs[:, -1, right - m :]
  if update:
    rest = [pairs[:, :m, m], pairs[:, :m, :m].swapaxes(1, 2).reshape(tokens, m * m)]
  else:
    rest = [jnp.zeros((tokens, s.z - m))]
  return (
      dx[:tokens],
      dy[0][:tokens] if update else None,
      dfn.sum(0)[: s.z],
      jnp.concatenate([dpre, *rest], axis=1),
  )
