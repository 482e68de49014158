"""What the TPU compiler makes of the decode kernel at released sizes."""

import pytest

from pallas_kernels import aot
from pallas_kernels.sparse_attention import shapes

PROGRAM = "pallas_kernels.sparse_attention.shapes:build"


@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_decode_compiles_in_one_kernel_without_a_copy_of_the_cache(generation):
  report = aot.compile_in_subprocess(generation, PROGRAM, {"name": "decode_16"})
  sizes = shapes.SHAPES["decode_16"].sizes
  table = 288 * sizes["entries"]
  window = 528 * 128 * sizes["queries"]
  assert len(report.kernels) == 1
  # Queries, slots, masks, sink besides; no table is padded.
  assert table + window <= report.argument_bytes <= table + window + (2 << 20)
  assert report.temp_bytes < 0.01 * table
  assert report.vmem_bytes < 16 << 20


@pytest.mark.slow
def test_xla_makes_a_program_of_the_definition():
  report = aot.compile_in_subprocess(
      "v6e", PROGRAM, {"name": "decode_16", "implementation": "reference"}
  )
  assert report.kernels == ()
