"""Stages on the model's own responses: a mesh writes and learns what one device does."""

import dataclasses
import zlib

import jax
import numpy as np
import pytest
from flax import nnx

from deepseek_jax import sharding
from deepseek_jax.checkpoint.training import names_of
from deepseek_jax.config import MeshConfig, ReplayConfig
from deepseek_jax.train import data, step
from tests.train import policies
from tests.train.policies import EVERY_MODE, NEW, PROMPT_LEN, SMALL, Given
from tests.train.talks import conversation

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile")]

MESH = MeshConfig(fsdp=2, expert=2)
LINES = dict(batch_size=4, accumulation=1, seq_len=2 * (PROMPT_LEN + NEW))
OBJECTIVES = {
    "grpo": (SMALL, {}),
    "distill": (
        EVERY_MODE, dict(objective="distill", prompts="data", group=1, teacher="somewhere")
    ),
}  # fmt: skip


def made(config, mesh=None):
  """Rollouts of prompts with hits, and some shorter than the window."""
  examples = [conversation([(4, 4)])]
  reward = lambda text, _: zlib.crc32(text.encode()) / 2**32
  return Given(config, policies.prompts(), mesh=mesh, examples=examples, reward=reward)


def on(mesh, tree):
  return jax.device_put(tree, sharding.placed(sharding.parameter_specs(tree, mesh), mesh))


@pytest.fixture(scope="module", params=OBJECTIVES)
def both(request):
  """Rollout and gradient on one device and on four."""
  replay = ReplayConfig(decoder_len=14, encoder=1.0)
  model, how = OBJECTIVES[request.param]
  config = policies.experiment(model, replay, LINES, **how)
  graphdef, params = policies.split_model(model)
  teacher = ()
  if request.param == "distill":
    teacher = (nnx.merge(graphdef, policies.split_model(model, 1)[1]),)
  written = made(config)
  batch = next(written).batch
  gradient = jax.jit(step.make_gradient(graphdef, config))(params, batch, *teacher)

  config = dataclasses.replace(config, mesh=MESH)
  mesh = sharding.make_mesh(MESH, jax.devices()[: MESH.devices])
  spread, theirs = on(mesh, params), tuple(on(mesh, one) for one in teacher)
  shared = made(config, mesh)
  shared.see(spread)
  placed = next(shared).batch
  specs = data.batch_specs(placed, leading=1)
  placed = sharding.put(placed, sharding.placed(specs, mesh))
  again = jax.jit(step.make_gradient(graphdef, config, mesh))(spread, placed, *theirs)
  return (written, gradient), (shared, again)


def test_four_devices_write_what_one_writes(both):
  (one, _), (four, _) = both
  expected, found = one._rollout, four._rollout
  assert expected.hits.any()
  assert not expected.hits.all()
  assert len(set(expected.written)) > 1
  for name, a, b in zip(expected._fields, expected, found):
    if name == "logprobs":
      np.testing.assert_allclose(a, b, atol=2e-5)
    else:
      np.testing.assert_array_equal(a, b, err_msg=name)


def test_four_devices_have_the_gradient_of_one(both):
  (_, expected), (_, found) = both
  assert float(expected.counts.targets) > 0
  for a, b in zip(expected.sums, found.sums):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(expected.load, found.load)
  whole = names_of(expected.grads)
  assert max(np.abs(value).max() for value in whole.values()) > 1e-3
  for name, value in names_of(found.grads).items():
    scale = np.abs(whole[name]).max() + 1e-3
    assert np.abs(np.asarray(value) - whole[name]).max() <= 5e-5 * scale, name
