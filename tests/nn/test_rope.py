"""Both rotary tables at released sizes, and what a rotation must keep."""

import jax
import numpy as np
import pytest

from configs import flash
from deepseek_jax.config import Config
from deepseek_jax.nn.rope import Rotation, frequencies, rotate, rotation
from pallas_kernels import dispatch

RELEASED = Config.from_config_dict(flash.get_config()).model
TABLES = {"swa": 0, "comp": 2}


@pytest.fixture(scope="module", params=TABLES)
def case(request, golden):
  ops = golden("ops")
  named = {
      k.removeprefix(f"rope/{request.param}_"): v
      for k, v in ops.items()
      if k.startswith(f"rope/{request.param}_")
  }
  return named | {"ratio": TABLES[request.param], "x": ops["rope/x"], "at": ops["rope/positions"]}


def test_released_frequencies(case):
  freqs = frequencies(RELEASED, case["ratio"])
  assert freqs.dtype == np.float32
  np.testing.assert_array_equal(freqs, case["freqs"])


def test_released_table_up_to_the_last_position(case):
  """Angles are f32 products: at 1,048,575 a frequency's last bit turns its pair by 0.03 radians."""
  freqs = frequencies(RELEASED, case["ratio"])
  table = jax.jit(lambda at: rotation(at, freqs))(case["at"][None].astype(np.int32))
  for name in ("cos", "sin"):
    np.testing.assert_allclose(getattr(table, name)[0], case[name], atol=1e-6, rtol=0)


def test_released_rotation_and_inverse(case):
  table = Rotation(case["cos"][None], case["sin"][None])
  for name, inverse in (("forward", False), ("inverse", True)):
    y = jax.jit(rotate, static_argnames="inverse")(case["x"][None], table, inverse=inverse)
    np.testing.assert_allclose(y[0], case[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inverse", [False, True])
def test_a_rotation_on_a_tpu_is_the_same_by_a_product(monkeypatch, dtype, inverse):
  table = rotation(jax.numpy.arange(5)[None] * 1000, frequencies(RELEASED, 2))
  x = jax.numpy.asarray(np.random.default_rng(0).normal(size=(1, 5, 3, 512)), dtype)
  expected = rotate(x, table, inverse=inverse)
  monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
  own = rotate(x, table, inverse=inverse)
  assert own.dtype == expected.dtype
  np.testing.assert_array_equal(own[..., :-64], expected[..., :-64])
  # One rounding apart at most, where the compiler joins a product and a sum.
  close = dict(rtol=2**-7 if dtype == "bfloat16" else 1e-6, atol=1e-6)
  np.testing.assert_allclose(own.astype("float32"), expected.astype("float32"), **close)
