"""A layer's kernels of one row a request, and grouped experts, compiled at released widths."""

import pytest

from pallas_kernels import aot
from pallas_kernels.decode_layer.shapes import SHAPES
from pallas_kernels.grouped_experts.shapes import SHAPES as GROUPED


@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_weights_are_read_where_they_are(generation):
  for package, shapes in (("decode_layer", SHAPES), ("grouped_experts", GROUPED)):
    target = f"pallas_kernels.{package}.shapes:build"
    reports = aot.compile_each(generation, target, [{"name": name} for name in shapes])
    for name, report in zip(shapes, reports):
      assert report.temp_bytes < 0.01 * report.argument_bytes, name
      assert report.vmem_bytes < 62 << 20, name
