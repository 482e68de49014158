"""How the model is run (scan, remat, chunks, batch) changes nothing that it computes."""

import dataclasses

import jax
import numpy as np
import pytest

from deepseek_jax.config import ComputeConfig

pytestmark = pytest.mark.slow

# Logits are of order 1. Another shape makes another program, whose sums run in another order.
OTHER_SHAPE = 5e-6


def differentiated(tiny, compute):
  """Value and gradients; the two last layers are one run, which can be scanned."""
  model = tiny.model(tiny.short, compute)
  inputs = tiny.inputs([[1] * 9 + [2] * 6 + [0]], config=tiny.short)
  value, grads = tiny.gradient(model, inputs, (inputs.rows.segments > 0).astype(np.float32))
  return value, jax.tree.leaves(grads)


@pytest.fixture(scope="module")
def plain(tiny):
  """Layers one after another, every value kept, all rows at once."""
  return differentiated(tiny, ComputeConfig(scan_layers=False))


@pytest.mark.parametrize(
    "compute",
    [
        ComputeConfig(),
        ComputeConfig(remat="layer"),
        ComputeConfig(remat="dots"),
        ComputeConfig(remat="layer", scan_layers=False, row_chunk=5),
    ],
    ids=["scan", "scan-layer", "scan-dots", "unrolled-layer-chunks"],
)
def test_scan_remat_and_chunks_change_neither_value_nor_gradient(tiny, plain, compute):
  value, grads = differentiated(tiny, compute)
  assert float(value) == pytest.approx(float(plain[0]), rel=3e-6)
  assert len(grads) == len(plain[1])
  for ours, theirs in zip(grads, plain[1]):
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * max(np.abs(theirs).max(), 0.1), rtol=0)


@pytest.mark.parametrize("chunk", [1, 12, 23, 100])
def test_any_number_of_rows_a_chunk(tiny, chunk):
  """One row (raised to the window), an even split, one row left over, all at once."""
  inputs = tiny.inputs([[1] * 24, [1] * 10 + [2] * 13 + [0]])
  live = inputs.rows.segments > 0
  compute = dataclasses.replace(tiny.compute, row_chunk=chunk)
  ours = tiny.logits(tiny.model(tiny.config, compute), inputs)
  expected = tiny.logits(tiny.model(), inputs)
  np.testing.assert_allclose(ours[live], expected[live], atol=OTHER_SHAPE, rtol=0)


def test_a_line_does_not_depend_on_its_batch(tiny):
  """At fixed length: bitwise in any place and company, to rounding in a batch of another size."""
  tokens = np.random.default_rng(0).integers(0, 64, (8, 24))
  model = tiny.model()
  run = lambda lines: tiny.logits(model, tiny.inputs(np.ones((len(lines), 24)), tokens[lines]))
  pair = run([3, 1])
  np.testing.assert_array_equal(run([1, 3])[::-1], pair)
  np.testing.assert_array_equal(run([3, 7])[0], pair[0])
  np.testing.assert_allclose(run([3])[0], pair[0], atol=OTHER_SHAPE, rtol=0)
  np.testing.assert_allclose(run(range(8))[[3, 1]], pair, atol=OTHER_SHAPE, rtol=0)


def test_the_same_call_twice_gives_the_same_bits(tiny):
  inputs = tiny.inputs([[1] * 24] * 2)
  a, b = (tiny.logits(tiny.model(), inputs) for _ in range(2))
  np.testing.assert_array_equal(a, b)
