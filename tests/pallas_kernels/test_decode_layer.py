"""Projections and experts of one row a request, interpreted, against their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode_layer import op
from pallas_kernels.decode_layer.lanes import rotation

D, L, H, HEADS, GROUPS, RANK, E, F, LAYERS = 256, 128, 256, 4, 2, 128, 6, 256, 2
LAYER = jnp.int32(1)
BUDGET = {"float32": 2e-5, "bfloat16": 2e-2}


def normal(seed, *shape, dtype="float32", scale=1.0):
  values = np.random.default_rng(seed).normal(size=shape) * scale
  return jnp.asarray(values, dtype)


def weights(seed, *shape, dtype):
  """Of one layer in a stack whose other layers must not be read."""
  own = normal(seed, *shape, dtype=dtype, scale=shape[-1] ** -0.5)
  return jnp.stack([jnp.full_like(own, np.nan), own])


def turn(rows, **how):
  angle = normal(9, rows, 16)
  return op.Turn(*rotation(jnp.cos(angle), jnp.sin(angle), **how))


def both(fn, *args, **how):
  """Results of the kernel and of the reference."""
  with pltpu.force_tpu_interpret_mode(
      pltpu.InterpretParams(
          detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise",
          dma_execution_mode="on_wait",
      )
  ):  # fmt: skip
    own = fn(*args, **how, implementation="pallas")
  return own, fn(*args, **how, implementation="reference")


def close(own, expected, dtype):
  for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, atol=BUDGET[dtype] * np.abs(b).max())


@pytest.mark.parametrize(("rows", "dtype"), [(16, "float32"), (3, "float32"), (16, "bfloat16")])
def test_projections(rows, dtype):
  make = lambda seed, *shape: weights(seed, *shape, dtype=dtype)
  norms = [make(i, 1, width) for i, width in enumerate((D, L, H))]
  sink = weights(11, 1, HEADS, dtype="float32")
  u = normal(5, rows, D, dtype=dtype)
  args = norms[0], make(3, L, D), norms[1], make(4, H, D), norms[2], make(7, HEADS * H, L), sink
  own, expected = both(op.project, u, LAYER, *args, turn(rows), eps=1e-20, unit=32)
  close(own, expected, dtype)
  assert own.kv.shape == (32, H)
  x, back = normal(8, rows, HEADS, H, dtype=dtype), turn(rows, inverse=True)
  wo_a, wo_b = make(10, GROUPS * RANK, HEADS * H // GROUPS), make(12, D, GROUPS * RANK)
  close(*both(op.outputs, x, LAYER, wo_a, wo_b, back), dtype)


def integers(seed, *shape):
  bits = np.random.default_rng(seed).integers(-(2**31), 2**31, shape)
  return jnp.asarray(bits.astype(np.int32))


@pytest.mark.parametrize("lines", [16, 3, 40])
def test_rows_enter_their_rings(lines):
  """Any slot, the last one, and one behind the ring."""
  padded = -(-lines // 32) * 32
  slots = np.random.default_rng(1).integers(0, 128, lines)
  slots[:3] = 127, 128, 0
  rows = integers(2, padded, 128), integers(3, padded // 32, 128)
  rings = integers(4, LAYERS, lines, 128, 128), integers(5, LAYERS, lines, 4, 128)
  own, expected = both(op.ring, jnp.asarray(slots, jnp.int32), LAYER, *rows, *rings)
  for a, b, old in zip(own, expected, rings, strict=True):
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a[1], old[1, 1])
  assert (np.asarray(own[0][0, 127]) == np.asarray(rows[0][0])).all()
  assert (np.asarray(own[1][0, 3, 124:]) == np.asarray(rows[1][0, :4])).all()


def mixture_of(rows, dtype, bias, live, active=3):
  make = lambda seed, *shape: weights(seed, *shape, dtype=dtype)
  bank = op.Bank(make(3, E, F, D), make(4, E, D, F), make(5, E, F, D))
  shared = op.Bank(make(6, F, D), make(7, D, F), make(8, F, D))
  bias = jnp.stack([jnp.full(E, np.nan), jnp.asarray(bias, jnp.float32)])[..., None]
  args = jnp.asarray(live), LAYER, make(1, 1, D), make(2, E, D), bias, bank, shared
  u = normal(0, rows, D, dtype=dtype)
  return both(op.mixture, u, *args, active=active, scale=2.5, limit=10.0, eps=1e-20)


@pytest.mark.parametrize(("rows", "dtype"), [(16, "float32"), (3, "float32"), (16, "bfloat16")])
def test_mixture(rows, dtype):
  live = np.arange(rows) != 1
  close(*mixture_of(rows, dtype, np.zeros(E), live.astype(np.int32)), dtype)


@pytest.mark.parametrize("active", [1, 2, 6])
def test_mixture_of_few_experts_or_all(active):
  """The bias sends all rows to the first experts, or all experts are in use."""
  bias = np.where(np.arange(E) < active, 100.0, 0.0)
  close(*mixture_of(4, "float32", bias, np.ones(4, np.int32), active), "float32")


@pytest.mark.parametrize("active", [1, 3])
def test_routes_of_many_rows(active):
  """Two blocks of rows: choices and weights along lanes, absent rows without an expert."""
  rows = 384
  make = lambda seed, *shape: weights(seed, *shape, dtype="float32")
  live = (np.arange(rows) % 5 > 0).astype(np.int32)
  args = normal(0, rows, D), jnp.asarray(live), LAYER, make(1, 1, D), make(2, E, D), make(3, E, 1)
  own, expected = both(op.route, *args, active=active, scale=2.5, eps=1e-20)
  np.testing.assert_array_equal(own.ids, expected.ids)
  close((own.x, own.weights), (expected.x, expected.weights), "float32")
  assert (np.asarray(own.ids)[:, live == 0] == E).all()


def test_no_row_lives():
  close(*mixture_of(4, "float32", np.zeros(E), np.zeros(4, np.int32)), "float32")


def test_rows_of_zeros_tie_to_the_lowest_experts():
  make = lambda seed, *shape: weights(seed, *shape, dtype="float32")
  bank = op.Bank(make(3, E, F, D), make(4, E, D, F), make(5, E, F, D))
  nan = op.Bank(*(a.at[:, 2:].set(np.nan) for a in bank))
  shared = op.Bank(make(6, F, D), make(7, D, F), make(8, F, D))
  args = (
      jnp.ones(3, jnp.int32),
      LAYER,
      make(1, 1, D),
      make(2, E, D),
      jnp.zeros((2, E, 1)),
      nan,
      shared,
  )
  with pltpu.force_tpu_interpret_mode():
    out = op.mixture(
        jnp.zeros((3, D)), *args, active=2, scale=1.0, limit=0.0, eps=1e-20,
        implementation="pallas",
    )  # fmt: skip
  assert (np.asarray(out) == 0).all()


@pytest.mark.parametrize(("sizes", "found"), [
    (((129, jnp.float32, 128), {}), "129 rows"),
    (((1, jnp.float16, 128), {}), "float16"),
    (((1, jnp.float32, 96), {}), "96"),
    (((1, jnp.float32, 128), dict(experts=16, active=9)), "9 of 16 experts"),
])  # fmt: skip
def test_refusals_name_the_limit(sizes, found):
  assert found in op.refusal(*sizes[0], **sizes[1])
