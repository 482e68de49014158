"""Named real shapes of an op: what tests compile ahead of time and the benchmark measures.

Every op directory has a `shapes.py` with

  SHAPES: dict[str, Shape]
  def build(name: str, implementation: str = "pallas") -> tuple    see `pallas_kernels.aot`

"reference" as implementation is what XLA makes of the definition, for comparison.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def _nothing() -> dict:
  return {}


@dataclasses.dataclass(frozen=True)
class Shape:
  """One real shape.

  Attributes:
    kernel: what the benchmark calls it, "sparse_attention_decode" for instance.
    per: what figures are divided by: "query", "row", "entry" or "call".
    units: how many of them one call has.
    hbm_bytes: bytes that a call has to move whatever the kernel, for the roofline.
    flops: bf16 flops of matrix products of a call, likewise.
    sizes: of the op, for `build` and for the reader.
    operands: makes the contents of operands that reach the scalar unit (scalar prefetch), by name
      of the Pallas kernel without its number and by operand number. They decide trip counts; what
      is left out is zero. A function, so that nothing large is made on import.
    trips: iterations of loops whose end the vector unit decides, by name of the Pallas kernel and
      by the number of the loop in program order.
    peer: key of `pallas_kernels.anchors.ANCHORS`, if somebody else's kernel does the same work.
    reference: whether XLA's program of the definition is worth compiling at this shape.
  """

  kernel: str
  per: str
  units: int
  hbm_bytes: int
  flops: int = 0
  sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  operands: Callable[[], Mapping[str, Mapping[int, int | Sequence[int] | np.ndarray]]] = _nothing
  trips: Mapping[str, Mapping[int, int]] = dataclasses.field(default_factory=dict)
  peer: str | None = None
  reference: bool = True

  @functools.cached_property
  def scalars(self) -> Mapping[str, Mapping[int, int | Sequence[int] | np.ndarray]]:
    """What `operands` makes, made once."""
    return self.operands()
