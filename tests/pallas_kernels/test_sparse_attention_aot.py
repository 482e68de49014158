"""What the TPU compiler makes of the decode kernel at released sizes."""

import pytest

from pallas_kernels import anchors, aot, cycles
from pallas_kernels.sparse_attention import shapes

PROGRAM = "pallas_kernels.sparse_attention.shapes:build"


@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_decode_compiles_in_one_kernel_without_a_copy_of_the_cache(generation):
  report = aot.compile_in_subprocess(generation, PROGRAM, {"name": "decode_16"})
  sizes = shapes.SHAPES["decode_16"].sizes
  table = 288 * sizes["entries"]
  window = 528 * 128 * sizes["queries"]
  # The kernel is the whole program: XLA computes nothing around it and copies nothing.
  assert (len(report.kernels), report.fusions, report.temp_bytes) == (1, 0, 0)
  # Queries, slots, masks, sink besides; no table is padded.
  assert table + window <= report.argument_bytes <= table + window + (2 << 20)
  assert report.vmem_bytes < 16 << 20


@pytest.mark.slow
def test_one_descriptor_an_entry_within_the_cycles_of_a_kernel_that_gathers_elsewhere(tmp_path):
  shape = shapes.SHAPES["decode_16"]
  aot.compile_in_subprocess("v6e", PROGRAM, {"name": "decode_16"}, tmp_path)
  total = cycles.Program(tmp_path, "v6e", shape.scalars, shape.trips).total()
  # Windows, queries, outputs and row numbers besides.
  assert 512 <= total.descriptors / shape.units <= 518
  assert total.latency / shape.units <= anchors.ANCHORS[shape.peer].cycles["v6e"]


@pytest.mark.slow
def test_xla_makes_a_program_of_the_definition():
  report = aot.compile_in_subprocess(
      "v6e", PROGRAM, {"name": "decode_16", "implementation": "reference"}
  )
  assert report.kernels == ()
