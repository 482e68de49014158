"""Block quantisation of cache entries and decoding of released weights (report 2.4.4)."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, UInt8

from pallas_kernels import dispatch
from pallas_kernels.quantize import reference
from pallas_kernels.quantize.formats import Format

_AVAILABLE = ("reference",)


def quantize(
    x: Float[Array, "*batch H"], fmt: Format, *, implementation: str | None = None
) -> tuple[UInt8[Array, "*batch H"], UInt8[Array, "*batch G"]]:
  """Codes and scale bytes of `x` in blocks of `fmt.block` channels of the last axis (report 2.4.4).

  A code is the nearest element to x / scale, ties to the even code; it keeps the sign of zero. All
  arithmetic is f32 and exact, so CPU and TPU agree bit for bit. What is not an ordinary number:
    * beyond the range of the format, infinities included: saturates;
    * a NaN makes the whole block NaN: its scale byte is the NaN of the scale format (255 of E8M0,
      0x7F of E4M3) and its codes are 0; a block without NaN never has that byte;
    * f32 subnormals count as zeros, because XLA flushes them on some backends.

  Args:
    x: float32 or bfloat16.
    fmt: one of `formats.FORMATS`, static.
    implementation: see `dispatch.resolve`.

  Returns:
    Codes, one a byte: E4M3 bits, or E2M1 in the low nibble (bit 3 is the sign, see `pack_nibbles`);
    scale bytes, one a block: E8M0 (power of two + 127) or E4M3 bits.

  Raises:
    ValueError: dtype, last axis or implementation is not one of those above.
  """
  dispatch.resolve(implementation, _AVAILABLE)
  _check(x, fmt)
  return reference.quantize(x, fmt)


def dequantize(
    codes: UInt8[Array, "*batch H"],
    scale_bytes: UInt8[Array, "*batch G"],
    fmt: Format,
    dtype: DTypeLike = jnp.float32,
    *,
    implementation: str | None = None,
) -> Float[Array, "*batch H"]:
  """Element times scale, in f32 and then `dtype`; bfloat16 holds every value exactly.

  Raises:
    ValueError: there is not one scale byte for every `fmt.block` codes; implementation.
  """
  dispatch.resolve(implementation, _AVAILABLE)
  _check_scales(codes, scale_bytes, _blocks(codes, codes.shape[-1], fmt.block))
  return reference.dequantize(codes, scale_bytes, fmt, dtype)


def fake_quantize(
    x: Float[Array, "*batch H"], fmt: Format, *, implementation: str | None = None
) -> Float[Array, "*batch H"]:
  """`dequantize(*quantize(x, fmt), fmt, x.dtype)` bit for bit, without making codes.

  Its own derivative is not the straight-through one; see `deepseek_jax.quant.fake_quant`.

  Raises:
    ValueError: as `quantize`.
  """
  dispatch.resolve(implementation, _AVAILABLE)
  _check(x, fmt)
  return reference.fake_quantize(x, fmt)


def pack_nibbles(codes: UInt8[Array, "*batch H"]) -> UInt8[Array, "*batch H//2"]:
  """Two E2M1 codes (0..15) a byte, the even channel in the low nibble.

  Raises:
    ValueError: the last axis is odd.
  """
  if codes.shape[-1] % 2:
    raise ValueError(f"codes has {codes.shape[-1]} channels: only an even number packs into bytes")
  return reference.pack_nibbles(codes)


def unpack_nibbles(packed: UInt8[Array, "*batch N"]) -> UInt8[Array, "*batch 2*N"]:
  """Undoes `pack_nibbles`."""
  return reference.unpack_nibbles(packed)


def dequantize_tiles(
    codes: UInt8[Array, "*batch R C"],
    scale_bytes: UInt8[Array, "*batch TR TC"],
    tile: int = 32,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*batch R C"]:
  """Released FP8 linear weights: E4M3 codes, one E8M0 byte a `tile` x `tile` square.

  The last tile of an axis may be ragged. A NaN code or scale byte stays NaN.

  Raises:
    ValueError: `scale_bytes` does not have one byte a tile.
  """
  tiles = tuple(-(-size // tile) for size in codes.shape[-2:])
  _check_scales(codes, scale_bytes, (*codes.shape[:-2], *tiles))
  return reference.dequantize_tiles(codes, scale_bytes, tile, dtype)


def dequantize_rows(
    packed: Int8[Array, "*batch N"],
    scale_bytes: UInt8[Array, "*batch G"],
    block: int = 32,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*batch 2*N"]:
  """Released routed experts: two E2M1 codes a byte, one E8M0 byte for `block` inputs of a row.

  Raises:
    ValueError: `scale_bytes` does not have one byte a block.
  """
  _check_scales(packed, scale_bytes, _blocks(packed, 2 * packed.shape[-1], block))
  return reference.dequantize_rows(packed, scale_bytes, block, dtype)


def _check(x: Array, fmt: Format):
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"x has dtype {x.dtype}: allowed are float32 and bfloat16")
  _blocks(x, x.shape[-1], fmt.block)


def _blocks(x: Array, channels: int, block: int) -> tuple[int, ...]:
  if channels % block:
    raise ValueError(f"the last axis has {channels} channels: allowed are multiples of {block}")
  return *x.shape[:-1], channels // block


def _check_scales(codes: Array, scale_bytes: Array, expected: tuple[int, ...]):
  if scale_bytes.shape != expected:
    raise ValueError(
        f"scale_bytes has shape {scale_bytes.shape}: codes of shape {codes.shape} need {expected}"
    )
