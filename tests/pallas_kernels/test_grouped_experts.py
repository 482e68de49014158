"""Experts over sorted rows, interpreted, against their definition."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_experts import op

D, F, E, LAYERS = 128, 256, 5, 2
LAYER = jnp.int32(1)
BUDGET = {"float32": 2e-5, "bfloat16": 2e-2}


def normal(seed, *shape, dtype="float32", scale=1.0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def bank(dtype):
  """Of one layer in a stack whose other layers must not be read."""
  shapes = (E, F, D), (E, D, F), (E, F, D)
  own = (normal(i, *s, dtype=dtype, scale=s[-1] ** -0.5) for i, s in enumerate(shapes))
  return [jnp.stack([jnp.full_like(w, np.nan), w]) for w in own]


@pytest.mark.parametrize(
    ("rows", "sizes", "dtype"),
    [
        (256, (100, 0, 56, 1, 90), "float32"),
        (256, (0, 0, 256, 0, 0), "float32"),
        (300, (1, 127, 0, 128, 44), "bfloat16"),
        (40, (0, 0, 0, 0, 0), "float32"),
        (130, (0, 129, 0, 0, 0), "float32"),
    ],
)
def test_values(rows, sizes, dtype):
  args = normal(9, rows, D, dtype=dtype), normal(8, rows), jnp.asarray(sizes, jnp.int32), LAYER
  expected = op.grouped_experts(*args, *bank(dtype), limit=1.0, implementation="reference")
  with pltpu.force_tpu_interpret_mode(
      pltpu.InterpretParams(
          detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise",
          dma_execution_mode="on_wait",
      )
  ):  # fmt: skip
    own = op.grouped_experts(*args, *bank(dtype), limit=1.0, implementation="pallas")
  assert own.dtype == expected.dtype
  own, expected = np.asarray(own, np.float32), np.asarray(expected, np.float32)
  np.testing.assert_allclose(own, expected, atol=BUDGET[dtype] * max(1.0, np.abs(expected).max()))
  assert (own[sum(sizes) :] == 0).all()


def test_refusals_name_the_limit():
  assert "96" in op.refusal(jnp.float32, 96)
  assert "float16" in op.refusal(jnp.float16, 128)
