"""Block quantisation in jnp: the definition of every code and scale byte.

Only exact f32 operations stand here: products with powers of two, products of short mantissas,
comparisons, sums that round on purpose, and integer work on the bits. XLA turns a division by a
constant into a product (a third of all quotients by 6 then differ on the CPU), division on a TPU
need not be correctly rounded, and f32 subnormals are flushed; ties decide codes, and bf16 inputs
hit ties often.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, UInt8

from pallas_kernels.quantize.formats import E2M1, E4M3, Element, Format

_INFINITY = np.uint32(0x7F800000)
_FLT_MAX = float(jnp.finfo(jnp.float32).max)
_FLT_MIN = float(jnp.finfo(jnp.float32).tiny)
# A value that lies on one of these goes to the even code: down on the even ones, up on the others.
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantize(
    x: Float[Array, "*batch H"], fmt: Format
) -> tuple[UInt8[Array, "*batch H"], UInt8[Array, "*batch G"]]:
  """See `op.quantize`."""
  blocks = _blocks(x, fmt)
  scale, scale_bytes = _scale(blocks, fmt)
  _, codes = _round(jnp.abs(blocks), scale, fmt)
  sign = (_bits(blocks) >> 31).astype(jnp.int32) << (fmt.element.bits - 1)
  codes = jnp.where(jnp.isnan(scale), 0, codes | sign)
  return codes.astype(jnp.uint8).reshape(x.shape), scale_bytes[..., 0].astype(jnp.uint8)


def fake_quantize(x: Float[Array, "*batch H"], fmt: Format) -> Float[Array, "*batch H"]:
  """See `op.fake_quantize`."""
  blocks = _blocks(x, fmt)
  scale, _ = _scale(blocks, fmt)
  magnitudes, _ = _round(jnp.abs(blocks), scale, fmt)
  return _with_sign_of(blocks, magnitudes * scale).reshape(x.shape).astype(x.dtype)


def dequantize(
    codes: UInt8[Array, "*batch H"],
    scale_bytes: UInt8[Array, "*batch G"],
    fmt: Format,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*batch H"]:
  """See `op.dequantize`."""
  values = _element_values(codes, fmt.element).reshape(*scale_bytes.shape, fmt.block)
  scale_bytes = scale_bytes[..., None]
  if fmt.scale == "e8m0":
    values = _times_e8m0(values, scale_bytes)
  else:
    values *= _e4m3_values(scale_bytes)
  return values.reshape(codes.shape).astype(dtype)


def pack_nibbles(codes: UInt8[Array, "*batch H"]) -> UInt8[Array, "*batch H//2"]:
  """See `op.pack_nibbles`."""
  return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: UInt8[Array, "*batch N"]) -> UInt8[Array, "*batch 2*N"]:
  """See `op.unpack_nibbles`."""
  pairs = jnp.stack([packed & 15, packed >> 4], axis=-1)
  return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def dequantize_tiles(
    codes: UInt8[Array, "*batch R C"],
    scale_bytes: UInt8[Array, "*batch TR TC"],
    tile: int,
    dtype: DTypeLike,
) -> Float[Array, "*batch R C"]:
  """See `op.dequantize_tiles`."""
  rows, columns = codes.shape[-2:]
  scale_bytes = jnp.repeat(scale_bytes, tile, axis=-2)[..., :rows, :]
  scale_bytes = jnp.repeat(scale_bytes, tile, axis=-1)[..., :columns]
  return _times_e8m0(_element_values(codes, E4M3), scale_bytes).astype(dtype)


def dequantize_rows(
    packed: Int8[Array, "*batch N"],
    scale_bytes: UInt8[Array, "*batch G"],
    block: int,
    dtype: DTypeLike,
) -> Float[Array, "*batch 2*N"]:
  """See `op.dequantize_rows`."""
  codes = unpack_nibbles(lax.bitcast_convert_type(packed, jnp.uint8))
  values = _element_values(codes, E2M1).reshape(*scale_bytes.shape, block)
  return _times_e8m0(values, scale_bytes[..., None]).reshape(codes.shape).astype(dtype)


def _bits(x: Array) -> Array:
  return lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: Array) -> Array:
  return lax.bitcast_convert_type(bits, jnp.float32)


def _with_sign_of(x: Array, magnitudes: Array) -> Array:
  return _float(_bits(magnitudes) | (_bits(x) >> 31) << 31)


def _blocks(x: Array, fmt: Format) -> Array:
  groups = x.shape[-1] // fmt.block
  return x.astype(jnp.float32).reshape(*x.shape[:-1], groups, fmt.block)


def _scale(blocks: Array, fmt: Format) -> tuple[Array, Array]:
  """Scale f32 and its byte, both [..., G, 1]; NaN and the NaN byte where the block has a NaN."""
  # As integers, of which NaN is the largest: XLA's CPU loses it in a maximum of many floats.
  amax_bits = jnp.max(_bits(jnp.abs(blocks)), axis=-1, keepdims=True)
  is_nan = amax_bits > _INFINITY
  amax = _float(jnp.minimum(amax_bits, _INFINITY))
  if fmt.scale == "e8m0":
    scale, scale_bytes, nan_byte = *_e8m0_at_or_above(amax, fmt), 0xFF
  else:
    scale, scale_bytes, nan_byte = *_e4m3_nearest(amax, fmt), 0x7F
  return jnp.where(is_nan, jnp.nan, scale), jnp.where(is_nan, nan_byte, scale_bytes)


def _e8m0_at_or_above(amax: Array, fmt: Format) -> tuple[Array, Array]:
  wanted = jnp.clip(amax, fmt.floor, _FLT_MAX) * (1 / fmt.element.largest)
  exponents = (_bits(wanted) + 0x7FFFFF) >> 23
  return _float(exponents << 23), exponents.astype(jnp.int32)


def _e4m3_nearest(amax: Array, fmt: Format) -> tuple[Array, Array]:
  """Scale amax / 6 in E4M3, ties to even, decided by comparing amax with 6 times the middle."""
  amax = jnp.clip(amax, fmt.floor, fmt.element.largest * E4M3.largest)
  # Off by a rounding error, which only moves a quotient across a grid point, far from any middle.
  below = amax * (1 / fmt.element.largest)
  binade = jnp.maximum(_bits(below) >> 23, 121)
  step = _float((binade - 3) << 23)
  steps = (below * _float((257 - binade) << 23)).astype(jnp.int32)
  middle = (2 * steps + 1).astype(jnp.float32) * (fmt.element.largest / 2) * step
  up = (amax > middle) | ((amax == middle) & (steps % 2 == 1))
  steps += up.astype(jnp.int32)
  return steps.astype(jnp.float32) * step, (binade.astype(jnp.int32) - 121) * 8 + steps


def _round(magnitudes: Array, scale: Array, fmt: Format) -> tuple[Array, Array]:
  """Nearest element value f32 and its code i32 of `magnitudes` / `scale`, without the sign."""
  unit = scale
  if fmt.scale == "e8m0":
    # 2 - 2^-m times 2^127 is the largest element times power of two that f32 holds: rounding the
    # last f32 values up would make an infinity of a finite block.
    largest = (2 - 2.0**-fmt.element.mantissa_bits) * 2.0**127
    magnitudes = jnp.where(magnitudes < _FLT_MIN, 0.0, jnp.minimum(magnitudes, largest))
    magnitudes *= _float(jnp.uint32(254 << 23) - _bits(scale))
    unit = 1.0
  return _round_e2m1(magnitudes, unit) if fmt.element == E2M1 else _round_e4m3(magnitudes)


def _round_e2m1(magnitudes: Array, unit: Array | float) -> tuple[Array, Array]:
  codes = jnp.zeros(magnitudes.shape, jnp.float32)
  for below, tie in enumerate(_E2M1_TIES):
    middle = tie * unit
    passed = magnitudes >= middle if below % 2 else magnitudes > middle
    codes += jnp.where(passed, 1.0, 0.0)
  return _e2m1_values(codes), codes.astype(jnp.int32)


def _round_e4m3(magnitudes: Array) -> tuple[Array, Array]:
  """Adds the power of two whose last place is the E4M3 step: f32 addition then rounds for us."""
  binade = jnp.maximum(_bits(magnitudes) >> 23, 121)
  rounder = _float((binade + 20) << 23)
  rounded = magnitudes + rounder
  steps = (_bits(rounded) - _bits(rounder)).astype(jnp.int32)
  return rounded - rounder, (binade.astype(jnp.int32) - 121) * 8 + steps


def _element_values(codes: Array, element: Element) -> Array:
  if element == E4M3:
    return _e4m3_values(codes)
  return _e2m1_values(codes)


def _e2m1_values(codes: Array) -> Array:
  """Of nibbles: exponent and mantissa moved to their places in f32, where 0.5 is subnormal."""
  codes = codes.astype(jnp.uint32)
  magnitudes = codes & 7
  bits = ((magnitudes >> 1) + 126) << 23 | (magnitudes & 1) << 22
  half_or_zero = jnp.where(magnitudes == 1, jnp.uint32(126 << 23), jnp.uint32(0))
  return _float(jnp.where(magnitudes > 1, bits, half_or_zero) | (codes & 8) << 28)


def _e4m3_values(codes: Array) -> Array:
  codes = codes.astype(jnp.uint32)
  magnitudes = codes & 0x7F
  subnormal = magnitudes.astype(jnp.float32) * 2.0**-9
  values = jnp.where(magnitudes < 8, subnormal, _float((magnitudes << 20) + (120 << 23)))
  values = jnp.where(magnitudes == 0x7F, jnp.nan, values)
  return jnp.where((codes & 0x80) != 0, -values, values)


def _times_e8m0(values: Array, scale_bytes: Array) -> Array:
  """Multiplies by two half-sized powers of two: byte 0 is 2^-127, which f32 would flush."""
  exponents = scale_bytes.astype(jnp.uint32)
  half = exponents >> 1
  first = jnp.where(exponents == 0xFF, jnp.nan, _float((half + 64) << 23))
  return values * first * _float((exponents - half + 63) << 23)
