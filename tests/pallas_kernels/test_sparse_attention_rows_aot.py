"""Sparse attention of many rows at released sizes through the TPU compiler."""

import pytest

from pallas_kernels import aot, chips
from pallas_kernels.sparse_attention.shapes_rows import SHAPES

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_released_sizes(generation):
  reports = aot.compile_each(
      generation, "pallas_kernels.sparse_attention.shapes:build", [{"name": n} for n in SHAPES]
  )
  vmem = chips.CHIPS[generation].vmem_bytes
  for name, report in zip(SHAPES, reports):
    sizes = SHAPES[name].sizes
    entries, queries = 1024 * sizes["entries"], 65_536 * sizes["rows"]
    # Entries that do not fit into VMEM are laid out anew in HBM, once.
    remote = not sizes["gradient"] and entries >= vmem
    temp = 16 * MIB + 1.02 * entries * remote
    if sizes["gradient"]:
      # The other part's output, and in more than one pass the sum of d q in f32 and its terms.
      temp = (5 if 3 * entries > vmem else 1.4) * queries
    assert report.temp_bytes < temp, name
    assert report.vmem_bytes <= vmem, name
    assert len(report.kernels) == (4 if sizes["gradient"] else 2 + remote), name
