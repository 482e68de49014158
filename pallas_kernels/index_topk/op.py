"""Index scores, exact Top-K and candidate blocks (report 2.3; sparse attention's selection).

Kernels hand scores over as tiles: Float[Array, "B T N 8 128"] with entry 1024·n + 8·l + s at
[n, s, l], so that the eight entries of a candidate block stand under one another; −inf where the
row sees nothing. `layout.from_tiles` puts them in order.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import dispatch
from pallas_kernels.index_topk import (
    kernel_pool,
    kernel_rows,
    kernel_scores,
    kernel_topk,
    kernel_vjp,
    layout,
    reference,
)
from pallas_kernels.index_topk.layout import BLOCK, LANES, TILE, TILES, PackedKeys
from pallas_kernels.quantize import decode

AVAILABLE = ("pallas", "reference")


def index_scores(
    q: Float[Array, "B T I J"],
    weights: Float[Array, "B T I"],
    keys: Float[Array, "B C J"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T C"]:
  """I(t, c) = Σ_i w_i · ReLU(q_i · k_c) in f32, over keys that are not packed (spec: indexer).

  Zeros are +0. Differentiable in all three; with "pallas" the backward pass computes the products
  again instead of keeping [B, T, I, C]. Both directions are products that XLA makes: with keys that
  are not packed there is nothing to decode.

  Raises:
    ValueError: implementation.
  """
  if dispatch.resolve(implementation, AVAILABLE) == "reference":
    return reference.index_scores(q, weights, keys)
  return kernel_vjp.index_scores(q, weights, keys)


def packed_scores(
    q: Float[Array, "B T I 128"],
    weights: Float[Array, "B T I"],
    keys: PackedKeys,
    seen: Int[Array, "B T"],
    pool: Int[Array, "B T P"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "B T N 8 128"]:
  """Index scores over packed keys, as tiles.

  A key with a NaN scale scores NaN. Scale bytes below 2 and above 252 (values of 2^-124 and 2^126
  and beyond, which no key of a normalised latent has) are read as 2 and 252 by the kernels.

  Args:
    q: bfloat16; index queries are MXFP4 values, which bfloat16 holds exactly.
    weights: with the scale (J·I)^-0.5; may be negative.
    keys: of every line.
    seen: entries that the row sees, 0 ≤ seen ≤ C; entries from there on score −inf, and tiles
      wholly beyond are neither read nor computed.
    pool: candidate blocks of every row, ascending, −1 for none (see `top_blocks`). Scores are then
      those of the pool's entries in their order, and only their keys are read.
    implementation: see `dispatch.resolve`.

  Returns:
    f32 tiles of C entries, or of 8·P.

  Raises:
    ValueError: dtypes, a width that is not 128, codes and scales of different lengths, a pool that
      is no multiple of 1,024 blocks in the kernel; implementation.
  """
  chosen = dispatch.resolve(implementation, AVAILABLE)
  _check(q, keys)
  if chosen == "reference":
    return layout.to_tiles(reference.packed_scores(q, weights, keys, seen, pool))
  args = (q, weights.astype(jnp.float32), *keys, seen.astype(jnp.int32))
  if pool is not None:
    if pool.shape[2] % TILE:
      raise ValueError(f"pool has {pool.shape[2]} blocks: the kernel takes multiples of {TILE}")
    args += (pool.astype(jnp.int32),)
    run = kernel_pool.scores
  else:
    run = (kernel_scores if q.shape[1] == 1 else kernel_rows).scores
  return dispatch.over_lines(functools.partial(run, arithmetic=decode.arithmetic()), *args)


def top_k(
    scores: Float[Array, "B T C"] | Float[Array, "B T N 8 128"],
    k: int,
    *,
    implementation: str | None = None,
) -> Int32[Array, "B T k"]:
  """Entries with the k largest scores of every row, exactly, ascending; −1 where there are fewer.

  Ties go to the lowest entry. NaN and −inf are never selected; zeros of both signs are equal.

  Args:
    scores: float32, in order or as tiles.
    k: static.
    implementation: see `dispatch.resolve`.

  Raises:
    ValueError: dtype; in the kernel a k that is no multiple of 128 or above 8,192, or a row that
      does not fit into VMEM; implementation.
  """
  chosen = dispatch.resolve(implementation, AVAILABLE, top_k_refusal(k))
  if scores.dtype != jnp.float32:
    raise ValueError(f"scores have dtype {scores.dtype}: allowed is float32")
  if k < 1:
    raise ValueError(f"k is {k}: it must be at least 1")
  tiled = scores.ndim == 5
  if chosen == "reference":
    if tiled:
      scores = layout.from_tiles(scores, scores.shape[2] * TILE)
    return reference.top_k(scores, k)
  if tiled and scores.shape[2] % TILES:
    raise ValueError(f"scores have {scores.shape[2]} tiles: the kernel takes multiples of {TILES}")
  if not tiled:
    pad = -scores.shape[2] % TILE
    scores = jnp.pad(scores, ((0, 0), (0, 0), (0, pad)), constant_values=-jnp.inf)
  return _kernel_top_k(scores, k, tiled)


def top_k_refusal(k: int) -> str | None:
  """Why the Top-K kernel does not take this k, or None."""
  if k % LANES == 0 and k <= kernel_topk.LARGEST:
    return None
  return f"k is {k}: the kernel takes multiples of {LANES} up to {kernel_topk.LARGEST}"


def packed_refusal(channels: int, block: int) -> str | None:
  """Why no kernel reads packed keys of these channels in candidate blocks of these, or None."""
  if (channels, block) == (LANES, BLOCK):
    return None
  return (
      f"index keys have {channels} channels in blocks of {block}: the kernels take {LANES} channels"
      f" and blocks of {BLOCK}"
  )


def _kernel_top_k(scores: Array, k: int, tiled: bool) -> Array:
  """Of scores [B, T, …]."""

  def run(scores):
    b, t = scores.shape[:2]
    return kernel_topk.top_k(scores.reshape(b * t, -1, LANES), k, tiled=tiled).reshape(b, t, k)

  return dispatch.over_lines(run, scores)


def block_maxima(
    tiles: Float[Array, "B T N 8 128"], seen: Int[Array, "B T"]
) -> Float[Array, "B T 128*N"]:
  """Largest score of every block of eight entries; +inf for the block of the newest entry seen.

  NaN counts as −inf. One pass over the scores, which XLA makes.
  """
  return _block_maxima(tiles, seen).reshape(*seen.shape, -1)


def _block_maxima(tiles: Array, seen: Array) -> Array:
  """As [B, T, N, 128]."""
  best = jnp.max(jnp.where(jnp.isnan(tiles), -jnp.inf, tiles), axis=3)
  number = jnp.arange(best.shape[2] * LANES, dtype=jnp.int32).reshape(-1, LANES)
  newest = (seen[..., None, None].astype(jnp.int32) - 1) >> 3
  best = jnp.where(number > newest, -jnp.inf, best)
  return jnp.where((number == newest) & (newest >= 0), jnp.inf, best)


def top_blocks(
    tiles: Float[Array, "B T N 8 128"],
    seen: Int[Array, "B T"],
    blocks: int,
    *,
    implementation: str | None = None,
) -> Int32[Array, "B T blocks"]:
  """The candidate pool: numbers of the best `blocks` blocks, ascending, −1 where there are fewer.

  A block's score is its largest; the block of the newest entry is always in (spec: pool). Block j
  holds entries 8·j to 8·j + 7.

  Raises:
    ValueError: as `top_k`.
  """
  if dispatch.resolve(implementation, AVAILABLE, top_k_refusal(blocks)) == "reference":
    return reference.top_k(block_maxima(tiles, seen), blocks)
  return _kernel_top_k(_block_maxima(tiles, seen), blocks, tiled=False)


def pool_entries(chosen: Int[Array, "B T K"], pool: Int[Array, "B T P"]) -> Int32[Array, "B T K"]:
  """Entries of the cache for what `top_k` chose among the pool's scores; −1 stays −1."""
  block = jnp.take_along_axis(pool, jnp.maximum(chosen, 0) >> 3, axis=2)
  return jnp.where(chosen < 0, -1, block * BLOCK + (chosen & 7)).astype(jnp.int32)


def _check(q: Array, keys: PackedKeys):
  if q.dtype != jnp.bfloat16:
    raise ValueError(f"q has dtype {q.dtype}: allowed is bfloat16")
  for name, words in keys._asdict().items():
    if words.dtype != jnp.int32:
      raise ValueError(f"keys.{name} has dtype {words.dtype}: allowed is int32")
  if q.shape[3] != LANES:
    raise ValueError(f"q has {q.shape[3]} channels: packed keys have {LANES}")
  if keys.codes.shape[1] != 16 * keys.scales.shape[1]:
    raise ValueError(
        f"keys.codes has {keys.codes.shape[1]} rows: {keys.scales.shape[1]} rows of scales need 16"
        f" times as many"
    )
