"""How released weights are stored (spec 13): bytes of codes with E8M0 scales, and back.

On the host and in numpy, so that a checkpoint is read and written without an accelerator. What a
code means to a program that runs on one is `pallas_kernels.quantize.op`'s; both agree bit for bit.
"""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from pallas_kernels.quantize.formats import E2M1, E4M3, Element


@dataclasses.dataclass(frozen=True)
class WeightFormat:
  """Elements in blocks of `rows` × 32 that share one scale, a power of two.

  Attributes:
    name: what a `Quantised` calls it.
    dtype: of the codes in a safetensors file; scales are F8_E8M0.
    rows: of a block; the last block of an axis may be ragged.
    element: what one code is.
  """

  name: str
  dtype: str
  rows: int
  element: Element
  columns: int = 32

  @property
  def per_byte(self) -> int:
    """Codes in one byte; the low nibble is the even input."""
    return 8 // self.element.bits

  @property
  def code_dtype(self) -> type:
    """Of an array of codes."""
    return np.int8 if self.per_byte == 2 else np.uint8

  def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the codes of a weight [..., out, in]."""
    return *shape[:-1], shape[-1] // self.per_byte

  def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of a weight [..., out, in]."""
    return *shape[:-2], -(-shape[-2] // self.rows), -(-shape[-1] // self.columns)

  def decode(
      self, codes: np.ndarray, scales: np.ndarray, first: tuple[int, int] = (0, 0)
  ) -> np.ndarray:
    """Values [R, C] in f32, exact.

    Args:
      codes: [R, C], or two a byte [R, C / 2].
      scales: bytes of all blocks that the values lie in.
      first: row and column of the first value inside the first block.
    """
    values = np.take(_values(self.element), codes.view(np.uint8)).view(np.float32)
    steps, powers = (self.rows, self.columns), _POWERS[scales]
    whole = not any(first) and not any(n % step for n, step in zip(values.shape, steps))
    # A scale above 2^119 can make an infinity, here as on a device.
    with np.errstate(over="ignore"):
      if whole:
        tiles = values.reshape(len(scales), self.rows, -1, self.columns)
        tiles *= powers[:, None, :, None]
      else:
        values *= powers[np.ix_(*(
            (np.arange(n) + skip) // step for n, skip, step in zip(values.shape, first, steps)
        ))]  # fmt: skip
    return values

  def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale bytes of finite values [R, C] in f32; R begins a block.

    The scale is the smallest power of two under which nothing saturates. The released recipe is
    unknown and sometimes takes a larger one, so bytes that were decoded need not come back: the
    values do.
    """
    rows, columns = values.shape
    padded = np.pad(values, [(0, -rows % self.rows), (0, -columns % self.columns)])
    height, width = padded.shape
    tiles = padded.reshape(height // self.rows, self.rows, width // self.columns, self.columns)
    amax = np.abs(tiles).max(axis=(1, 3), initial=0)
    exponents = _exponents(amax, self.element)
    tiles = tiles * np.ldexp(np.float32(1), -exponents)[:, None, :, None]
    codes = tiles.astype(_NUMPY[self.element]).view(np.uint8).reshape(height, width)
    codes = codes[:rows, :columns]
    if self.per_byte == 2:
      codes = (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8)
    return codes, (exponents + 127).astype(np.uint8)

  def encode_like(
      self, values: np.ndarray, codes: np.ndarray, scales: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """As `encode`, but a block whose values are those of `codes` and `scales` keeps their bytes."""
    moved = self.decode(codes, scales) != values
    if not moved.any():
      return codes, scales
    fresh_codes, fresh_scales = self.encode(values)
    tiles = np.zeros(scales.shape, bool)
    row, column = np.nonzero(moved)
    tiles[row // self.rows, column // self.columns] = True
    spread = tiles.repeat(self.rows, 0)[: len(values)].repeat(self.columns // self.per_byte, 1)
    return (
        np.where(spread[:, : codes.shape[1]], fresh_codes, codes),
        np.where(tiles, fresh_scales, scales),
    )


FP8_TILES = WeightFormat("fp8_tiles", "F8_E4M3", 32, E4M3)
FP8_ROWS = WeightFormat("fp8_rows", "F8_E4M3", 1, E4M3)
FP4_ROWS = WeightFormat("fp4_rows", "I8", 1, E2M1)
FORMATS = {f.name: f for f in (FP8_TILES, FP8_ROWS, FP4_ROWS)}

_FP8_LINEAR = frozenset({"wq_a", "wq_b", "wkv", "wo_a", "wo_b"})
_F32 = frozenset({"attn_sink", "bias", "bias_vl"})


def storage(path: tuple[str, ...]) -> tuple[str, WeightFormat | None]:
  """File dtype and block format of a released parameter."""
  rest = path[2:] if path[0] == "runs" else path
  if rest[-1] != "weight":
    return ("F32" if rest[-1] in _F32 or rest[-1].startswith("hc_") else "BF16"), None
  if rest[:2] == ("ffn", "experts"):
    return FP4_ROWS.dtype, FP4_ROWS
  if rest[:2] == ("engram", "embed"):
    return FP8_ROWS.dtype, FP8_ROWS
  linear = rest[0] == "attn" and rest[1] in _FP8_LINEAR
  if linear or rest in (("attn", "indexer", "wq_b", "weight"), ("engram", "wkv", "weight")):
    return FP8_TILES.dtype, FP8_TILES
  if rest[:2] == ("ffn", "shared_experts"):
    return FP8_TILES.dtype, FP8_TILES
  return "BF16", None


_NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E2M1: ml_dtypes.float4_e2m1fn}
_BYTES = np.arange(256, dtype=np.uint8)
_POWERS = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


@functools.cache
def _values(element: Element) -> np.ndarray:
  """f32 of every byte: one E4M3 element, or two of E2M1 as the bits of one 64-bit number."""
  codes = _BYTES if element.bits == 8 else np.stack([_BYTES & 15, _BYTES >> 4], axis=-1)
  values = codes.view(_NUMPY[element]).astype(np.float32)
  return values if element.bits == 8 else values.view(np.uint64).ravel()


def _exponents(amax: np.ndarray, element: Element) -> np.ndarray:
  """Of the smallest power of two, 2^-126 at least, times which the largest element is >= amax."""
  (mantissa, exponent), (top, places) = np.frexp(amax), np.frexp(element.largest)
  found = exponent - places + (mantissa > np.float32(top))
  return np.where(amax > 0, np.maximum(found, -126), -126)
