"""Grouped products with packed weights: kernel against reference, laws of groups, stored bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import layout, op
from pallas_kernels.grouped_matmul.visits import visits
from pallas_kernels.quantize import op as quantize

INTERPRETER = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
    dma_execution_mode="on_wait",
)
# Largest difference in units of the reference's largest value: output and gradient of the rows.
BUDGET = {jnp.float32: 2e-5, jnp.bfloat16: 4e-3}


def released(kind, experts, outputs, inputs, seed=0, scales=(110, 130)):
  """Random released bytes: codes of all values but NaN, and scale bytes."""
  rng = np.random.default_rng(seed)
  if kind == "fp4":
    codes = rng.integers(-128, 128, (experts, outputs, inputs // 2)).astype(np.int8)
    squares = experts, outputs, inputs // 32
  else:
    codes = rng.integers(0, 256, (experts, outputs, inputs)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    squares = experts, outputs // 32, inputs // 32
  return jnp.asarray(codes), jnp.asarray(rng.integers(*scales, squares), jnp.uint8)


PACK = {"fp4": layout.pack_fp4, "fp8": layout.pack_fp8}


def both(x, weights, sizes, implementation, outputs=None):
  """Output and gradient of the rows, as f32 arrays."""
  sizes = jnp.asarray(sizes, jnp.int32)

  def forward(x):
    return op.grouped_matmul(x, weights, sizes, outputs, implementation=implementation)

  def run(x):
    out, pull = jax.vjp(forward, x)
    rng = np.random.default_rng(1)
    return out, pull(jnp.asarray(rng.standard_normal(out.shape), out.dtype))[0]

  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    return [np.asarray(each, np.float32) for each in jax.jit(run)(x)]


def rows(count, inputs, used, dtype=jnp.bfloat16):
  """Random rows; those behind the last group are NaN."""
  x = np.random.default_rng(2).standard_normal((count, inputs))
  x[used:] = np.nan
  return jnp.asarray(x, dtype)


def compare(x, weights, sizes, outputs=None):
  used = sum(sizes)
  found = both(x, weights, sizes, "pallas", outputs)
  expected = both(x, weights, sizes, "reference", outputs)
  for one, other in zip(found, expected):
    assert one.shape == other.shape
    assert not one[used:].any()
    if used:
      error = np.max(np.abs(one - other)[:used]) / np.max(np.abs(other[:used]))
      assert error < BUDGET[x.dtype.type], error


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_value_and_gradient(kind, dtype):
  sizes = [5, 0, 32]
  weights = PACK[kind](*released(kind, 3, 128, 256))
  compare(rows(40, 256, 37, dtype), weights, sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [[0] * 8, [29] + [0] * 7, [0] * 7 + [29], [2, 0, 1, 3, 0, 12, 9, 1]]
)
def test_few_rows(sizes):
  weights = layout.pack_fp4(*released("fp4", 8, 128, 256))
  assert op.sizes_of(32, weights, jnp.bfloat16, False).few
  compare(rows(29, 256, sum(sizes)), weights, sizes)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_groups(data):
  experts = data.draw(st.sampled_from([2, 9]))
  sizes = data.draw(st.lists(st.integers(0, 20), min_size=experts, max_size=experts))
  behind = data.draw(st.integers(0, 18))
  count = max(1, sum(sizes) + behind)
  weights = layout.pack_fp4(*released("fp4", experts, 128, 256))
  compare(rows(count, 256, sum(sizes)), weights, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_tiles_of_rows_and_odd_widths(kind):
  # Two tiles of 768 and 32 rows of which groups cross the edge; padded inputs and outputs.
  codes = released(kind, 3, 160, 288)
  compare(rows(800, 288, 790), PACK[kind](*codes), [700, 80, 10], outputs=160)


@pytest.mark.parametrize("implementation", ["pallas", "reference"])
def test_definition(implementation):
  """Row by row: the matrix of its group, decoded by the quantiser."""
  sizes, x = [3, 0, 2, 1], rows(6, 256, 6, jnp.float32)
  codes = released("fp4", 4, 128, 256)
  out, _ = both(x, layout.pack_fp4(*codes), sizes, implementation)
  matrices = np.asarray(quantize.dequantize_rows(*codes))
  expert = np.repeat(np.arange(4), sizes)
  expected = np.einsum("sk,snk->sn", np.asarray(x, np.float64), matrices[expert])
  assert np.max(np.abs(out - expected)) < 2e-5 * np.max(np.abs(expected))


@pytest.mark.slow
def test_megablox():
  """Value and both gradients against `ragged_dot`; rows behind the last group are NaN."""
  rng = np.random.default_rng(0)
  w = jnp.asarray(rng.standard_normal((3, 128, 256)) / 16, jnp.bfloat16)
  x, sizes = rows(40, 256, 31), jnp.asarray([11, 0, 20], jnp.int32)

  def run(implementation):
    product = lambda x, w: op.grouped_matmul(x, w, sizes, implementation=implementation)
    out, pull = jax.vjp(product, x, w)
    return out, *pull(jnp.ones_like(out))

  with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
    found = jax.jit(run, static_argnums=0)("pallas")
  for one, other in zip(found, run("reference")):
    one, other = (np.asarray(a, np.float32) for a in (one, other))
    assert np.max(np.abs(one - other)) <= 8e-3 * np.max(np.abs(other))


def test_plain_weights_are_differentiable():
  rng = np.random.default_rng(0)
  x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((7, 5), (3, 4, 5)))
  sizes = jnp.asarray([2, 0, 4], jnp.int32)
  which = np.repeat([0, 2], [2, 4])

  def plain(x, w):
    return jnp.sum(jnp.sin(jnp.einsum("sk,snk->sn", x[:6], w[which], precision="highest")))

  def grouped(x, w):
    return jnp.sum(jnp.sin(op.grouped_matmul(x, w, sizes)))

  for one, other in zip(jax.grad(grouped, (0, 1))(x, w), jax.grad(plain, (0, 1))(x, w)):
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("few", [True, False])
def test_nan_scale_reaches_its_column_alone(few):
  codes, scales = released("fp4", 8, 128, 256)
  weights = layout.pack_fp4(codes, scales.at[2, 5, 3].set(255))
  sizes = [1, 2, 3, 1, 0, 2, 3, 3] if few else [4, 9, 10, 17, 0, 3, 3, 2]
  x = rows(sum(sizes), 256, sum(sizes))
  out, _ = both(x, weights, sizes, "pallas")
  mine = np.repeat(np.arange(8), sizes) == 2
  assert np.isnan(out[mine, 5]).all()
  out[mine, 5] = 0
  assert np.isfinite(out).all()


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_packing_returns_every_byte(kind):
  codes, scales = released(kind, 2, 160, 288, scales=(0, 256))
  unpack = {"fp4": layout.unpack_fp4, "fp8": layout.unpack_fp8}[kind]
  packed = PACK[kind](codes, scales)
  for one, other in zip(unpack(packed, 160, 288), (codes, scales)):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)
  assert packed.words.size * 4 == 2 * 256 * 512 // (2 if kind == "fp4" else 1)


@given(
    sizes=st.lists(st.integers(0, 25), min_size=6, max_size=6), count=st.sampled_from([151, 160])
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_visits_take_every_row_once(sizes, count):
  tile = 32
  at = visits(jnp.asarray(sizes, jnp.int32), count, tile)
  owner = np.full(count, -1)
  for t, e, start, stop in zip(*map(np.asarray, at)):
    mine = np.arange(t * tile + start, t * tile + stop)
    assert (owner[mine] == -1).all()
    owner[mine] = e
  expected = np.repeat(np.arange(len(sizes)), sizes)
  np.testing.assert_array_equal(owner[: sum(sizes)], expected)
  assert (owner[sum(sizes) :] == -1).all()
  tiles = np.asarray(at.tile)
  assert set(tiles) == set(range(-(-count // tile)))
  assert (np.diff(tiles) >= 0).all()
  assert (np.diff(np.asarray(at.matrix)) >= 0).all()


def test_refusals():
  weights = layout.pack_fp4(*released("fp4", 2, 128, 256))
  x, sizes = rows(8, 256, 8), jnp.asarray([4, 4], jnp.int32)
  cases = {
      "x has dtype float16": (x.astype(jnp.float16), weights, sizes),
      "group_sizes has dtype int16": (x, weights, sizes.astype(jnp.int16)),
      "group_sizes has shape": (x, weights, sizes[:1]),
      "x has 600 inputs": (jnp.zeros((8, 600), x.dtype), weights, sizes),
      "outputs=0": (x, weights, sizes, 0),
      "x has no rows": (x[:0], weights, sizes),
      "weights are float32": (x, jnp.zeros((2, 3, 256)), sizes),
      "words have shape": (x, layout.Fp4(weights.words[:, :-1], weights.scales), sizes),
  }
  for message, arguments in cases.items():
    with pytest.raises(ValueError, match=message):
      op.grouped_matmul(*arguments)
  with pytest.raises(ValueError, match="implementation='pallas' on cpu"):
    op.grouped_matmul(x, weights, sizes, implementation="pallas")
  with pytest.raises(ValueError, match="allowed are None, 'reference'"):
    op.grouped_matmul(x, jnp.zeros((2, 3, 256), x.dtype), sizes, implementation="pallas")
  with pytest.raises(ValueError, match="scale_bytes has shape"):
    layout.pack_fp4(jnp.zeros((2, 128, 128), jnp.int8), jnp.zeros((2, 128, 4), jnp.uint8))
  wide = layout.Fp4(
      jax.ShapeDtypeStruct((1, 2**16, 128), jnp.int32),
      jax.ShapeDtypeStruct((1, 2**12, 128), jnp.int32),
  )
  with pytest.raises(ValueError, match="bytes of VMEM"):
    op.sizes_of(16, wide, jnp.bfloat16, False)
