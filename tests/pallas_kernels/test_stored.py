"""Rows in their stored layouts: kernels against the definition, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.nn import rope
from pallas_kernels import aot
from pallas_kernels.quantize import decode, kernel_unpack, op
from pallas_kernels.quantize.stored import INDEX, LAYOUTS, MAIN, WINDOW

INTERPRETER = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
    dma_execution_mode="on_wait",
)
arithmetics = pytest.mark.parametrize(
    "arithmetic", [decode.FLOAT32, decode.BFLOAT16, decode.FLOAT4]
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
@arithmetics
@pytest.mark.slow
def test_unpacked_rows_are_those_of_the_definition(stored, arithmetic):
  x = rows_of(stored, stored.unit, jnp.float32)
  buffers = op.pack(x, stored)
  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    found = kernel_unpack.unpack(buffers, stored, arithmetic)
  np.testing.assert_array_equal(bits(found), bits(op.unpack(buffers, stored)))


def random_buffers(stored, rows, seed=6):
  """Every code and scale, but those that kernels do not tell apart."""
  rng = np.random.default_rng(seed)
  buffers = [
      jnp.asarray(rng.integers(-(2**31), 2**31, shape).astype(np.int32))
      for shape in stored.shapes(rows)
  ]
  if stored.format.scale == "e8m0":
    # The byte 0 is never stored, and above 252 products leave the range of bf16.
    raw = np.ascontiguousarray(buffers[1]).view(np.uint8)
    buffers[1] = jnp.asarray(np.clip(raw, 3, 255).view(np.int32))
  return tuple(buffers)


@pytest.mark.parametrize(
    "stored",
    [pytest.param(MAIN, marks=pytest.mark.slow, id="main"), pytest.param(INDEX, id="index")],
)
@arithmetics
def test_every_code_and_scale_is_decoded(stored, arithmetic):
  # Bits of zeros included: the casts of a chip and the integers are one function.
  buffers = random_buffers(stored, stored.unit)
  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    found = kernel_unpack.unpack(buffers, stored, arithmetic)
  expected = bits(op.unpack(buffers, stored, implementation="reference"))
  assert (expected == 0x8000).any()
  np.testing.assert_array_equal(bits(found), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "rows", "block"), [(MAIN, 384, 256), (INDEX, 1152, 1024)])
def test_a_last_block_may_be_short(stored, rows, block):
  buffers = random_buffers(stored, rows)
  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    found = kernel_unpack.unpack(buffers, stored, decode.FLOAT4, block)
  np.testing.assert_array_equal(bits(found), bits(op.unpack(buffers, stored)))


@given(seed=st.integers(0, 99), units=st.integers(1, 3))
@settings(max_examples=4, deadline=None)
@pytest.mark.slow
def test_the_window_of_any_bits(seed, units):
  buffers = random_buffers(WINDOW, units * WINDOW.unit, seed)
  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    found = op.unpack(buffers, WINDOW, implementation="pallas")
  np.testing.assert_array_equal(bits(found), bits(op.unpack(buffers, WINDOW)))


def rotation_of(rows, pairs=32):
  rng = np.random.default_rng(7)
  angle = rng.integers(0, 1 << 20, (rows, 1)) * rng.uniform(0, 1, (1, pairs))
  angle = jnp.asarray(angle, jnp.float32)
  return jnp.cos(angle), jnp.sin(angle)


class TestRotation:

  @layouts
  @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
  def test_is_the_models(self, stored, dtype):
    x = rows_of(stored, stored.unit, dtype)
    rotation = rotation_of(stored.unit)
    table = rope.Rotation(*(each[None] for each in rotation))
    found = op.pack(x, stored, rotation=rotation)
    expected = op.pack(rope.rotate(x[None], table)[0], stored)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert (found[0] != op.pack(x, stored)[0]).any()

  @pytest.mark.slow
  @pytest.mark.parametrize(
      ("stored", "dtype", "pairs"),
      [(MAIN, jnp.bfloat16, 32), (INDEX, jnp.float32, 32), (WINDOW, jnp.bfloat16, 64)],
  )
  def test_is_fused_bit_for_bit(self, stored, dtype, pairs):
    x, rotation = rows_of(stored, stored.unit, dtype), rotation_of(stored.unit, pairs)
    with pltpu.force_tpu_interpret_mode(INTERPRETER):
      found = op.pack(x, stored, rotation=rotation, implementation="pallas")
    jax.tree.map(np.testing.assert_array_equal, found, op.pack(x, stored, rotation=rotation))

  @pytest.mark.slow
  @given(seed=st.integers(0, 99), units=st.integers(1, 3), pairs=st.sampled_from([1, 32, 64]))
  @settings(max_examples=4, deadline=None)
  def test_rows_are_packed_one_by_one(self, seed, units, pairs):
    x = np.random.default_rng(seed).normal(size=(units * WINDOW.unit, WINDOW.width))
    x, rotation = jnp.asarray(x, jnp.float32), rotation_of(units * WINDOW.unit, pairs)
    together = op.pack(x, WINDOW, rotation=rotation)
    last = slice(-WINDOW.unit, None)
    alone = op.pack(x[last], WINDOW, rotation=tuple(each[last] for each in rotation))
    for a, b in zip(together, alone):
      np.testing.assert_array_equal(a[-b.shape[0] :], b)


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
    x = jax.ShapeDtypeStruct(((1 << 20) + 128, INDEX.width), jnp.bfloat16)
    pack = lambda x: op.pack(x, INDEX, implementation="pallas")
    with pltpu.force_tpu_interpret_mode(), pytest.raises(ValueError, match="pack_index: 1048704"):
      jax.eval_shape(pack, x)

  @pytest.mark.parametrize(
      ("shape", "dtype", "match"),
      [
          ((32, 32), jnp.bfloat16, "cos has dtype bfloat16"),
          ((31, 32), jnp.float32, r"cos has shape \(31, 32\): cos and sin are \[32, R2\] both"),
          ((32, 65), jnp.float32, "with R2 from 1 to 64"),
      ],
  )
  def test_rotations(self, shape, dtype, match):
    table = jnp.zeros(shape, dtype)
    with pytest.raises(ValueError, match=match):
      op.pack(jnp.zeros((32, 512)), WINDOW, rotation=(table, table))


@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_released_sizes_compile_without_a_copy(generation):
  names = ["unpack_main_1m", "unpack_index_1m", "pack_main_1m", "pack_index_1m"]
  names += ["unpack_window_128", "pack_window_128"]
  names += ["rotate_pack_main_2k", "rotate_pack_index_2k", "rotate_pack_window_128"]
  reports = aot.compile_each(
      generation, "pallas_kernels.quantize.shapes:build", [{"name": name} for name in names]
  )
  entries = 1 << 20
  for name, report in zip(names, reports):
    # Cosines and sines, side by side in an array of their own, and on v5p in copies before.
    tables = 3 * 2048 * 512 if name.startswith("rotate") else 0
    assert report.temp_bytes <= tables, name
    assert len(report.kernels) == 1, name
  main, index, packed, *_ = reports
  assert main.argument_bytes == packed.output_bytes == 288 * entries
  assert index.argument_bytes == 68 * entries
