"""Memory of a training step, by the compiler's account: nothing is allocated or run."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from configs import tiny
from deepseek_jax.config import Config
from deepseek_jax.nn.rows import Rows
from deepseek_jax.train import step
from deepseek_jax.train.data import Batch


def _peak_bytes(length: int) -> int:
  config = Config.from_config_dict(tiny.get_config())
  train = dataclasses.replace(config.train, batch_size=1, seq_len=length, accumulation=1)
  config = dataclasses.replace(config, train=train)
  ints = jax.ShapeDtypeStruct((1, 1, length), jnp.int32)
  batch = Batch(
      tokens=ints,
      rows=Rows(ints, ints, ints, jax.ShapeDtypeStruct(ints.shape, jnp.bool_)),
      ngrams=jax.ShapeDtypeStruct((*ints.shape, config.model.engram_max_ngram_size), jnp.int32),
      targets=ints,
      weights=jax.ShapeDtypeStruct(ints.shape, jnp.float32),
  )
  graphdef, _ = step.abstract_model(config)
  state = jax.eval_shape(lambda: step.init_state(config))
  memory = step.make_step(graphdef, config).lower(state, batch).compile().memory_analysis()
  return memory.temp_size_in_bytes + memory.argument_size_in_bytes


@pytest.mark.slow
def test_memory_of_a_step_grows_linearly_with_the_rows():
  """8,192 rows need at most 2.5 times the memory of 4,096: no score array of all rows exists."""
  assert _peak_bytes(8192) <= 2.5 * _peak_bytes(4096)
