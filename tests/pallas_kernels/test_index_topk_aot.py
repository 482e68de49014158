"""The kernels at released sizes, compiled by the TPU compiler for every generation."""

import pytest

from pallas_kernels import aot
from pallas_kernels.index_topk.shapes import SHAPES

pytestmark = pytest.mark.slow

KEY_BYTES = 68
COMPILED = [name for name in SHAPES if name.endswith(("16_64k", "128_1m", "prefill_1m", "16_1m"))]


@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_no_copy_of_keys_or_scores(generation):
  reports = aot.compile_each(
      generation, "pallas_kernels.index_topk.shapes:build", [{"name": name} for name in COMPILED]
  )
  for name, report in zip(COMPILED, reports):
    sizes = SHAPES[name].sizes
    assert report.kernels, name
    if name.startswith("scores"):
      keys = sizes["batch"] * sizes["entries"] * KEY_BYTES
      assert keys <= report.argument_bytes < 1.02 * keys, name
      assert report.temp_bytes < 0.01 * keys, name
    elif name.startswith("top"):
      assert report.temp_bytes < 0.01 * report.argument_bytes, name
    else:
      # The maxima of blocks, an eighth of the scores, stand in memory between the two steps.
      assert report.temp_bytes < 0.14 * report.argument_bytes, name
    assert report.vmem_bytes < 48 << 20, name
