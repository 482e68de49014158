"""The three stored layouts of the caches: what `op.pack` writes and `op.unpack` reads."""

import dataclasses

from pallas_kernels.quantize.formats import FP4_MAIN, FP8_WINDOW, MXFP4, Format

LANES = 128


@dataclasses.dataclass(frozen=True)
class Stored:
  """How rows of one kind are stored, in int32 arrays [*, 128] whose memory order is row by row.

  Inside a word neighbouring channels follow each other, the first one in the lowest bits.

  Attributes:
    name: what an error calls it.
    format: of its elements and scales.
    width: channels of a row.
    interleaved: the scale words of a row stand among its code words, where
      `sparse_attention.layout` says; else codes and scales have an array each.
    unit: rows per step of a kernel; the number of rows is a multiple of it.
  """

  name: str
  format: Format
  width: int
  interleaved: bool
  unit: int

  @property
  def words(self) -> tuple[int, int]:
    """Code words and scale words of a row."""
    return self.width * self.format.element.bits // 32, self.width // self.format.block // 4

  def shapes(self, rows: int) -> tuple[tuple[int, int], ...]:
    """Of the arrays that hold this many rows."""
    words = (sum(self.words),) if self.interleaved else self.words
    return tuple((rows * each // LANES, LANES) for each in words)


MAIN = Stored("main", FP4_MAIN, width=512, interleaved=True, unit=128)
INDEX = Stored("index", MXFP4, width=128, interleaved=False, unit=128)
WINDOW = Stored("window", FP8_WINDOW, width=512, interleaved=False, unit=32)

LAYOUTS = {stored.name: stored for stored in (MAIN, INDEX, WINDOW)}
