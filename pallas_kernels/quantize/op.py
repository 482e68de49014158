"""Block quantisation of cache entries and decoding of released weights (report 2.4.4)."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Int32, UInt8

from pallas_kernels import dispatch
from pallas_kernels.block_sizes import BlockSizes
from pallas_kernels.quantize import decode, kernel_pack, kernel_unpack, reference, reference_stored
from pallas_kernels.quantize.formats import Format
from pallas_kernels.quantize.stored import LANES, Stored

_AVAILABLE = ("reference",)
_STORED_AVAILABLE = ("pallas", "reference")
# Beyond it the first and the last block, which nothing hides, cost more than steps do.
_LARGEST_BLOCK = 2048


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


def pack(
    x: Float[Array, "N H"],
    stored: Stored,
    *,
    rotation: tuple[Float[Array, "rows R2"], Float[Array, "_rows _R2"]] | None = None,
    implementation: str | None = None,
) -> tuple[Int32[Array, "_rows 128"], ...]:
  """Rows as the caches store them: rotated, rounded, packed into words, in the table's order.

  Args:
    x: float32 or bfloat16. N is a multiple of `stored.unit` and row 0 stands at a slot that is.
    stored: one of `stored.LAYOUTS`, static.
    rotation: cos and sin, float32 [N, R2], of the angle of each adjacent pair among the last 2·R2
      channels of a row (spec: rotary embedding); R2 is at most 64. They are rotated in float32 and
      rounded to the type of x before they are quantised. None: x is rotated already.
    implementation: see `dispatch.resolve`.

  Returns:
    The arrays of `stored.shapes(N)`: codes with their scales among them, or codes and scales.
    Every bit is that of `quantize`; what `quantize` says of NaN, infinities and zeros holds.

  Raises:
    ValueError: dtype or shape is not one of those above; implementation.
  """
  choice = dispatch.resolve(implementation, _STORED_AVAILABLE)
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"x has dtype {x.dtype}: allowed are float32 and bfloat16")
  if x.shape[1] != stored.width or x.shape[0] < 1 or x.shape[0] % stored.unit:
    raise ValueError(
        f"x has shape {x.shape}: {stored.name} rows are [N, {stored.width}] with N a positive"
        f" multiple of {stored.unit}"
    )
  if rotation is not None:
    _check_rotation(rotation, x.shape[0])
  if choice == "reference":
    return reference_stored.pack(x, stored, rotation)
  bytes_per_row = 4 * sum(stored.words) + x.itemsize * stored.width
  bytes_per_row += 0 if rotation is None else 4 * LANES
  block = _block(f"pack_{stored.name}", x.shape[0], stored, bytes_per_row)
  return kernel_pack.pack(x, rotation, stored, block)


def _check_rotation(rotation: tuple[Array, Array], rows: int):
  for name, table in zip(("cos", "sin"), rotation):
    if table.dtype != jnp.float32:
      raise ValueError(f"{name} has dtype {table.dtype}: allowed is float32")
    if table.shape != (rows, rotation[0].shape[1]) or not 1 <= table.shape[1] <= LANES // 2:
      raise ValueError(
          f"{name} has shape {table.shape}: cos and sin are [{rows}, R2] both, with R2 from 1 to"
          f" {LANES // 2}"
      )


def unpack(
    buffers: tuple[Int32[Array, "_rows 128"], ...],
    stored: Stored,
    *,
    implementation: str | None = None,
) -> Float[Array, "N H"]:
  """All rows of stored arrays, in bfloat16, which holds every value exactly.

  The kernel reads an E8M0 scale byte of 0, which `pack` never writes, as 0 and not as 2^-127.

  Args:
    buffers: what `pack` returns.
    stored: one of `stored.LAYOUTS`, static.
    implementation: see `dispatch.resolve`.

  Raises:
    ValueError: shapes that are not those of a multiple of `stored.unit` rows; implementation.
  """
  choice = dispatch.resolve(implementation, _STORED_AVAILABLE)
  words = sum(stored.words) if stored.interleaved else stored.words[0]
  rows = buffers[0].size // words
  shapes = tuple(each.shape for each in buffers)
  if rows < 1 or rows % stored.unit or shapes != stored.shapes(rows):
    raise ValueError(
        f"buffers have shapes {shapes}: {stored.name} arrays of {stored.unit} rows have"
        f" {stored.shapes(stored.unit)}, and allowed are multiples of that many rows"
    )
  if choice == "reference":
    return reference_stored.unpack(buffers, stored, jnp.bfloat16)
  return kernel_unpack.unpack(buffers, stored, decode.arithmetic())


def _block(kernel: str, rows: int, stored: Stored, bytes_per_row: int) -> int:
  # A block of scales has eight rows of words, or all of them.
  unit = stored.unit if stored.interleaved else 8 * stored.unit
  return BlockSizes.largest(
      kernel,
      rows,
      rows if rows % unit else unit,
      bytes_per_row,
      fixed_bytes=8 * stored.unit * stored.width,
      at_most=_LARGEST_BLOCK,
  ).rows


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
