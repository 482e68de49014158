"""One softmax over pairs of entries, a window and the sink, in steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_attention.channels import WIDTH, added_pairs, spread_queries

_HIDDEN = -1e30
_ACROSS, _ALONG = ((1,), (1,)), ((1,), (0,))


def _dot(a, b, contract):
  precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(
      a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
  )


class Attention:
  """Three steps over references; words hold one f32 or two bf16 rows of `dtype`.

  Args:
    queries: words of [N, 512], in the order of `layout.CHANNELS`.
    spread: words of `channels.spread_queries`, or None to spread them here.
    keys: words of [K/2, 1024], pairs.
    window_keys: words of [W, 512].
    masks: int32 [8, ·], not below 0 where a column is seen; row 0 E, 1 window, 2 F.
    sink: f32 [N, 128].
    values: words of [N, 512].
    dtype: of all but the sums.
  """

  def __init__(self, queries, spread, keys, window_keys, masks, sink, values, dtype):
    self.queries, self.spread, self.masks, self.sink = queries, spread, masks, sink
    self.keys, self.window_keys, self.values, self.dtype = keys, window_keys, values, dtype
    self.found = None

  @property
  def steps(self):
    return self.score, self.normalise, self.sum_values

  def _floats(self, ref):
    return pltpu.bitcast(ref[...], self.dtype)

  def score(self):
    if self.spread is None:
      q = pltpu.bitcast(spread_queries(self.queries[...]), self.dtype)
    else:
      q = self._floats(self.spread)
    pairs = _dot(q, self._floats(self.keys), _ACROSS)
    n = pairs.shape[0] // 2
    near = _dot(self._floats(self.queries), self._floats(self.window_keys), _ACROSS)
    self.found = pairs[:n], pairs[n:], near

  def normalise(self):
    x, scale = list(self.found), np.float32(WIDTH**-0.5)
    for i, row in enumerate((0, 2, 1)):
      mask = self.masks[row : row + 1, : x[i].shape[1]]
      x[i] = jnp.where(mask >= 0, x[i] * scale, _HIDDEN)
    sink = self.sink[:, :1]
    top = functools.reduce(jnp.maximum, [jnp.max(a, axis=1, keepdims=True) for a in x], sink)
    e, f, near = (jnp.exp(a - top) for a in x)
    total = sum((jnp.sum(a, axis=1, keepdims=True) for a in (e, f, near)), jnp.exp(sink - top))
    self.found = jnp.concatenate([e, f], axis=0), near, total

  def sum_values(self):
    pairs, near, total = self.found
    pairs = _dot(pairs.astype(self.dtype), self._floats(self.keys), _ALONG)
    near = _dot(near.astype(self.dtype), self._floats(self.window_keys), _ALONG)
    out = (near + added_pairs(pairs, near.shape[0])) / total
    self.values[...] = pltpu.bitcast(out.astype(self.dtype), jnp.int32)
