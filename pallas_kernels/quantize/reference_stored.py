"""Rows in their stored layouts, in jnp: the definition of every stored word."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quantize import reference
from pallas_kernels.quantize.stored import LANES, Stored
from pallas_kernels.sparse_attention import layout


def rotate(x, cos, sin):
  """The last 2 · R2 channels of x [N, H] as adjacent pairs, in f32 and then in x's type."""
  width = 2 * cos.shape[1]
  pairs = x[:, -width:].astype(jnp.float32).reshape(x.shape[0], -1, 2)
  even, odd = pairs[..., 0], pairs[..., 1]
  turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
  turned = turned.reshape(x.shape[0], width).astype(x.dtype)
  return jnp.concatenate([x[:, :-width], turned], axis=1)


def pack(x, stored: Stored, rotation):
  """See `op.pack`."""
  if rotation is not None:
    x = rotate(x, *rotation)
  codes, scales = reference.quantize(x, stored.format)
  codes, scales = _join(codes, stored.format.element.bits), _join(scales, 8)
  if stored.interleaved:
    words = (layout.to_stored(codes, scales, jnp.arange(x.shape[0])),)
  else:
    words = codes, scales
  return tuple(each.reshape(-1, LANES) for each in words)


def unpack(buffers, stored: Stored, dtype):
  """See `op.unpack`."""
  codes, scales = stored.words
  if stored.interleaved:
    words = buffers[0].reshape(-1, codes + scales)
    codes, scales = layout.from_stored(words, jnp.arange(words.shape[0]))
  else:
    codes, scales = (each.reshape(-1, n) for each, n in zip(buffers, stored.words))
  codes, scales = _split(codes, stored.format.element.bits), _split(scales, 8)
  return reference.dequantize(codes, scales, stored.format, dtype)


def _join(fields, bits: int):
  fields = fields.reshape(*fields.shape[:-1], -1, 32 // bits).astype(jnp.uint32)
  words = jnp.sum(fields << np.arange(0, 32, bits, dtype=np.uint32), axis=-1, dtype=jnp.uint32)
  return lax.bitcast_convert_type(words, jnp.int32)


def _split(words, bits: int):
  words = lax.bitcast_convert_type(words, jnp.uint32)[..., None]
  fields = words >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32((1 << bits) - 1)
  return fields.reshape(*fields.shape[:-2], -1).astype(jnp.uint8)
