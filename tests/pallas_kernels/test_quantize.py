"""Laws of the block formats and the released bytes they must reproduce."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch
from pallas_kernels.quantize import op
from pallas_kernels.quantize.formats import FORMATS, FP4_MAIN, FP8_WINDOW, MXFP4

GOLDEN = {"fp8": FP8_WINDOW, "fp4": FP4_MAIN, "mxfp4": MXFP4}
NAN_BYTE = {"e8m0": 255, "e4m3": 0x7F}

quantize = jax.jit(op.quantize, static_argnums=1)
dequantize = jax.jit(op.dequantize, static_argnums=(2, 3))
fake_quantize = jax.jit(op.fake_quantize, static_argnums=1)
pack_nibbles = jax.jit(op.pack_nibbles)
unpack_nibbles = jax.jit(op.unpack_nibbles)
dequantize_rows = jax.jit(op.dequantize_rows)
dequantize_tiles = jax.jit(op.dequantize_tiles, static_argnums=2)

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def assert_same_bits(actual, expected):
  chex.assert_trees_all_equal_dtypes(actual, expected)
  bits = np.dtype(f"u{np.asarray(expected).itemsize}")
  np.testing.assert_array_equal(np.asarray(actual).view(bits), np.asarray(expected).view(bits))


def neighbours(values):
  """Each f32 value between the next one below and the next one above."""
  values = np.float32(values)
  return np.concatenate([np.nextafter(values, 0), values, np.nextafter(values, np.float32(np.inf))])


def normal(shape=(512, 512), seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def one_scale(values, fmt, top):
  """Each value in a block of its own, whose other channels hold zeros and `top`."""
  values = np.asarray(values, np.float32)
  x = np.zeros((values.size, fmt.block), np.float32)
  x[:, 0], x[:, 1] = values, top
  return x


@pytest.fixture(name="ops")
def fixture_ops(golden):
  return golden("ops")


class TestGolden:

  @pytest.mark.parametrize("group", GOLDEN)
  def test_codes_scales_and_values(self, ops, group):
    fmt = GOLDEN[group]
    codes, scale_bytes = quantize(ops[f"{group}/x"], fmt)
    assert_same_bits(codes, ops[f"{group}/codes"])
    assert_same_bits(scale_bytes, ops[f"{group}/scale_bytes"])
    assert_same_bits(dequantize(codes, scale_bytes, fmt), ops[f"{group}/deq"])
    assert_same_bits(fake_quantize(ops[f"{group}/x"], fmt), ops[f"{group}/deq"])

  @pytest.mark.parametrize("group", GOLDEN)
  def test_same_outside_jit(self, ops, group):
    fmt, x = GOLDEN[group], jnp.asarray(ops[f"{group}/x"][:35])
    codes, scale_bytes = op.quantize(x, fmt)
    assert_same_bits(codes, ops[f"{group}/codes"][:35])
    assert_same_bits(scale_bytes, ops[f"{group}/scale_bytes"][:35])
    assert_same_bits(op.dequantize(codes, scale_bytes, fmt), ops[f"{group}/deq"][:35])
    assert_same_bits(op.fake_quantize(x, fmt), ops[f"{group}/deq"][:35])

  @pytest.mark.parametrize("group", ["fp4", "mxfp4"])
  def test_low_nibble_is_the_even_channel(self, ops, group):
    assert_same_bits(pack_nibbles(ops[f"{group}/codes"]), ops[f"{group}/packed"])
    assert_same_bits(unpack_nibbles(ops[f"{group}/packed"]), ops[f"{group}/codes"])

  def test_fp8_tiles_with_a_ragged_last_one(self, ops):
    decoded = dequantize_tiles(ops["wfp8/codes"], ops["wfp8/scale_bytes"])
    assert_same_bits(decoded, ops["wfp8/deq"])

  def test_mxfp4_experts(self, ops):
    packed, scales = ops["wfp4/packed_i8"], ops["wfp4/scale_bytes"]
    assert_same_bits(dequantize_rows(packed, scales), ops["wfp4/deq"])
    stacked = dequantize_rows(packed.reshape(2, 12, 32), scales.reshape(2, 12, 2))
    assert_same_bits(stacked.reshape(24, 64), ops["wfp4/deq"])


class TestElements:

  def test_e2m1_rounds_to_nearest_even(self):
    rows = [
        (0.25, 0), (0.2500001, 0.5), (0.75, 1), (1.25, 1), (1.2500001, 1.5), (1.75, 2), (2.5, 2),
        (2.5000003, 3), (3.5, 4), (5, 4), (5.0000005, 6), (6, 6), (-1.25, -1), (-2.5, -2), (-5, -4),
    ]  # fmt: skip
    given_values, expected = np.float32(rows).T
    for fmt in (MXFP4, FP4_MAIN):  # 6 makes the scale exactly 1
      actual = fake_quantize(one_scale(given_values, fmt, top=6), fmt)[:, 0]
      assert_same_bits(actual, expected)

  def test_ties_under_a_scale(self):
    half = one_scale([-0.625], MXFP4, top=3)
    assert fake_quantize(half, MXFP4)[0, 0] == -0.5  # -1.25 at scale 1/2: code of -1.0
    assert quantize(half, MXFP4)[0][0, 0] == 8 + 2
    double = one_scale([0.5, np.nextafter(np.float32(0.5), np.float32(1))], MXFP4, top=12)
    assert fake_quantize(double, MXFP4)[:, 0].tolist() == [0.0, 1.0]
    assert quantize(double, MXFP4)[0][:, 0].tolist() == [0, 1]

  def test_e4m3_rows(self):
    rows = [
        (2**-10, 0), (2**-10 * (1 + 2**-20), 2**-9), (3 * 2**-10, 2**-8), (1.0625, 1.0),
        (1.1875, 1.25), (448, 448), (-448, -448),
    ]  # fmt: skip
    given_values, expected = np.float32(rows).T
    actual = fake_quantize(one_scale(given_values, FP8_WINDOW, top=448), FP8_WINDOW)[:, 0]
    assert_same_bits(actual, expected)

  @pytest.mark.parametrize(
      ("fmt", "value", "direct", "through_bf16"),
      [(FP8_WINDOW, 1.0625, 1.125, 1.0), (MXFP4, 1.25, 1.5, 1.0), (FP4_MAIN, 1.25, 1.5, 1.0)],
  )
  def test_no_double_rounding(self, fmt, value, direct, through_bf16):
    x = jnp.asarray(one_scale([value + 2.0**-12], fmt, top=fmt.element.largest))
    assert fake_quantize(x, fmt)[0, 0] == direct
    assert fake_quantize(x.astype(jnp.bfloat16), fmt)[0, 0] == through_bf16

  def test_every_tie_under_every_e4m3_scale(self):
    scales = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = neighbours(np.outer(ties, scales)).ravel()
    scales = np.tile(scales, 3 * ties.size)
    codes, scale_bytes = quantize(one_scale(values, FP4_MAIN, top=6 * scales), FP4_MAIN)
    np.testing.assert_array_equal(_e4m3(scale_bytes)[:, 0], scales)
    quotients = (values / scales).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(_e2m1(codes)[:, 0], quotients)


def _e4m3(codes):
  return np.asarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _e2m1(codes):
  return np.asarray(codes).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


class TestScales:

  @pytest.mark.parametrize(
      ("fmt", "amax", "scale"),
      [
          (FP8_WINDOW, 448, 1.0), (FP8_WINDOW, 449, 2.0), (FP8_WINDOW, 1, 2**-8),
          (FP8_WINDOW, 1e-5, 2**-22), (FP8_WINDOW, 0, 2**-22),
          (FP4_MAIN, 1, 0.171875), (FP4_MAIN, 10, 1.625), (FP4_MAIN, 22.6, 3.75),
          (FP4_MAIN, 0, 2**-9), (FP4_MAIN, 2689, 448.0), (FP4_MAIN, 1e30, 448.0),
          (MXFP4, 6, 1.0), (MXFP4, 7, 2.0), (MXFP4, 0, 2.0**-126),
      ],
  )  # fmt: skip
  def test_known_scales(self, fmt, amax, scale):
    scale_bytes = quantize(one_scale([0], fmt, top=amax), fmt)[1][0, 0]
    stored = _e4m3(scale_bytes) if fmt.scale == "e4m3" else 2.0 ** (int(scale_bytes) - 127)
    assert stored == scale

  def test_e4m3_scale_is_the_true_quotient_rounded_to_even(self):
    grid = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    amax = np.concatenate([neighbours(6 * points), np.abs(normal((20_000,))) * 3])
    amax = amax[(amax >= 6 * 2.0**-9) & (amax <= 2688)]
    scale_bytes = quantize(one_scale(np.zeros_like(amax), FP4_MAIN, top=amax), FP4_MAIN)[1][:, 0]
    expected = (amax / np.float32(6)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(scale_bytes, expected)

  @pytest.mark.parametrize("fmt", [FP8_WINDOW, MXFP4], ids=lambda fmt: fmt.name)
  def test_e8m0_scale_is_the_power_of_two_at_or_above(self, fmt):
    powers = np.exp2(np.arange(-12.0, 40.0)).astype(np.float32)
    amax = neighbours(powers * fmt.element.largest)
    wanted = amax * np.float32(1 / fmt.element.largest)
    mantissa, exponent = np.frexp(wanted)
    expected = np.where(mantissa == 0.5, exponent - 1, exponent) + 127
    scale_bytes = quantize(one_scale(np.zeros_like(amax), fmt, top=amax), fmt)[1][:, 0]
    np.testing.assert_array_equal(scale_bytes, expected)


class TestRange:

  @each_format
  def test_finite_in_finite_out(self, fmt):
    sizes = np.float32([0, 1e-38, 1e-30, 1e-10, 1e-3, 1e-2, 1e4, 1e30, 1e38, 3.4e38])
    x = normal((10, 64)).clip(-1, 1) * sizes[:, None]
    codes, scale_bytes = quantize(x, fmt)
    assert np.isfinite(fake_quantize(x, fmt)).all()
    assert np.isfinite(fake_quantize(jnp.asarray(x, jnp.bfloat16), fmt)).all()
    assert not (np.asarray(scale_bytes) == NAN_BYTE[fmt.scale]).any()
    assert fmt.element.bits == 4 or np.isfinite(_e4m3(codes)).all()

  @each_format
  def test_f32_max_does_not_round_up_to_infinity(self, fmt):
    x = np.full((1, fmt.block), np.finfo(np.float32).max)
    top = {FP8_WINDOW: 1.875 * 2.0**127, MXFP4: 1.5 * 2.0**127, FP4_MAIN: 2688.0}[fmt]
    np.testing.assert_array_equal(fake_quantize(x, fmt), np.full_like(x, top))

  @each_format
  def test_a_zero_block_among_others_is_zero(self, fmt):
    x = normal((3, 2 * fmt.block))
    x[1, : fmt.block] = 0
    codes, scale_bytes = quantize(x, fmt)
    assert not np.asarray(codes)[1, : fmt.block].any()
    assert not (np.asarray(scale_bytes) == NAN_BYTE[fmt.scale]).any()
    decoded = np.asarray(dequantize(codes, scale_bytes, fmt))
    assert not decoded[1, : fmt.block].any()
    assert decoded[1, fmt.block :].any()

  def test_below_half_the_smallest_scale_is_zero_not_garbage(self):
    # amax / 6 rounds to an E4M3 zero here: without the floor, x / 0.
    x = np.full((1, 16), 6 * 2.0**-10 * 0.16, np.float32)
    codes, scale_bytes = quantize(x, FP4_MAIN)
    assert scale_bytes.tolist() == [[1]]
    assert codes.tolist() == [[1] * 16]

  @each_format
  def test_infinity_saturates(self, fmt):
    x = normal((1, 2 * fmt.block))
    x[0, :2] = [np.inf, -np.inf]
    huge = np.where(np.isinf(x), np.copysign(np.finfo(np.float32).max, x), x).astype(np.float32)
    assert_same_bits(fake_quantize(x, fmt), fake_quantize(huge, fmt))
    assert np.isfinite(fake_quantize(x, fmt)).all()
    assert quantize(x, fmt)[1][0, 0] == quantize(huge, fmt)[1][0, 0]

  def test_fp8_scale_grows_where_a_cast_would_make_nan(self):
    x = one_scale([448, 464, 464.1, 480, -1e9, np.inf], FP8_WINDOW, top=0)
    expected = [448, 448, 480, 480, -240 * 2.0**22, 240 * 2.0**120]
    assert fake_quantize(x, FP8_WINDOW)[:, 0].tolist() == expected

  @each_format
  def test_nan_marks_its_block_and_no_other(self, fmt):
    x = normal((2, 3 * fmt.block))
    clean = np.asarray(fake_quantize(x, fmt))
    x[0, fmt.block + 3] = np.nan
    block = np.zeros(x.shape, bool)
    block[0, fmt.block : 2 * fmt.block] = True
    codes, scale_bytes = quantize(x, fmt)
    assert scale_bytes[0, 1] == NAN_BYTE[fmt.scale]
    assert not np.asarray(codes)[block].any()
    for decoded in (fake_quantize(x, fmt), dequantize(codes, scale_bytes, fmt)):
      np.testing.assert_array_equal(decoded, np.where(block, np.nan, clean))

  @each_format
  def test_nan_is_found_anywhere_in_a_block(self, fmt):
    """XLA's CPU loses it in a maximum of floats at most places."""
    x = np.zeros((fmt.block, 4 * fmt.block), np.float32)
    x[np.arange(fmt.block), fmt.block + np.arange(fmt.block)] = np.nan
    expected = np.zeros(x.shape, bool)
    expected[:, fmt.block : 2 * fmt.block] = True
    np.testing.assert_array_equal(np.isnan(fake_quantize(x, fmt)), expected)
    np.testing.assert_array_equal(np.isnan(dequantize(*quantize(x, fmt), fmt)), expected)

  @each_format
  def test_subnormals_are_zeros(self, fmt):
    x = np.full((1, fmt.block), 2.0**-127, np.float32) * np.float32([1, -1] * (fmt.block // 2))
    assert_same_bits(fake_quantize(x, fmt), np.copysign(np.zeros_like(x), x))


class TestLaws:

  @each_format
  @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
  def test_fake_is_the_way_through_storage(self, fmt, dtype):
    x = jnp.asarray(normal((64, 128)) * np.exp2(np.linspace(-40, 40, 64))[:, None], dtype)
    codes, scale_bytes = quantize(x, fmt)
    if fmt.element.bits == 4:
      codes = unpack_nibbles(pack_nibbles(codes))
    assert_same_bits(fake_quantize(x, fmt), dequantize(codes, scale_bytes, fmt, dtype))

  @each_format
  @settings(max_examples=40, deadline=None, derandomize=True)
  @given(data=st.data())
  def test_matches_numpy(self, fmt, data):
    floats = st.floats(-3e4, 3e4, width=32, allow_subnormal=False)
    x = np.float32([data.draw(st.lists(floats, min_size=32, max_size=32))])
    assert_same_bits(fake_quantize(x, fmt), _in_numpy(x, fmt))

  @each_format
  def test_idempotent(self, fmt):
    x = normal((256, 512)) * np.exp2(np.linspace(-4, 12, 256))[:, None].astype(np.float32)
    once = fake_quantize(x, fmt)
    assert_same_bits(fake_quantize(once, fmt), once)

  def test_idempotent_but_for_one_hole(self):
    # The subnormal E4M3 scale 2^-8 serves an amax of 9 and 10 steps of 2^-9 with the element 4, and
    # 4 * 2^-8 alone would take the scale 2^-9, whose largest value is 6. It is the format's own.
    amax = np.float32(2.0**-9) * np.linspace(6, 60, 2001, dtype=np.float32)
    once = fake_quantize(one_scale(np.zeros_like(amax), FP4_MAIN, top=amax), FP4_MAIN)
    moved = (np.asarray(fake_quantize(once, FP4_MAIN)) != np.asarray(once)).any(-1)
    np.testing.assert_array_equal(moved, (amax >= 9 * 2.0**-9) & (amax <= 10 * 2.0**-9))

  @pytest.mark.parametrize(
      ("fmt", "budget"), [(FP4_MAIN, 0.095), (MXFP4, 0.1157), (FP8_WINDOW, 0.0265)]
  )
  @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
  def test_error_budget(self, fmt, budget, dtype):
    x = jnp.asarray(normal(), dtype)
    error = fake_quantize(x, fmt).astype(jnp.float32) - x.astype(jnp.float32)
    relative = jnp.linalg.norm(error) / jnp.linalg.norm(x.astype(jnp.float32))
    assert relative == pytest.approx(budget, rel=0.1)

  def test_every_pair_of_nibbles_survives(self):
    packed = np.arange(256, dtype=np.uint8)
    codes = unpack_nibbles(packed)
    assert_same_bits(codes[0::2], packed & 15)
    assert_same_bits(codes[1::2], packed >> 4)
    assert_same_bits(pack_nibbles(codes), packed)

  def test_every_e4m3_code_and_scale_decodes(self):
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    one = np.full((8, 1), 127, np.uint8)
    np.testing.assert_array_equal(dequantize(codes, one, FP8_WINDOW), _e4m3(codes))
    scale_bytes = np.arange(127, dtype=np.uint8)[:, None]
    ones = np.full((127, 16), 2, np.uint8)
    decoded = dequantize(ones, scale_bytes, FP4_MAIN)
    np.testing.assert_array_equal(decoded[:, :1], _e4m3(scale_bytes))

  def test_every_weight_scale_decodes(self):
    scale_bytes = np.arange(256, dtype=np.uint8)[:, None]
    with np.errstate(over="ignore"):
      expected = np.float64(4.0) * 2.0 ** (scale_bytes.astype(np.float64) - 127)
      expected = np.where(scale_bytes == 255, np.nan, expected).astype(np.float32)
    packed = np.full((256, 16), 0x66, np.int8)  # 4.0 twice
    np.testing.assert_array_equal(dequantize_rows(packed, scale_bytes)[:, :1], expected)
    codes = np.full((256, 1), 0x48, np.uint8)  # 4.0
    np.testing.assert_array_equal(dequantize_tiles(codes, scale_bytes, 1), expected)

  def test_bytes_of_an_entry(self):
    assert FP4_MAIN.num_bytes(512) == 288
    assert MXFP4.num_bytes(128) == 68
    assert FP8_WINDOW.num_bytes(512) == 528


def _in_numpy(x, fmt):
  """The specification with true divisions and ml_dtypes' casts, for blocks above the floor."""
  blocks = x.reshape(*x.shape[:-1], -1, fmt.block)
  amax = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(fmt.floor))
  if fmt.scale == "e8m0":
    mantissa, exponent = np.frexp(amax * np.float32(1 / fmt.element.largest))
    scale = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
  else:
    scale = np.minimum(amax / np.float32(6), 448).astype(ml_dtypes.float8_e4m3fn)
    scale = scale.astype(np.float32)
  element = {4: ml_dtypes.float4_e2m1fn, 8: ml_dtypes.float8_e4m3fn}[fmt.element.bits]
  quotient = np.clip(blocks / scale, -fmt.element.largest, fmt.element.largest).astype(np.float32)
  return (quotient.astype(element).astype(np.float32) * scale).reshape(x.shape)


class TestRefusals:

  @each_format
  def test_ragged_block(self, fmt):
    with pytest.raises(ValueError, match=f"24 channels.*multiples of {fmt.block}"):
      op.quantize(jnp.zeros((2, 24)), fmt)
    with pytest.raises(ValueError, match=f"24 channels.*multiples of {fmt.block}"):
      op.fake_quantize(jnp.zeros((2, 24)), fmt)

  def test_dtype(self):
    with pytest.raises(ValueError, match="float16: allowed are float32 and bfloat16"):
      op.quantize(jnp.zeros((2, 32), jnp.float16), MXFP4)

  def test_odd_channels(self):
    with pytest.raises(ValueError, match="3 channels"):
      op.pack_nibbles(jnp.zeros((1, 3), jnp.uint8))

  def test_scale_shapes(self):
    codes = jnp.zeros((40, 96), jnp.uint8)
    with pytest.raises(ValueError, match=r"\(40, 4\).*need \(40, 3\)"):
      op.dequantize(codes, jnp.zeros((40, 4), jnp.uint8), MXFP4)
    with pytest.raises(ValueError, match=r"\(1, 3\).*need \(2, 3\)"):
      op.dequantize_tiles(codes, jnp.zeros((1, 3), jnp.uint8))
    with pytest.raises(ValueError, match=r"\(40, 3\).*need \(40, 6\)"):
      op.dequantize_rows(codes.astype(jnp.int8), jnp.zeros((40, 3), jnp.uint8))

  def test_implementation(self):
    with pytest.raises(ValueError, match="implementation='cuda': allowed are None, 'reference'"):
      op.quantize(jnp.zeros((1, 32)), MXFP4, implementation="cuda")
    assert dispatch.resolve(None, ("reference",)) == "reference"
