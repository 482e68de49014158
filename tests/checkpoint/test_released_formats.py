"""FP8 and FP4 weights: host and device decode alike, and what is encoded is what was meant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_jax import weight_formats
from deepseek_jax.quantised import Quantised, dequantised
from deepseek_jax.weight_formats import FORMATS, FP4_ROWS, FP8_ROWS, FP8_TILES
from pallas_kernels.quantize import op
from pallas_kernels.quantize.formats import Format

ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def drawn(fmt, shape=(70, 96), seed=0, lowest=100, highest=140):
  """Random codes, without NaN, and scales."""
  rng = np.random.default_rng(seed)
  codes = rng.integers(0, 256, fmt.code_shape(shape), np.uint8)
  if fmt.dtype == "I8":
    codes = codes.view(np.int8)
  else:
    codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
  scales = rng.integers(lowest, highest, fmt.scale_shape(shape), np.uint8)
  return codes, scales


def test_golden_weights(golden):
  file = golden("ops")
  for fmt, codes in ((FP8_TILES, "wfp8/codes"), (FP4_ROWS, "wfp4/packed_i8")):
    group = codes[:5]
    values = fmt.decode(file[codes], file[f"{group}scale_bytes"])
    np.testing.assert_array_equal(values, file[f"{group}deq"])


@ALL
def test_host_and_device_decode_alike(fmt):
  codes, scales = drawn(fmt)
  on_device = Quantised(jnp.asarray(codes), jnp.asarray(scales), fmt.name)
  np.testing.assert_array_equal(fmt.decode(codes, scales), on_device.dequantise())
  assert on_device.shape == fmt.decode(codes, scales).shape
  bf16 = on_device.dequantise(jnp.bfloat16)
  np.testing.assert_array_equal(fmt.decode(codes, scales), bf16.astype(jnp.float32))


def test_every_code_and_every_scale():
  codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
  # 2^-127 and products below f32's normal numbers are flushed on devices; 255 is NaN.
  scales = np.tile(np.arange(20, 256, dtype=np.uint8)[:, None], (1, 8))
  on_device = Quantised(jnp.asarray(codes[:236]), jnp.asarray(scales), "fp8_rows").dequantise()
  np.testing.assert_array_equal(FP8_ROWS.decode(codes[:236], scales), on_device)
  packed = np.tile(np.arange(256, dtype=np.uint8), (236, 1)).view(np.int8)
  scales = np.repeat(scales, 2, axis=1)
  on_device = Quantised(jnp.asarray(packed), jnp.asarray(scales), "fp4_rows").dequantise()
  np.testing.assert_array_equal(FP4_ROWS.decode(packed, scales), on_device)


@ALL
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_block_decodes_to_the_slice_of_the_whole(fmt, data):
  codes, scales = drawn(fmt)
  whole = fmt.decode(codes, scales)
  a, b = sorted(data.draw(st.lists(st.integers(0, 70), min_size=2, max_size=2, unique=True)))
  c, d = sorted(data.draw(st.lists(st.integers(0, 48), min_size=2, max_size=2, unique=True)))
  c, d, per_byte = 2 * c, 2 * d, fmt.per_byte
  block = fmt.decode(
      codes[a:b, c // per_byte : d // per_byte],
      scales[a // fmt.rows : -(-b // fmt.rows), c // 32 : -(-d // 32)],
      (a % fmt.rows, c % 32),
  )
  np.testing.assert_array_equal(block, whole[a:b, c:d])


@pytest.mark.parametrize("fmt", [FP8_ROWS, FP4_ROWS], ids=["fp8_rows", "fp4_rows"])
def test_encoding_is_the_quantiser_of_the_caches_with_blocks_of_32(fmt):
  rng = np.random.default_rng(1)
  values = rng.standard_normal((64, 96)) * np.exp2(rng.integers(-100, 100, (64, 96)))
  values[32:] = rng.standard_normal((32, 96))
  # At and beside the largest element; halves are ties; a block of zeros.
  values[0, :4], values[1, :4], values[2, 32:64] = (448, 1, 6, 3), (449, 7, -6.5, 0.5), 0
  values = values.astype(np.float32)
  codes, scales = fmt.encode(values)
  floor = fmt.element.largest * 2.0**-126
  theirs, bytes_ = op.quantize(
      jnp.asarray(values), Format("weights", fmt.element, 32, "e8m0", floor)
  )
  if fmt.per_byte == 2:
    theirs = op.pack_nibbles(theirs).view(jnp.int8)
  np.testing.assert_array_equal(codes, theirs)
  np.testing.assert_array_equal(scales, bytes_)


@ALL
def test_decoded_values_encode_to_themselves(fmt):
  codes, scales = drawn(fmt)
  values = fmt.decode(codes, scales)
  again_codes, again_scales = fmt.encode(values)
  np.testing.assert_array_equal(fmt.decode(again_codes, again_scales), values)
  assert again_codes.dtype == codes.dtype
  assert again_codes.shape == codes.shape
  # Only a block that does not use its upper half has another scale.
  assert np.all(again_scales <= scales)


@ALL
def test_tiles_of_zeros_get_no_nan_scale(fmt):
  codes, scales = fmt.encode(np.zeros((40, 64), np.float32))
  assert not codes.any()
  assert np.all((scales > 0) & (scales < 255))


@ALL
def test_untouched_blocks_keep_their_bytes(fmt):
  codes, scales = drawn(fmt)
  values = fmt.decode(codes, scales)
  for kept, original in zip(fmt.encode_like(values, codes, scales), (codes, scales)):
    np.testing.assert_array_equal(kept, original)
  values[69, 40] = 3e4
  new_codes, new_scales = fmt.encode_like(values, codes, scales)
  assert np.argwhere(new_scales != scales).tolist() == [[69 // fmt.rows, 1]]
  row, column = np.argwhere(new_codes != codes).T
  assert set(row // fmt.rows) == {69 // fmt.rows}
  assert set(column * fmt.per_byte // 32) == {1}
  found = fmt.decode(new_codes, new_scales)
  assert found[69, 40] == pytest.approx(3e4, rel=1 / 6)
  touched = np.zeros(values.shape, bool)
  touched[69 // fmt.rows * fmt.rows :, 32:64] = True
  np.testing.assert_array_equal(found[~touched], values[~touched])


def test_rows_of_a_table_decode_alone():
  codes, scales = drawn(FP8_ROWS)
  table = Quantised(jnp.asarray(codes), jnp.asarray(scales), "fp8_rows")
  rows = jnp.asarray([[3, 69], [0, 3]])
  np.testing.assert_array_equal(table.take(rows), table.dequantise()[rows])
  codes, scales = drawn(FP8_TILES)
  with pytest.raises(ValueError, match="format is 'fp8_tiles'"):
    Quantised(jnp.asarray(codes), jnp.asarray(scales), "fp8_tiles").take(rows)


def test_stacks_scan_and_cross_jit_without_losing_their_format():
  codes, scales = (np.stack(a) for a in zip(drawn(FP4_ROWS, seed=1), drawn(FP4_ROWS, seed=2)))
  stack = Quantised(jnp.asarray(codes), jnp.asarray(scales), "fp4_rows")
  _, scanned = jax.jit(lambda s: jax.lax.scan(lambda c, w: (c, w.dequantise()), 0, s))(stack)
  np.testing.assert_array_equal(scanned, stack.dequantise())
  tree = {"kept": stack, "plain": jnp.ones(3)}
  decoded = dequantised(tree, jnp.bfloat16)
  assert decoded["kept"].dtype == jnp.bfloat16
  assert decoded["plain"] is tree["plain"]
  assert set(weight_formats.FORMATS) == {"fp8_tiles", "fp8_rows", "fp4_rows"}
