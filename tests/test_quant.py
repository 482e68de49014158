"""Fake quantisation: what storage gives back forward, the identity backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.quant import QuantPlan, fake_quant
from pallas_kernels import dispatch
from pallas_kernels.quantize import op
from pallas_kernels.quantize.formats import FORMATS

each_format = pytest.mark.parametrize("name", FORMATS)


def normal(shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def through_storage(x, name):
  fmt = FORMATS[name]
  codes, scale_bytes = op.quantize(x, fmt)
  if fmt.element.bits == 4:
    codes = op.unpack_nibbles(op.pack_nibbles(codes))
  return op.dequantize(codes, scale_bytes, fmt, x.dtype)


def bits(x):
  return np.asarray(x).view(f"u{np.asarray(x).itemsize}")


class TestPlan:

  def test_released_formats(self):
    assert QuantPlan.released() == QuantPlan(
        main_kv="fp4_e2m1_e4m3_16", index="mxfp4", window_kv="fp8_e4m3_e8m0_32"
    )
    assert QuantPlan.none() == QuantPlan(main_kv=None, index=None, window_kv=None)

  def test_is_static(self):
    traced = jax.jit(lambda x, plan: fake_quant(x, plan.index), static_argnums=1)
    x = normal((2, 32))
    np.testing.assert_array_equal(traced(x, QuantPlan.none()), x)
    rounded = traced(x, QuantPlan.released())
    np.testing.assert_array_equal(rounded, traced(x, QuantPlan(None, "mxfp4", None)))
    assert (rounded != x).any()

  def test_unknown_format_is_refused(self):
    with pytest.raises(ValueError, match=r"window_kv='fp4'.*None, 'fp4_e2m1_e4m3_16', 'mxfp4'"):
      QuantPlan(main_kv=None, index=None, window_kv="fp4")


class TestFakeQuant:

  @each_format
  @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
  def test_forward_is_what_storage_gives_back(self, name, dtype):
    x = jnp.asarray(normal((3, 5, 64)) * 7, dtype)
    run = functools.partial(fake_quant, format_name=name)

    @jax.jit
    def every_way(x):
      scanned = jax.lax.scan(lambda carry, row: (carry, run(row)), 0, x)[1]
      return run(x), jax.vmap(run)(x), jax.checkpoint(run)(x), scanned, jax.vjp(run, x)[0]

    stored = bits(jax.jit(through_storage, static_argnums=1)(x, name))
    for value in every_way(x):
      np.testing.assert_array_equal(bits(value), stored)

  @each_format
  @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
  def test_gradient_is_the_identity(self, name, dtype):
    sizes = np.float32([0, 1e-30, 1e-2, 1, 1e4, 1e38])
    x = jnp.asarray(normal((6, 64)).clip(-1, 1) * sizes[:, None], dtype)
    cotangent = jnp.asarray(normal((6, 64), seed=1), dtype)

    @jax.jit
    def both_modes(x, cotangent):
      run = jax.vmap(jax.checkpoint(lambda row: fake_quant(row, name)))
      value, pull = jax.vjp(run, x)
      return value, pull(cotangent)[0], jax.jvp(run, (x,), (cotangent,))[1]

    value, gradient, tangent = both_modes(x, cotangent)
    assert np.isfinite(value).all()
    np.testing.assert_array_equal(bits(gradient), bits(cotangent))
    np.testing.assert_array_equal(bits(tangent), bits(cotangent))

  @each_format
  def test_gradient_through_a_scan(self, name):
    x, weights = normal((4, 64)), normal((4, 64), seed=1)

    def loss(x):
      def step(total, row):
        value, weight = row
        return total + fake_quant(value, name) @ weight, None

      return jax.lax.scan(jax.checkpoint(step), 0.0, (x, weights))[0]

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), weights)

  def test_none_leaves_x_alone(self):
    x = jnp.asarray(normal((2, 7)))
    assert fake_quant(x, None) is x

  @each_format
  def test_ragged_block_names_component_width_and_block(self, name):
    block = FORMATS[name].block
    with pytest.raises(ValueError, match=rf"main_kv has 40 channels.*{block}"):
      fake_quant(jnp.zeros((2, 40)), name, component="main_kv")

  def test_unknown_format_is_refused(self):
    with pytest.raises(
        ValueError, match=r"index='fp5' is no storage format: allowed are None, 'fp4"
    ):
      fake_quant(jnp.zeros((2, 32)), "fp5", component="index")


@pytest.mark.parametrize(
    ("name", "width"), [("fp8_e4m3_e8m0_32", 512), ("mxfp4", 128), ("fp4_e2m1_e4m3_16", 512)]
)
def test_whole_blocks_of_rows_go_through_the_kernels_of_the_cache_on_a_tpu(
    monkeypatch, name, width
):
  """Bit for bit, with zeros, ties and large values; gradients pass straight through."""
  x = normal((2, 128, width)) * np.float32(2.0) ** np.arange(-64, 64)[:, None]
  x[0, 0], x[1, 3] = 0, np.round(x[1, 3] * 4) / 4
  x = jnp.asarray(x, jnp.bfloat16)
  expected = fake_quant(x, name)
  monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
  with pltpu.force_tpu_interpret_mode():
    own, pull = jax.vjp(lambda x: fake_quant(x, name), x)
  np.testing.assert_array_equal(own, expected)
  np.testing.assert_array_equal(pull(x)[0], x)
