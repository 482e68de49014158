"""Hyper-connections at released sizes through the TPU compiler: it compiles and copies nothing."""

import pytest

from pallas_kernels import aot, chips
from pallas_kernels.hyper_connections.shapes import SHAPES

COEFFICIENTS = 512  # bytes a token of [tokens, Z] f32 whose last axis fills 128 lanes


@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_released_sizes(generation):
  names = list(SHAPES)
  reports = aot.compile_each(
      generation, "pallas_kernels.hyper_connections.shapes:build", [{"name": n} for n in names]
  )
  for name, report in zip(names, reports):
    tokens, what = SHAPES[name].sizes["tokens"], SHAPES[name].sizes["what"]
    if what == "gradient":
      # Small arrays of the Sinkhorn gradient; a copy of the streams would be 40 KB a token.
      assert len(report.kernels) == 2
      assert report.temp_bytes < tokens * 35_000
    else:
      # Coefficients may change their tiling on the way in and out; the streams do not.
      assert len(report.kernels) == 1
      assert report.temp_bytes <= tokens * 4 * COEFFICIENTS + 2**18
    assert report.vmem_bytes < chips.CHIPS[generation].vmem_bytes
