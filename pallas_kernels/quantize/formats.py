"""The three storage formats of the caches (report 2.4.4): element, block, scale."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Element:
  """A small float without infinities: sign, exponent, `mantissa_bits`, subnormals."""

  name: str
  bits: int
  mantissa_bits: int
  largest: float


E2M1 = Element("e2m1", bits=4, mantissa_bits=1, largest=6.0)
E4M3 = Element("e4m3", bits=8, mantissa_bits=3, largest=448.0)


@dataclasses.dataclass(frozen=True)
class Format:
  """A block format: `block` neighbouring channels share one scale byte.

  Attributes:
    name: what a plan or a config calls it.
    element: what one channel is stored as.
    block: channels per scale byte; the last axis must be a multiple of it.
    scale: "e8m0" is the power of two at or above amax / element.largest (OCP MX would take the one
      below and clip); "e4m3" is amax / element.largest rounded to E4M3, saturating at 448, with no
      second, global scale.
    floor: smallest amax that the scale is made from. It keeps every scale a positive number of its
      own format, so that a block of zeros divides by something.
  """

  name: str
  element: Element
  block: int
  scale: str
  floor: float

  def num_bytes(self, width: int) -> int:
    """Bytes of one row of `width` channels with its scales, codes packed."""
    return width * self.element.bits // 8 + width // self.block


FP4_MAIN = Format("fp4_e2m1_e4m3_16", E2M1, block=16, scale="e4m3", floor=math.ldexp(6.0, -9))
MXFP4 = Format("mxfp4", E2M1, block=32, scale="e8m0", floor=math.ldexp(6.0, -126))
FP8_WINDOW = Format("fp8_e4m3_e8m0_32", E4M3, block=32, scale="e8m0", floor=1e-4)

FORMATS = {fmt.name: fmt for fmt in (FP4_MAIN, MXFP4, FP8_WINDOW)}
