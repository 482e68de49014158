"""Selected slots as the kernel wants them: integers that XLA computes before it."""

import jax.numpy as jnp

from pallas_kernels.sparse_attention import layout

_HALF = 64


def plan(slots):
  """What the kernel needs to know of selected slots [B, K]: first rows and facts of pairs.

  Entry k of the first half is E of pair k, entry K/2 + k is F. The first K/4 pairs go to rows X,
  the others to rows Y.

  Returns:
    int32 [B, K] first row of each descriptor; int32 [B, 2, 128] a word for every row of X and Y,
    one array for E and one for F (low half X, high half Y: bits 0 to 7 which of its eighths the
    rotation does not move, 8 to 10 lane of the scales, 11 and 12 rows, 13 present).
  """
  at = jnp.maximum(slots, 0)
  place = at & (layout.PERIOD - 1)
  start = place * layout.WORDS
  row, offset = start >> 7, start & 127
  # The second row of the last entry of a period can lie outside of the table, and is not needed.
  back = (place == layout.PERIOD - 1).astype(jnp.int32)
  rows = (at >> 4) * 9 + row - back
  late = (offset >= _HALF).astype(jnp.int32)
  block = (offset & (_HALF - 1)) >> 3
  below = jnp.where(late == 1, (1 << block) - 1, (0xFF << (block + 1)) & 0xFF)
  e, f = (tuple(a[:, half] for a in map(halves, (late | back, back, below))) for half in (0, 1))
  common = halves(block << 8 | (slots >= 0).astype(jnp.int32) << 13)
  in_e = e[2] | e[0] << 11 | f[0] << 12
  in_f = (0xFF - f[2]) | f[1] << 11 | e[1] << 12
  facts = jnp.stack([in_e, in_f], axis=1) | common
  quarter = facts.shape[-1] // 2
  words = facts[..., :quarter] | facts[..., quarter:] << 16
  return rows, jnp.pad(words, ((0, 0), (0, 0), (0, layout.LANES - quarter)))


def halves(a):
  """[B, n] as [B, 2, n/2]: E and F."""
  return a.reshape(a.shape[0], 2, -1)


def columns(mask, interleaved: bool):
  """Masks [..., n] in the order of the scores: rows of X and Y alternate if two fill a word."""
  if not interleaved:
    return mask
  n = mask.shape[-1]
  return jnp.swapaxes(mask.reshape(*mask.shape[:-1], 2, n // 2), -1, -2).reshape(mask.shape)
