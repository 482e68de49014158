"""Index scores and exact selection in jnp."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.index_topk.layout import BLOCK, PackedKeys
from pallas_kernels.quantize import formats, op


def unpack(keys: PackedKeys) -> Float[Array, "B C J"]:
  b = keys.codes.shape[0]
  codes = _fields(keys.codes, 4).reshape(b, keys.entries, -1)
  scales = _fields(keys.scales, 8).reshape(b, -1, 4)[:, : keys.entries]
  return op.dequantize(codes, scales, formats.MXFP4)


def _fields(words: Int[Array, "B R 128"], bits: int) -> UInt8[Array, "B R 128 fields"]:
  words = jax.lax.bitcast_convert_type(words, jnp.uint32)
  shifts = np.arange(0, 32, bits, dtype=np.uint32)
  return ((words[..., None] >> shifts) & np.uint32((1 << bits) - 1)).astype(jnp.uint8)


def index_scores(
    q: Float[Array, "B T I J"], weights: Float[Array, "B T I"], keys: Float[Array, "B C J"]
) -> Float[Array, "B T C"]:
  dots = jnp.einsum("btij,bcj->btic", q, keys, preferred_element_type=jnp.float32)
  scores = jnp.einsum("bti,btic->btc", weights.astype(jnp.float32), jax.nn.relu(dots))
  return jnp.where(scores == 0, 0.0, scores)


def packed_scores(
    q: Float[Array, "B T I J"],
    weights: Float[Array, "B T I"],
    keys: PackedKeys,
    seen: Int[Array, "B T"],
    pool: Int[Array, "B T P"] | None = None,
) -> Float[Array, "B T C"]:
  values = unpack(keys)
  slots = jnp.broadcast_to(jnp.arange(keys.entries), (*seen.shape, keys.entries))
  scores = index_scores(q.astype(jnp.float32), weights, values)
  if pool is not None:
    slots = pool_slots(pool)
    scores = jnp.take_along_axis(scores, jnp.clip(slots, 0, keys.entries - 1), axis=-1)
  return jnp.where((slots >= 0) & (slots < seen[..., None]), scores, -jnp.inf)


def pool_slots(pool: Int[Array, "B T P"]) -> Int[Array, "B T 8*P"]:
  """Entries of the pool's blocks, −1 for those of absent blocks."""
  slots = jnp.where(pool[..., None] < 0, -1, pool[..., None] * BLOCK + jnp.arange(BLOCK))
  return slots.reshape(*pool.shape[:-1], -1)


def top_k(scores: Float[Array, "*batch C"], k: int) -> Int[Array, "*batch k"]:
  c = scores.shape[-1]
  ranked = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.where(scores == 0, 0.0, scores))
  missing = max(0, k - c)
  ranked = jnp.pad(ranked, [(0, 0)] * (ranked.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
  best, slots = jax.lax.top_k(ranked, k)
  slots = jnp.sort(jnp.where(best > -jnp.inf, slots.astype(jnp.int32), c + missing), axis=-1)
  return jnp.where(slots < c + missing, slots, -1)


def block_maxima(scores: Float[Array, "B T C"], seen: Int[Array, "B T"]) -> Float[Array, "B T P"]:
  missing = -scores.shape[-1] % BLOCK
  scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
  scores = jnp.pad(scores, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
  best = jnp.max(scores.reshape(*seen.shape, -1, BLOCK), axis=-1)
  numbers = jnp.arange(best.shape[-1])
  newest = (seen[..., None] - 1) // BLOCK
  best = jnp.where(numbers > newest, -jnp.inf, best)
  return jnp.where((numbers == newest) & (seen[..., None] > 0), jnp.inf, best)
