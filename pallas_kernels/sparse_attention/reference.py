"""Joint attention in jnp: the definition."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantize import formats
from pallas_kernels.quantize import reference as quantize
from pallas_kernels.sparse_attention import layout
from pallas_kernels.window_attention.reference import seen as window_seen

_HIDDEN = -1e30


def attend(
    q: Float[Array, "*b N H"], parts: tuple[tuple[Array, Array], ...], sink: Float[Array, " N"]
) -> Float[Array, "*b N H"]:
  """One softmax over keys [*b, S, H] seen under masks [*b, S], and the sink."""
  scale, logits = q.shape[-1] ** -0.5, []
  for keys, seen in parts:
    x = _dot("...nh,...sh->...ns", q, keys) * scale
    logits.append(jnp.where(seen[..., None, :], x, _HIDDEN))
  sink = jnp.broadcast_to(sink, logits[0].shape[:-1])[..., None]
  top = jnp.max(jnp.concatenate([*logits, sink], axis=-1), axis=-1, keepdims=True)
  total, out = jnp.exp(sink - top), 0.0
  for (keys, seen), x in zip(parts, logits):
    p = jnp.exp(x - top)
    total = total + p.sum(axis=-1, keepdims=True)
    # A key that nobody sees may be anything, NaN too.
    keys = jnp.where(seen[..., None], keys, jnp.zeros_like(keys))
    out = out + _dot("...ns,...sh->...nh", p.astype(q.dtype), keys)
  return (out / total).astype(q.dtype)


def _dot(equation: str, a: Array, b: Array) -> Array:
  high = jax.lax.Precision.HIGHEST
  return jnp.einsum(equation, a, b, precision=high, preferred_element_type=jnp.float32)


def sparse_attention(
    q: Float[Array, "B T N H"], entries: Float[Array, "B C H"], slots: Int[Array, "B T K"],
    kv: Float[Array, "B S H"], positions: Int[Array, "B T"], floors: Int[Array, "B T"],
    segments: Int[Array, "B T"], key_positions: Int[Array, "B S"],
    key_segments: Int[Array, "B S"], sink: Float[Array, " N"], *, window: int,
) -> Float[Array, "B T N H"]:  # fmt: skip
  """See `op.sparse_attention`."""
  selected = jax.vmap(lambda e, i: e[i])(entries, jnp.maximum(slots, 0))
  seen = window_seen(positions, floors, segments, key_positions, key_segments, window)
  near = jnp.broadcast_to(kv[:, None], (*seen.shape, kv.shape[-1]))
  return attend(q, ((near, seen), (selected, slots >= 0)), sink)


def sparse_attention_decode(
    q: Float[Array, "B N H"], entries: Int[Array, "R 128"], slots: Int[Array, "B K"],
    window: Int[Array, "B R1 128"], window_scales: Int[Array, "B R2 128"],
    seen: Int[Array, "B W"], sink: Float[Array, " N"],
) -> Float[Array, "B N H"]:  # fmt: skip
  """See `op.sparse_attention_decode`."""
  h = q.shape[-1]
  selected = read_entries(entries, slots, h).astype(q.dtype)
  near = read_window(window, window_scales, seen.shape[-1], h).astype(q.dtype)
  return attend(q, ((near, seen != 0), (selected, slots >= 0)), sink)


def read_entries(entries: Int[Array, "R 128"], slots: Int[Array, "B K"], h: int) -> Array:
  """Decoded entries f32 [B, K, H] of a flat table; an absent one reads entry 0."""
  codes, scales = h // 8, -(-h // 64)
  slots = jnp.maximum(slots, 0)
  # 128 entries fill whole rows; 72·i would leave int32 at 30M entries.
  place = (slots & 127)[..., None] * (codes + scales) + jnp.arange(codes + scales)
  row = (slots >> 7)[..., None] * (codes + scales) + (place >> 7)
  words = entries[row, place & 127]
  code_words, scale_words = layout.from_stored(words, slots, codes)
  nibbles, scale_bytes = _fields(code_words, 4), _fields(scale_words, 8)[..., : h // 16]
  return quantize.dequantize(nibbles, scale_bytes, formats.FP4_MAIN)


def read_window(window: Array, scales: Array, slots: int, h: int) -> Array:
  """Decoded rings f32 [B, W, H]."""
  rows = lambda a, words: a.reshape(a.shape[0], -1)[:, : slots * words].reshape(-1, slots, words)
  codes, scale_bytes = _fields(rows(window, h // 4), 8), _fields(rows(scales, -(-h // 128)), 8)
  return quantize.dequantize(codes, scale_bytes[..., : h // 32], formats.FP8_WINDOW)


def _fields(words: Array, bits: int) -> Array:
  """uint8 fields of words along the last axis, the lowest bits first."""
  words = jax.lax.bitcast_convert_type(words, jnp.uint32)[..., None]
  fields = (words >> jnp.arange(0, 32, bits, dtype=jnp.uint32)) & jnp.uint32((1 << bits) - 1)
  return fields.reshape(*words.shape[:-2], -1).astype(jnp.uint8)
