"""Grouped products at released sizes through the TPU compiler: no copy of the weights."""

import pytest

from pallas_kernels import aot, chips
from pallas_kernels.grouped_matmul.shapes import SHAPES


@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_released_sizes(generation):
  names = list(SHAPES)
  reports = aot.compile_each(
      generation, "pallas_kernels.grouped_matmul.shapes:build", [{"name": n} for n in names]
  )
  for name, report in zip(names, reports):
    sizes = SHAPES[name].sizes
    assert len(report.kernels) == 1, name
    assert report.temp_bytes < 0.01 * report.argument_bytes + 200_000, name
    assert report.vmem_bytes < chips.CHIPS[generation].vmem_bytes
    item = {"fp4": 0.5 + 1 / 32, "fp8": 1 + 1 / 32, "bf16": 2}[sizes["kind"]]
    weights = sizes["experts"] * sizes["k"] * sizes["n"] * item
    rows = 2 * sizes["rows"] * sizes["n" if sizes["transposed"] else "k"]
    # The scale words of w2 are padded from 18 rows to 24.
    assert report.argument_bytes < 1.025 * weights + rows + 10_000, name
