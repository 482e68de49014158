"""Rows in their stored layouts: kernels against the definition, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import aot
from pallas_kernels.quantize import kernel_unpack, op
from pallas_kernels.quantize.stored import INDEX, LAYOUTS, MAIN, WINDOW

INTERPRETER = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
    dma_execution_mode="on_wait",
)
layouts = pytest.mark.parametrize("stored", LAYOUTS.values(), ids=lambda each: each.name)


def rows_of(stored, rows, dtype):
  """Ordinary rows of all sizes, and every kind of block that is not ordinary."""
  rng = np.random.default_rng(5)
  x = rng.normal(size=(rows, stored.width)) * np.exp(6 * rng.normal(size=(rows, 1)))
  x = x.astype(np.float32)
  x[0] = 0
  x[1] = -0.0
  x[2, 5] = np.nan
  x[3, 7] = -np.inf
  x[4] = np.finfo(np.float32).max
  x[5] = np.finfo(np.float32).tiny / 4
  x[6] = np.round(x[6])  # ties
  x[7] *= np.float32(1e-25)
  x[8, -1] = np.nan
  return jnp.asarray(x).astype(dtype)


def bits(x):
  """bf16 bits with one pattern for NaN."""
  found = np.asarray(x).view(np.uint16)
  return np.where(found & 0x7FFF > 0x7F80, 0x7FC0, found)


@layouts
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.slow
def test_packed_words_are_those_of_the_definition(stored, dtype):
  x = rows_of(stored, stored.unit, dtype)
  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    found = op.pack(x, stored, implementation="pallas")
  for buffer, expected in zip(found, op.pack(x, stored, implementation="reference")):
    np.testing.assert_array_equal(buffer, expected)


@layouts
@pytest.mark.parametrize("packed", [True, False], ids=["bf16", "f32"])
@pytest.mark.slow
def test_unpacked_rows_are_those_of_the_definition(stored, packed):
  x = rows_of(stored, 2 * stored.unit, jnp.float32)
  buffers = op.pack(x, stored)
  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    found = kernel_unpack.unpack(buffers, stored, 2 * stored.unit, packed)
  np.testing.assert_array_equal(bits(found), bits(op.unpack(buffers, stored)))


@layouts
@pytest.mark.slow
def test_every_code_and_scale_is_decoded(stored):
  rng = np.random.default_rng(6)
  buffers = [
      jnp.asarray(rng.integers(-(2**31), 2**31, shape).astype(np.int32))
      for shape in stored.shapes(stored.unit)
  ]
  if stored.format.scale == "e8m0":
    # The byte 0 is never stored, and above 252 products leave the range of bf16.
    raw = np.ascontiguousarray(buffers[1]).view(np.uint8)
    buffers[1] = jnp.asarray(np.clip(raw, 3, 255).view(np.int32))
  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    found = op.unpack(tuple(buffers), stored, implementation="pallas")
  expected = op.unpack(tuple(buffers), stored, implementation="reference")
  np.testing.assert_array_equal(bits(found), bits(expected))


@layouts
def test_unpacking_gives_what_was_rounded(stored):
  x = rows_of(stored, stored.unit, jnp.bfloat16)
  expected = op.fake_quantize(x, stored.format)
  np.testing.assert_array_equal(bits(op.unpack(op.pack(x, stored), stored)), bits(expected))


def test_bytes_of_a_row():
  sizes = {s.name: 4 * sum(a * b for a, b in s.shapes(1024)) / 1024 for s in LAYOUTS.values()}
  assert sizes == {"main": 288, "index": 68, "window": 528}


class TestRefusals:

  def test_rows(self):
    with pytest.raises(
        ValueError, match=r"x has shape \(64, 512\): main rows are \[N, 512\] with N"
    ):
      op.pack(jnp.zeros((64, 512)), MAIN)
    with pytest.raises(ValueError, match=r"x has shape \(128, 64\): index rows are \[N, 128\]"):
      op.pack(jnp.zeros((128, 64)), INDEX)
    with pytest.raises(ValueError, match="x has dtype float16"):
      op.pack(jnp.zeros((32, 512), jnp.float16), WINDOW)

  def test_buffers(self):
    with pytest.raises(ValueError, match=r"main arrays of 128 rows have \(\(72, 128\),\)"):
      op.unpack((jnp.zeros((71, 128), jnp.int32),), MAIN)
    with pytest.raises(
        ValueError, match=r"index arrays of 128 rows have \(\(16, 128\), \(1, 128\)"
    ):
      op.unpack((jnp.zeros((16, 128), jnp.int32), jnp.zeros((2, 128), jnp.int32)), INDEX)

  def test_a_kernel_off_a_tpu(self):
    with pytest.raises(ValueError, match="implementation='pallas' on cpu"):
      op.pack(jnp.zeros((128, 512)), MAIN, implementation="pallas")

  def test_a_block_that_does_not_fit(self):
    # Without eights of scale rows the block is the whole array.
    rows = (1 << 20) + 128
    buffers = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in INDEX.shapes(rows))
    unpack = lambda *buffers: op.unpack(buffers, INDEX, implementation="pallas")
    with pltpu.force_tpu_interpret_mode(), pytest.raises(ValueError, match="unpack_index: 1048704"):
      jax.eval_shape(unpack, *buffers)


@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_released_sizes_compile_without_a_copy(generation):
  names = ["unpack_main_1m", "unpack_index_1m", "pack_main_1m", "pack_index_1m"]
  names += ["unpack_window_128", "pack_window_128"]
  reports = aot.compile_each(
      generation, "pallas_kernels.quantize.shapes:build", [{"name": name} for name in names]
  )
  entries = 1 << 20
  for name, report in zip(names, reports):
    assert report.temp_bytes == 0, name
    assert len(report.kernels) == 1, name
  main, index, packed, *_ = reports
  assert main.argument_bytes == packed.output_bytes == 288 * entries
  assert index.argument_bytes == 68 * entries
