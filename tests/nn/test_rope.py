"""Both rotary tables at released sizes, and what a rotation must keep."""

import jax
import numpy as np
import pytest

from configs import flash
from deepseek_jax.config import Config
from deepseek_jax.nn.rope import Rotation, frequencies, rotate, rotation

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
